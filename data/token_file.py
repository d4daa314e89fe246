"""A split's ids in a file: encoded once, then mapped into memory, whatever its size.

The file is a plain `.npy` of little-endian uint16 or uint32, so `np.load` opens it anywhere.
"""

import hashlib
import logging
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tiktoken

from data.corpus import Split
from data.tokenizer import encode_chunks, fingerprint, token_bytes, written_atomically

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 3.0


def load_tokens(split: Split, encoding: tiktoken.Encoding, cache_dir: Path) -> np.memmap:
    """All ids of `split`, (num_tokens,), read-only, from a file in `cache_dir` that is made if need be.

    The file is named after the text and the tokenizer, so a change in either makes a new one. One that is
    damaged is made again. Raises UserError if the directory cannot be written.
    """
    path = token_path(split, encoding, cache_dir)
    tokens = _open(path, token_dtype(encoding))
    if tokens is None:
        with written_atomically(path) as f:
            _write(f, split, encoding)
        tokens = _open(path, token_dtype(encoding))
    return tokens


def token_path(split: Split, encoding: tiktoken.Encoding, cache_dir: Path) -> Path:
    """Where the ids of this text by this tokenizer are kept."""
    key = hashlib.sha256(f"1\n{split.sha256}\n{fingerprint(encoding)}".encode()).hexdigest()[:16]
    return Path(cache_dir) / f"tokens-{key}.npy"


def token_dtype(encoding: tiktoken.Encoding) -> np.dtype:
    """The narrowest of 16 and 32 bits that holds every id."""
    return np.dtype("<u2" if encoding.n_vocab <= 1 << 16 else "<u4")


def _open(path: Path, dtype: np.dtype) -> np.memmap | None:
    """The file's ids, or None unless its header fits its size and the vocabulary."""
    try:
        tokens = np.load(path, mmap_mode="r")
        size, expected_size = path.stat().st_size, tokens.offset + tokens.nbytes
        if tokens.ndim == 1 and tokens.dtype == dtype and size == expected_size:
            return tokens
        problem = f"{tokens.shape} {tokens.dtype} in {size} bytes"
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError) as error:
        problem = error
    log.info("%s is damaged (%s): encoding again", path, problem)
    return None


def _write(f: BinaryIO, split: Split, encoding: tiktoken.Encoding) -> None:
    dtype, lengths = token_dtype(encoding), token_bytes(encoding)
    num_tokens = num_bytes = 0
    started = reported = time.monotonic()
    _write_header(f, dtype, num_tokens)
    for ids in encode_chunks(encoding, split.read()):
        f.write(ids.astype(dtype).tobytes())
        num_tokens += len(ids)
        num_bytes += int(lengths[ids].sum())
        now = time.monotonic()
        if now - reported > PROGRESS_EVERY_S:
            reported = now
            left_s = (now - started) * (split.num_bytes / num_bytes - 1)
            done = f"{100 * num_bytes / split.num_bytes:.0f} % of {split.num_bytes / 1e6:.0f} MB"
            log.info("encoding the %s split: %s, %.0f s to go", split.name, done, left_s)
    f.seek(0)
    _write_header(f, dtype, num_tokens)


def _write_header(f: BinaryIO, dtype: np.dtype, count: int) -> None:
    # numpy pads the header for the longest count there can be, so the final one takes the first one's place.
    np.lib.format.write_array_header_1_0(f, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})
