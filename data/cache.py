"""Files of the cache: whole or not there, checked before they are used, and never more than KEPT of them.

A cache file is its content and then one line with the content's SHA-256. What is damaged, by a disk, an editor or
another version of the project, is told from what is whole, and made again. Nothing in such a file is ever run or
unpickled.
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

KEPT = 64  # files in a cache directory; of more, those not used for longest go
STALE_SECONDS = 24 * 3600  # from then on a file that was never finished is nobody's
CHUNK_BYTES = 1 << 20
_OURS = re.compile(r"(?:tokens|bpe)-[0-9a-f]{16}\.(?:npy|txt)(\..*\.tmp)?")  # group 1: not finished


def is_cache_file(name: str) -> bool:
    """Whether it is a name that we give to a cache file, finished or not."""
    return _OURS.fullmatch(name) is not None


def _last_line(digest: "hashlib._Hash") -> bytes:
    return f"\nsha256 {digest.hexdigest()}\n".encode()


LAST_LINE_BYTES = len(_last_line(hashlib.sha256()))


class CorruptCache(Exception):
    """A cache file is not what was written; args[0] says how that shows."""


@contextlib.contextmanager
def atomic_cache_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write content into, which is then at `path` complete or not at all, also if two write it at once.

    Raises UserError, naming the directory, if it cannot be written.
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
    """Bytes of content at the start of a cache file, once its last line is found to fit them.

    Raises FileNotFoundError where there is no file, CorruptCache where it is not what was written.
    """
    with path.open("rb") as f:
        size = os.fstat(f.fileno()).st_size - LAST_LINE_BYTES
        if size < 0:
            raise CorruptCache("too short")
        digest = _digest(f, size)
        if f.read() != _last_line(digest):
            raise CorruptCache("its checksum is another: changed, or of another version")
    with contextlib.suppress(OSError):  # a cache that can only be read serves as well
        os.utime(path)  # used now: the last to go
    return size


def _digest(f: BinaryIO, size: int) -> "hashlib._Hash":
    """Of the next `size` bytes; the file is then read up to there."""
    digest = hashlib.sha256()
    while size > 0 and (chunk := f.read(min(size, CHUNK_BYTES))):
        digest.update(chunk)
        size -= len(chunk)
    return digest


def _evict_least_recently_used(new: Path) -> None:
    """Deletes what is over KEPT and what was left unfinished. Files that are not ours stay, and so does `new`."""
    finished, now = [], time.time()
    for path in new.parent.iterdir():
        match = _OURS.fullmatch(path.name)
        with contextlib.suppress(OSError):  # another run may delete it first; where it is in use, it may refuse
            if match and match[1] is None and path != new:
                finished.append((path.stat().st_mtime, path))
            elif match and match[1] and now - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
    for _, path in sorted(finished)[: -(KEPT - 1)]:
        with contextlib.suppress(OSError):
            path.unlink()
