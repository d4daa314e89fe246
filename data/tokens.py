"""Token ids of a split in a memory-mapped file, which is created once.

The file is a `.npy` of little-endian uint16 or uint32, followed by the checksum line of data/cache.py, so `np.load` can
open it. Here the header is not parsed but compared with the one that we write.
"""

import hashlib
import io
import logging
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tiktoken

from data.cache import CorruptCache, atomic_cache_write, verified_size
from data.corpus import Split
from data.tokenizer import encode_chunks, fingerprint, token_bytes
from system.errors import UserError

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 3.0
CHUNK_IDS = 1 << 20  # ids that are checked at a time


def load_tokens(split: Split, encoding: tiktoken.Encoding, cache_dir: Path) -> tuple[np.memmap, bool]:
    """Returns the ids of `split`, (num_tokens,), as a read-only memory map, and whether its file already existed.

    The name of the file is a hash of the text and the tokenizer. A damaged file is created again.
    Raises UserError if the directory cannot be written.
    """
    path = token_path(split, encoding, cache_dir)
    for attempt in range(3):  # again if another run deletes the file before it is opened
        if (tokens := _open(path, token_dtype(encoding), encoding.n_vocab)) is not None:
            return tokens, attempt == 0
        with atomic_cache_write(path) as f:
            _write(f, split, encoding)
    if (tokens := _open(path, token_dtype(encoding), encoding.n_vocab)) is None:
        raise UserError(f"{path} is damaged immediately after it was written. Set data.cache_dir to another disk.")
    return tokens, False


def token_path(split: Split, encoding: tiktoken.Encoding, cache_dir: Path) -> Path:
    """Returns the cache file for this text and tokenizer."""
    key = hashlib.sha256(f"1\n{split.sha256}\n{fingerprint(encoding)}".encode()).hexdigest()[:16]
    return Path(cache_dir) / f"tokens-{key}.npy"


def token_dtype(encoding: tiktoken.Encoding) -> np.dtype:
    """Returns uint16 if it holds every id, else uint32."""
    return np.dtype("<u2" if encoding.n_vocab <= 1 << 16 else "<u4")


def _open(path: Path, dtype: np.dtype, n_vocab: int) -> np.memmap | None:
    """Returns the ids in a file, or None if it is missing or damaged."""
    try:
        count, left_over = divmod(verified_size(path) - HEADER_BYTES, dtype.itemsize)
        with path.open("rb") as f:
            if count < 0 or left_over or f.read(HEADER_BYTES) != _header(dtype, count):
                raise CorruptCache("its header does not match")
            for start in range(0, count, CHUNK_IDS):  # not memory-mapped, so that it does not count as resident memory
                if np.fromfile(f, dtype, min(CHUNK_IDS, count - start)).max() >= n_vocab:
                    raise CorruptCache("ids beyond the vocabulary")
        return np.memmap(path, dtype, mode="r", offset=HEADER_BYTES, shape=(count,))
    except FileNotFoundError:
        return None
    except (CorruptCache, OSError, ValueError) as error:
        logger.info("%s is damaged (%s): encoding again", path, error)
        return None


def _write(f: BinaryIO, split: Split, encoding: tiktoken.Encoding) -> None:
    dtype, lengths = token_dtype(encoding), token_bytes(encoding)
    num_tokens = num_bytes = 0
    started = reported = time.monotonic()
    f.write(_header(dtype, num_tokens))
    for ids in encode_chunks(encoding, split.read()):
        f.write(ids.astype(dtype).tobytes())
        num_tokens += len(ids)
        num_bytes += int(lengths[ids].sum())
        now = time.monotonic()
        if now - reported > PROGRESS_SECONDS:
            reported = now
            left_s = (now - started) * (split.num_bytes / num_bytes - 1)
            done = f"{100 * num_bytes / split.num_bytes:.0f} % of {split.num_bytes / 1e6:.0f} MB"
            logger.info("encoding the %s split: %s, %.0f s to go", split.name, done, left_s)
    f.seek(0)
    f.write(_header(dtype, num_tokens))


def _header(dtype: np.dtype, count: int) -> bytes:
    # NumPy pads the header for the longest possible count, so the final header can overwrite the first one.
    f = io.BytesIO()
    np.lib.format.write_array_header_1_0(f, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})
    return f.getvalue()


HEADER_BYTES = len(_header(np.dtype("<u2"), 0))
