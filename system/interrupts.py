"""Ctrl-C ends a program with exit code 130 and no traceback, wherever nothing else answers it.

Programs import this before all else: their imports take a moment, in which somebody may have changed their mind.
"""

import sys
from contextlib import suppress
from types import TracebackType

from system.text import escape_control_chars

_before = sys.excepthook


def is_keyboard_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is among what led to an error: OmegaConf, clearing up after it, fails in other ways."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _exit_quietly(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not is_keyboard_interrupt(error):
        return _print_traceback(kind, error, traceback)
    print()  # the terminal has shown ^C
    sys.exit(130)


def _print_traceback(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """As Python does, but for control characters, which a terminal would obey: a message may quote a file."""
    if _before is not sys.__excepthook__:  # a debugger's, or an editor's
        return _before(kind, error, traceback)
    from traceback import format_exception

    with suppress(OSError, AttributeError):  # standard error cannot be written, or was closed
        sys.stderr.write(escape_control_chars("".join(format_exception(kind, error, traceback))))


sys.excepthook = _exit_quietly
