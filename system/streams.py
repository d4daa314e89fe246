"""Standard input, output and error: always open, UTF-8, and without a traceback if they fail."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from system.text import escape_control_chars, escape_line


def open_closed_streams() -> None:
    """Opens streams that were closed when the process started (`<&-`, `>&-`, `2>&-`) on the null device.

    Call this before opening any file: the file would get the closed stream's descriptor, and with it all output.
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
    """Uses UTF-8 whatever the locale is, and replaces characters that cannot be encoded or decoded."""
    streams = {sys.stdin: "replace", sys.stdout: "replace", sys.stderr: "backslashreplace"}
    for stream, errors in streams.items():
        if isinstance(stream, io.TextIOWrapper):  # notebooks use other classes
            stream.reconfigure(encoding="utf-8", errors=errors)


def print_error(message: str) -> None:
    """Prints one line to standard error, with control characters escaped. Ignores write errors."""
    with suppress(OSError):
        print(f"error: {escape_line(message)}", file=sys.stderr, flush=True)


def print_note(message: str) -> None:
    """Prints a status line to standard error, so that standard output has the results alone."""
    print(escape_control_chars(message), file=sys.stderr)


def for_terminal(text: str) -> str:
    """The text for standard output: control characters are escaped on a terminal, and kept in a file or a pipe."""
    return escape_control_chars(text) if sys.stdout.isatty() else text


@contextmanager
def handle_broken_pipe() -> Iterator[None]:
    """Ends the program silently, with exit code 0, when the reader of its output has closed the pipe (`| head`).

    Any other failure to write the output, such as a full disk, is reported in one line, with exit code 2.
    """
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        if not (_fails(sys.stdout) or _fails(sys.stderr)):  # the error is about another file
            raise
        print_error(f"the output cannot be written: {error.strerror}. Free some space, or write to another disk.")
        sys.exit(2)
    finally:  # Python flushes again at exit, and would print an error
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                redirect_to_devnull(stream)


def _fails(stream: TextIO) -> bool:
    """Whether writing a newline fails. Flushing again would not show it: the buffer is empty after a failed flush."""
    try:
        os.write(stream.fileno(), b"\n")
    except OSError:
        return True
    return False


def redirect_to_devnull(stream: TextIO) -> None:
    """Discards the buffered and all future output of a stream."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)
