"""Python's garbage collector, kept out of where it finds nothing.

It looks through all objects anew as they become more, and importing PyTorch and Lightning makes a million: a quarter
of the time that takes. At the end of the process it looks through them once more, for a second.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports() -> Iterator[None]:
    """Around slow imports: nothing is collected meanwhile, and what they made is never looked at again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.freeze)  # by then the system takes all memory back anyway
