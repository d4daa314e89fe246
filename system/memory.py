"""Memory of this process: current and peak usage in MB (2^20 bytes), checks, and the allocator's settings.

Imports nothing slow.
"""

import contextlib
import ctypes
import errno
import gc
import re
import sys
from pathlib import Path

import psutil

from system.errors import UserError

_NO_MEMORY = re.compile(
    r"can(?:'t|not) allocate memory|not enough memory|out of memory|bad allocation|bad_alloc|failed to map segment",
    re.IGNORECASE,
)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt, from glibc's malloc.h


def memory_mb(device_type: str = "cpu") -> float:
    """Memory in use now: tensors on a GPU, the whole process on a CPU."""
    if device_type == "cuda":
        import torch

        return torch.cuda.memory_allocated() / 2**20
    return psutil.Process().memory_info().rss / 2**20


def reset_peak_memory(device_type: str = "cpu") -> None:
    """Frees unreachable objects and resets the peak.

    On a CPU only Linux supports this; elsewhere the peak remains that of the whole process.
    """
    gc.collect()
    if device_type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
    else:
        if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)  # glibc: freed blocks go back to the system
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): resets the peak resident set


def peak_memory_mb(device_type: str = "cpu") -> float:
    """Peak memory since `reset_peak_memory`."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024  # written in kB
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 1024  # macOS counts bytes, others KiB


def check_fits_in_memory(weights: int) -> None:
    """Raises UserError if this many float32 weights alone exceed the machine's memory."""
    needed_gb, total_gb = 4 * weights / 2**30, psutil.virtual_memory().total / 2**30
    if needed_gb > total_gb:
        raise UserError(
            f"model: {weights:,} weights take {needed_gb:,.0f} GB, but this machine has {total_gb:,.0f}. "
            "Lower model.num_layers, model.d_model, model.mlp_hidden, model.bigram_table_size or model.context_length."
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the system is out of memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, (RuntimeError, ImportError)) and bool(_NO_MEMORY.search(str(error)))
    )


def disable_malloc_trim() -> None:
    """Keeps freed memory in the process instead of returning it to the system (glibc only; a no-op elsewhere).

    Every step allocates and frees the same tensors. By default glibc returns blocks of several MB to the system, which
    then has to clear thousands of pages again in every step: a fifth of the default step's time on two cores
    (`python -m benchmarks.training_speed keep_memory=false`). The cost: the process stays at its peak size.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl does not have it
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_MMAP_THRESHOLD, 2**30) or mallopt(_M_MMAP_THRESHOLD, 2**25)  # older versions accept at most 32 MB
