"""Imports that take seconds: a quarter faster, and Ctrl-C during them is never lost.

Python's garbage collector looks through all objects anew as they become more, and importing PyTorch and Lightning makes
a million. At the end of the process it looks through them once more, for a second. It would find nothing.
"""

import atexit
import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_imports() -> Iterator[None]:
    """Around imports. Nothing is collected meanwhile, and what they made is never looked at again.

    Raises:
        KeyboardInterrupt: after them, if Ctrl-C came: some libraries would swallow it. A second one is not waited for.
    """
    gc.disable()
    try:
        with _interrupt_afterwards():
            yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.freeze)  # by then the system takes all memory back anyway


@contextmanager
def _interrupt_afterwards() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    # Threads hear of no signals; and where they are ignored, as behind nohup, that stays so.
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return
    interrupted = []

    def note(number, frame) -> None:
        interrupted.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt
