"""Ctrl-C ends a program with exit code 130 and no traceback, wherever nothing else answers it.

Programs import this before all else: their imports take a moment, in which somebody may have changed their mind.
"""

import sys
from types import TracebackType

_before = sys.excepthook


def _end_quietly(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        return _before(kind, error, traceback)
    print()  # the terminal has shown ^C
    sys.exit(130)


sys.excepthook = _end_quietly
