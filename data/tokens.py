"""A split's ids in a file: encoded once, then mapped into memory, whatever its size.

The file is a plain `.npy` of little-endian uint16 or uint32, so `np.load` opens it anywhere; the line with its
checksum that comes after the ids does not disturb it. Here it is not parsed: its header must be the one we write.
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
CHUNK = 1 << 20  # ids looked at together


def load_tokens(split: Split, encoding: tiktoken.Encoding, cache_dir: Path) -> tuple[np.memmap, bool]:
    """All ids of `split`, (num_tokens,), read-only, from a file in `cache_dir`; and whether that was there already.

    The file is named after the text and the tokenizer, so a change in either makes a new one. One that is
    damaged is made again. Raises UserError if the directory cannot be written.
    """
    path = token_path(split, encoding, cache_dir)
    for attempt in range(3):  # a second time where another run takes the file away before it is opened
        if (tokens := _open(path, token_dtype(encoding), encoding.n_vocab)) is not None:
            return tokens, attempt == 0
        with atomic_cache_write(path) as f:
            _write(f, split, encoding)
    if (tokens := _open(path, token_dtype(encoding), encoding.n_vocab)) is None:
        raise UserError(f"{path} is damaged as soon as it is written. Set data.cache_dir to another disk.")
    return tokens, False


def token_path(split: Split, encoding: tiktoken.Encoding, cache_dir: Path) -> Path:
    """Where the ids of this text by this tokenizer are kept."""
    key = hashlib.sha256(f"1\n{split.sha256}\n{fingerprint(encoding)}".encode()).hexdigest()[:16]
    return Path(cache_dir) / f"tokens-{key}.npy"


def token_dtype(encoding: tiktoken.Encoding) -> np.dtype:
    """The narrowest of 16 and 32 bits that holds every id."""
    return np.dtype("<u2" if encoding.n_vocab <= 1 << 16 else "<u4")


def _open(path: Path, dtype: np.dtype, n_vocab: int) -> np.memmap | None:
    """The file's ids, or None unless they are those that were written."""
    try:
        count, left_over = divmod(verified_size(path) - HEADER_BYTES, dtype.itemsize)
        with path.open("rb") as f:
            if count < 0 or left_over or f.read(HEADER_BYTES) != _header(dtype, count):
                raise CorruptCache("its header is another")
            for start in range(0, count, CHUNK):  # read, not mapped: mapped, all of it would count as memory taken
                if np.fromfile(f, dtype, min(CHUNK, count - start)).max() >= n_vocab:
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
    # numpy pads the header for the longest count there can be, so the final one takes the first one's place.
    f = io.BytesIO()
    np.lib.format.write_array_header_1_0(f, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})
    return f.getvalue()


HEADER_BYTES = len(_header(np.dtype("<u2"), 0))
