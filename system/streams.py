"""Standard input, output and error: open, in UTF-8, and without a traceback where they fail."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from system.text import escape_control_chars, escape_line


def open_closed_streams() -> None:
    """Opens those that were closed at the start (`<&-`, `>&-`, `2>&-`): empty input, and output that goes nowhere.

    To be called before any file is opened: the first one would get the closed stream's number, and what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def use_utf8() -> None:
    """Text is UTF-8 whatever the locale says, and what cannot be encoded does not end the program."""
    streams = {sys.stdin: "replace", sys.stdout: "replace", sys.stderr: "backslashreplace"}
    for stream, errors in streams.items():
        if isinstance(stream, io.TextIOWrapper):  # a notebook has its own
            stream.reconfigure(encoding="utf-8", errors=errors)


def print_error(message: str) -> None:
    """One line on standard error, whatever is in the message; nothing where that cannot be written."""
    with suppress(OSError):
        print(f"error: {escape_line(message)}", file=sys.stderr, flush=True)


def print_note(message: str) -> None:
    """A line about the work on standard error, beside the work's own output."""
    print(escape_control_chars(message), file=sys.stderr)


def for_terminal(text: str) -> str:
    """The text as standard output gets it: as it is in a file or a pipe, harmless on a terminal."""
    return escape_control_chars(text) if sys.stdout.isatty() else text


@contextmanager
def handle_broken_pipe() -> Iterator[None]:
    """A reader that has had enough of the output (`| head`) ends the program silently, with exit code 0.

    Where the output cannot be written, because its disk is full, one line says so; exit code 2.
    """
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        if not (_fails(sys.stdout) or _fails(sys.stderr)):  # it was another file
            raise
        print_error(f"the output cannot be written: {error.strerror}. Make room, or write elsewhere.")
        sys.exit(2)
    finally:  # Python would try once more at the end, and complain
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                write_nowhere(stream)


def _fails(stream: TextIO) -> bool:
    """Whether not even a line's end can be written: flushing again would not tell, what failed is forgotten."""
    try:
        os.write(stream.fileno(), b"\n")
    except OSError:
        return True
    return False


def write_nowhere(stream: TextIO) -> None:
    """What this stream still holds, and what comes, is lost."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
