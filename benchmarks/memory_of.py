"""Memory usage of a workload, measured in a new process."""

import ctypes
import multiprocessing
import signal
import sys
from multiprocessing.connection import Connection

import torch

from benchmarks import workload
from system.memory import memory_mb, peak_memory_mb, reset_peak_memory

# The fork server imports torch once, so that each measurement starts in milliseconds.
_METHOD = "forkserver" if sys.platform == "linux" else "spawn"


def measure_memory(kind: str, device: str, threads: int, options: dict) -> dict[str, float] | None:
    """Runs one workload once in a fresh process.

    Args:
        kind: "attention_pass" or "training_step" of benchmarks/workload.py; `options` are its arguments.
        threads: number of PyTorch threads, as in this process.

    Returns:
        In MB, "peak": the peak memory, minus that before the workload was built; "kept": the memory held between the
        forward and the backward pass, without the inputs. None if the process died, for example because memory ran out.
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
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it silently; the parent reports it
    torch.set_num_threads(threads)
    _disable_memory_reuse()
    device_type = device.partition(":")[0]
    build = getattr(workload, kind)
    # A first run, so that libraries, threads and compiled kernels are not counted.
    build(**options | {"context_length": min(1024, options["context_length"]), "sequences": 1}, device=device)()
    reset_peak_memory(device_type)
    before = memory_mb(device_type)
    work = build(**options, device=device)
    built = memory_mb(device_type)
    output = work.forward()
    kept = memory_mb(device_type) - built
    work.backward(output)
    answer.send({"peak": peak_memory_mb(device_type) - before, "kept": kept})


def _disable_memory_reuse() -> None:
    """Makes glibc return freed blocks of at least 64 KiB to the system, so that they are not counted."""
    M_MMAP_THRESHOLD = -3
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(M_MMAP_THRESHOLD, 64 * 1024)
