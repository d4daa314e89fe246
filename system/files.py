"""Files that are whole or not there, whenever the process is killed or the disk is full."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from system.errors import UserError


@contextmanager
def written_whole(path: Path, temporary: Path | None = None, previous: Path | None = None) -> Iterator[BinaryIO]:
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
        with written_whole(path) as file:
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
