"""Cache files: written atomically, verified before use, and limited to the MAX_FILES most recently used.

A cache file ends with a line that has the SHA-256 of everything before it. A file that was damaged, edited, or written
by another version of the project is recognized and created again. Nothing in a cache file is executed or unpickled.
"""

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from system.errors import UserError
from system.files import atomic_write

MAX_FILES = 64  # in a cache directory; the least recently used ones are deleted
STALE_SECONDS = 24 * 3600  # age after which an unfinished file is deleted
CHUNK_BYTES = 1 << 20
_CACHE_NAME = re.compile(r"(?:tokens|bpe)-[0-9a-f]{16}\.(?:npy|txt)(\..*\.tmp)?")  # group 1: unfinished


def is_cache_file(name: str) -> bool:
    """Whether this is the name of one of our cache files, finished or not."""
    return _CACHE_NAME.fullmatch(name) is not None


def _last_line(digest: "hashlib._Hash") -> bytes:
    return f"\nsha256 {digest.hexdigest()}\n".encode()


LAST_LINE_BYTES = len(_last_line(hashlib.sha256()))


class CorruptCache(Exception):
    """A cache file does not have the content that was written. The message says how this was detected."""


@contextlib.contextmanager
def atomic_cache_write(path: Path) -> Iterator[BinaryIO]:
    """Context manager that yields a file to write to. `path` then is complete or absent, even with several writers.

    Raises UserError with the name of the directory if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as f:
            yield f
            f.seek(0)
            f.write(_last_line(_digest(f, os.fstat(f.fileno()).st_size)))
    except OSError as error:
        raise UserError(
            f"Cannot write to the cache {path.parent}: {error.strerror or error}. Make room or grant access, "
            "or set data.cache_dir to another directory."
        ) from None
    _evict_least_recently_used(path)


def verified_size(path: Path) -> int:
    """Verifies the checksum of a cache file; returns the size of its content, without the checksum line.

    Raises FileNotFoundError if there is no file, CorruptCache if it does not have the content that was written.
    """
    with path.open("rb") as f:
        size = os.fstat(f.fileno()).st_size - LAST_LINE_BYTES
        if size < 0:
            raise CorruptCache("too short")
        digest = _digest(f, size)
        if f.read() != _last_line(digest):
            raise CorruptCache("its checksum does not match: changed, or of another version")
    with contextlib.suppress(OSError):  # the cache may be read-only
        os.utime(path)  # marks it as recently used
    return size


def _digest(f: BinaryIO, size: int) -> "hashlib._Hash":
    """Hashes the next `size` bytes of a file."""
    digest = hashlib.sha256()
    while size > 0 and (chunk := f.read(min(size, CHUNK_BYTES))):
        digest.update(chunk)
        size -= len(chunk)
    return digest


def _evict_least_recently_used(new: Path) -> None:
    """Deletes the least recently used cache files beyond MAX_FILES, except `new`, and stale unfinished ones."""
    finished, now = [], time.time()
    for path in new.parent.iterdir():
        match = _CACHE_NAME.fullmatch(path.name)
        with contextlib.suppress(OSError):  # another run may delete it first, or have it open on Windows
            if match and match[1] is None and path != new:
                finished.append((path.stat().st_mtime, path))
            elif match and match[1] and now - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
    for _, path in sorted(finished)[: -(MAX_FILES - 1)]:
        with contextlib.suppress(OSError):
            path.unlink()
