"""Ctrl-C ends a program with exit code 130 and without a traceback, unless something else handles it.

Programs import this module first, because Ctrl-C may also arrive during their other imports.
"""

import sys
from contextlib import suppress
from types import TracebackType

from system.text import escape_control_chars

_previous_hook = sys.excepthook


def is_keyboard_interrupt(error: BaseException | None) -> bool:
    """Whether an error was caused by Ctrl-C: OmegaConf raises other exceptions while it handles a KeyboardInterrupt."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _exit_quietly(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not is_keyboard_interrupt(error):
        return _print_traceback(kind, error, traceback)
    print()  # the terminal has shown ^C
    sys.exit(130)


def _print_traceback(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Prints a traceback as Python does, with control characters escaped, because a message may quote a file."""
    if _previous_hook is not sys.__excepthook__:  # a debugger or an editor installed it
        return _previous_hook(kind, error, traceback)
    from traceback import format_exception

    with suppress(OSError, AttributeError):  # standard error is closed or not writable
        sys.stderr.write(escape_control_chars("".join(format_exception(kind, error, traceback))))


sys.excepthook = _exit_quietly
