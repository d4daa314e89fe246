"""A monotonic clock that excludes the time while the process is suspended by Ctrl-Z, `kill -STOP` or a debugger.

The system signals when a process is continued, but not when it was suspended. The clock takes its last reading for
that time.
"""

import signal
import threading
import time

_last_reading = _suspended_seconds = 0.0


def running_seconds() -> float:
    """time.perf_counter() minus, for each suspension, the time from the last reading to its end."""
    global _last_reading
    _last_reading = time.perf_counter()
    return _last_reading - _suspended_seconds


def exclude_suspensions() -> None:
    """Starts tracking suspensions with a SIGCONT handler, if the system has the signal and no other handler is set."""
    running_seconds()
    in_main_thread = threading.current_thread() is threading.main_thread()
    if hasattr(signal, "SIGCONT") and in_main_thread and signal.getsignal(signal.SIGCONT) is signal.SIG_DFL:
        signal.signal(signal.SIGCONT, _on_continue)


def _on_continue(number, frame) -> None:
    global _last_reading, _suspended_seconds
    now = time.perf_counter()
    _suspended_seconds += now - _last_reading
    _last_reading = now
