"""Files that are whole or not there, whenever the process is killed or the disk is full."""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

from system.errors import UserError

PROMPT_BYTES = 64 << 20


@contextmanager
def atomic_write(path: Path, temporary: Path | None = None, previous: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write into, which takes the name `path` once all of it is on the disk; where that fails, it is gone.

    Args:
        temporary: its name until then, in the same directory. What a kill leaves there, the next one writes over.
            None: a name of its own, so that two processes can write `path` at once.
        previous: where the file before goes; None: it is replaced.

    Raises:
        OSError: it cannot be written; the error names `path`, and the file before is as it was.
    """
    temporary = temporary or path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)  # a kill between these two leaves `previous`
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # it has its name by now, or was never there
            temporary.unlink()


def write_output(path: Path, content: bytes) -> None:
    """Writes a file that the user asked for, whole or not at all. Raises UserError where that cannot be done."""
    try:
        with atomic_write(path) as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}. Give another file.") from None


def _sync_directory(path: Path) -> None:
    """Makes the new name last through a power failure, where directories can be opened."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def expand_user(path: str) -> str:
    """The path with a leading ~ or ~name as a shell would read it. Raises UserError where nobody has that name."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~") and not os.path.lexists(path):
        raise UserError(f"{path.partition('/')[0]!r} is nobody's home directory here. Give the whole path.")
    return expanded


def relative(path: Path) -> Path:
    """The path, from the working directory if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The prompt's text: given, from a file, or from standard input. Raises UserError."""
    if prompt is not None and prompt_file is not None:
        raise UserError("prompt and prompt_file are both given. Leave one out.")
    if prompt_file is None:
        return prompt or ""
    try:
        with nullcontext(sys.stdin.buffer) if prompt_file == "-" else open(prompt_file, "rb") as file:
            content = file.read(PROMPT_BYTES + 1)
        if len(content) > PROMPT_BYTES:
            raise UserError(f"prompt_file {prompt_file} has more than {PROMPT_BYTES >> 20} MB. Give a shorter text.")
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"prompt_file {prompt_file} is not UTF-8 at byte {error.start}. Convert it to UTF-8."
        ) from error
    except OSError as error:
        raise UserError(
            f"prompt_file {prompt_file} cannot be read: {error.strerror}. Give a text file, or - ."
        ) from error


def check_suffix(key: str, path: str | None, suffix: str) -> None:
    """Raises UserError for a path, if there is one, whose name does not say what is going to be in the file."""
    if path is not None and not path.endswith(suffix):
        raise UserError(f"{key} is {path!r}, but must end in {suffix}.")
