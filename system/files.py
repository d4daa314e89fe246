"""Atomic file writes, and paths and prompts given on the command line."""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

from system.errors import UserError

MAX_PROMPT_BYTES = 64 << 20


@contextmanager
def atomic_write(path: Path, temporary: Path | None = None, previous: Path | None = None) -> Iterator[BinaryIO]:
    """Writes a file that is either complete or absent, even if the process is killed or the disk is full.

    Args:
        temporary: name of the file while it is written, in the same directory. A file left there by a killed process is
            overwritten. None: a unique name, so that two processes can write `path` at the same time.
        previous: where to move an existing file; None: it is replaced.

    Raises:
        OSError: the file cannot be written. The error names `path`, and an existing file is unchanged.
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
        with suppress(OSError):  # already renamed, or never created
            temporary.unlink()


def write_output(path: Path, content: bytes) -> None:
    """Writes a file that the user asked for, atomically. Raises UserError if it cannot be written."""
    try:
        with atomic_write(path) as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}. Give another file name.") from None


def _sync_directory(path: Path) -> None:
    """Makes a rename survive a power failure, on systems where directories can be opened."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def expand_user(path: str) -> str:
    """Expands a leading ~ or ~name as a shell does. Raises UserError if there is no user of that name."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~") and not os.path.lexists(path):
        raise UserError(f"{path.partition('/')[0]!r} is not a home directory on this machine. Give the full path.")
    return expanded


def relative(path: Path) -> Path:
    """The path relative to the working directory if it is inside it, else unchanged."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The text of the prompt: as given, from a file, or (`-`) from standard input. Raises UserError."""
    if prompt is not None and prompt_file is not None:
        raise UserError("prompt and prompt_file are both given. Leave one out.")
    if prompt_file is None:
        return prompt or ""
    try:
        with nullcontext(sys.stdin.buffer) if prompt_file == "-" else open(prompt_file, "rb") as file:
            content = file.read(MAX_PROMPT_BYTES + 1)
        if len(content) > MAX_PROMPT_BYTES:
            raise UserError(f"prompt_file {prompt_file} has over {MAX_PROMPT_BYTES >> 20} MB. Give a shorter text.")
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"prompt_file {prompt_file} is not UTF-8 at byte {error.start}. Convert it to UTF-8."
        ) from error
    except OSError as error:
        raise UserError(
            f"prompt_file {prompt_file} cannot be read: {error.strerror}. Give a text file, or - for standard input."
        ) from error


def check_suffix(key: str, path: str | None, suffix: str) -> None:
    """Raises UserError if a path is given and does not end in the suffix."""
    if path is not None and not path.endswith(suffix):
        raise UserError(f"{key} is {path!r}, but must end in {suffix}.")
