"""A clock that stands still while the process is stopped: by Ctrl-Z, `kill -STOP` or a debugger.

The system tells that a process was continued, not when it was stopped: that was after the last reading.
"""

import signal
import threading
import time

_last_reading = _stopped_seconds = 0.0


def running_seconds() -> float:
    """As time.perf_counter(), without the time from the last reading before each stop to its end."""
    global _last_reading
    _last_reading = time.perf_counter()
    return _last_reading - _stopped_seconds


def watch_stops() -> None:
    """From here on stops are noticed, where the system has any and another handler is not in the way."""
    running_seconds()
    in_main_thread = threading.current_thread() is threading.main_thread()
    if hasattr(signal, "SIGCONT") and in_main_thread and signal.getsignal(signal.SIGCONT) is signal.SIG_DFL:
        signal.signal(signal.SIGCONT, _continue)


def _continue(number, frame) -> None:
    global _last_reading, _stopped_seconds
    now = time.perf_counter()
    _stopped_seconds += now - _last_reading
    _last_reading = now
