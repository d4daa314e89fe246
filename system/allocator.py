"""Memory that a training step frees stays with the process, for the next step."""

import ctypes
import sys

# Numbers of options in glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def disable_malloc_trim() -> None:
    """Tells glibc not to hand large blocks back to the system when they are freed. Other systems: does nothing.

    Each step makes and frees the same tensors. glibc gives those of some MB back every time, and the system then
    has to clear thousands of pages in every step: of the default's a fifth of its time on two cores
    (`python -m benchmarks.training_speed keep_memory=false`). The process holds on to what it needed at its peak.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_MMAP_THRESHOLD, 2**30) or mallopt(_MMAP_THRESHOLD, 2**25)  # older versions take 32 MB at most
