"""How much memory this process takes, and took at most, on any system; MB = 2^20 bytes. Imports nothing slow."""

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


def memory_mb(device_type: str = "cpu") -> float:
    """Memory taken now: tensors on a GPU, the whole process on a CPU."""
    if device_type == "cuda":
        import torch

        return torch.cuda.memory_allocated() / 2**20
    return psutil.Process().memory_info().rss / 2**20


def reset_peak_memory(device_type: str = "cpu") -> None:
    """Frees what an earlier run left, and forgets the peak so far.

    On a CPU only Linux can; elsewhere the peak stays that of the process so far.
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
    """The most memory taken since `reset_peak_memory`."""
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
    """Raises UserError for a network of so many weights if in float32 they alone exceed this machine's memory."""
    needed_gb, there_gb = 4 * weights / 2**30, psutil.virtual_memory().total / 2**30
    if needed_gb > there_gb:
        raise UserError(
            f"model: {weights:,} weights take {needed_gb:,.0f} GB, but this machine has {there_gb:,.0f}. "
            "Lower model.num_layers, model.d_model, model.mlp_hidden, model.bigram_table_size or model.context_length."
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the system had no memory left."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, (RuntimeError, ImportError)) and bool(_NO_MEMORY.search(str(error)))
    )
