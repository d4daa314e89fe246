"""Makes slow imports a quarter faster, without losing a Ctrl-C that arrives during them.

Importing PyTorch and Lightning creates a million objects. Python's garbage collector scans them repeatedly during the
imports, and again for a second when the process exits, without finding any garbage.
"""

import atexit
import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_imports() -> Iterator[None]:
    """Disables garbage collection during the imports, and excludes their objects from later collections.

    Raises:
        KeyboardInterrupt: after the imports, if Ctrl-C was pressed during them, because some libraries would swallow
            it. A second Ctrl-C takes effect at once.
    """
    gc.disable()
    try:
        with _delay_interrupt():
            yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.freeze)  # the system reclaims all memory at exit anyway


@contextmanager
def _delay_interrupt() -> Iterator[None]:
    previous = signal.getsignal(signal.SIGINT)
    # Only the main thread can set handlers. If SIGINT is ignored, as under nohup, it stays ignored.
    if threading.current_thread() is not threading.main_thread() or previous is not signal.default_int_handler:
        yield
        return
    interrupted = []

    def record(number, frame) -> None:
        interrupted.append(number)
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, record)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupted:
        raise KeyboardInterrupt
