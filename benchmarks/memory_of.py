"""The memory a workload takes, measured in a process of its own that has done nothing else."""

import ctypes
import multiprocessing
import signal
import sys
from multiprocessing.connection import Connection

import torch

from benchmarks import workload
from system.memory import memory_mb, peak_memory_mb, reset_peak_memory

# A server process that has imported torch and run nothing yet; every measurement forks from it in milliseconds.
_METHOD = "forkserver" if sys.platform == "linux" else "spawn"


def measure_memory(kind: str, device: str, threads: int, options: dict) -> dict[str, float] | None:
    """Runs one workload once in a fresh process.

    Args:
        kind: "attention_pass" or "training_step" of benchmarks/workload.py; `options` are its arguments.
        threads: torch's threads, as in the process that asks.

    Returns:
        "peak": the most that was taken, above what the process had before; "kept": what lay there between the
        forward and the backward half, without the inputs, in MB. None: the process died, as it does when memory
        runs out.
    """
    context = multiprocessing.get_context(_METHOD)
    if _METHOD == "forkserver":
        context.set_forkserver_preload(["benchmarks.memory_of"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, kind, device, threads, options), daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return None
    finally:
        process.join()


def _child(answer: Connection, kind: str, device: str, threads: int, options: dict) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it too, and the process that asks says so
    torch.set_num_threads(threads)
    _give_memory_back_at_once()
    device_type = device.partition(":")[0]
    build = getattr(workload, kind)
    # Once before, so that libraries, threads and compiled kernels are there and do not count.
    build(**options | {"context_length": min(1024, options["context_length"]), "sequences": 1}, device=device)()
    reset_peak_memory(device_type)
    before = memory_mb(device_type)
    work = build(**options, device=device)
    built = memory_mb(device_type)
    output = work.forward()
    kept = memory_mb(device_type) - built
    work.backward(output)
    answer.send({"peak": peak_memory_mb(device_type) - before, "kept": kept})


def _give_memory_back_at_once() -> None:
    """Tells glibc to give every freed block from 64 KiB up to the system, or old blocks would count as taken."""
    M_MMAP_THRESHOLD = -3
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
