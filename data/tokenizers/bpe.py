"""Byte-level byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909), learned from the training split."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from data.cache import CorruptCache, atomic_cache_write, verified_size
from data.tokenizers import tokenizer

if TYPE_CHECKING:
    import tiktoken

    from data.config import TokenizerConfig
    from data.corpus import Split

logger = logging.getLogger(__name__)

# The pieces within which bytes are merged: a word with an optional leading space or newline and apostrophe ("↵And",
# "·o'er"), up to three digits, punctuation with line ends, or whitespace. All repeats are bounded and there is no
# lookahead, so matching takes linear time. Of a dozen such patterns, this one compressed verse best.
DEFAULT_PATTERN = (
    r"[ \n]?[\p{L}\p{M}]{1,32}(?:['’]\p{L}{1,4})?"
    r"| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{M}\p{N}]{1,16}[\r\n]{0,8}"
    r"|\s{1,32}"
)
PATTERNS = {
    "default": DEFAULT_PATTERN,
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
"""`tokenizer.pattern` -> regular expression. "gpt2" is that of GPT-2 (Radford et al. 2019), which llama.cpp knows."""
# Merges are learned from at most this much of the training split. More text changes few of them, and for random
# letters, the worst case, this much already takes 7 s and 0.7 GB.
TRAINING_BYTES = 16 << 20
# The default vocabulary size is the largest power of two with this much text per token, within these bounds: 2,048 for
# the embedded text, which measured best (docs/EXPERIMENTS.md), and an estimate for other lengths.
TEXT_BYTES_PER_TOKEN = 1500
DEFAULT_VOCAB_SIZES = 512, 16_384


@tokenizer(learned=True)
def bpe(config: TokenizerConfig, train_split: Split, cache_dir: Path) -> tiktoken.Encoding:
    """Learns merges from the training split, or loads them from `cache_dir`."""
    from data.tokenizer import make_encoding

    vocab_size = config.vocab_size or vocab_size_for(train_split.num_bytes)
    pattern = PATTERNS[config.pattern]
    return make_encoding("bpe", pattern, _cached_merges(vocab_size, pattern, train_split, cache_dir))


def vocab_size_for(num_bytes: int) -> int:
    """Returns the default vocabulary size for a training split of `num_bytes`."""
    smallest, largest = DEFAULT_VOCAB_SIZES
    return min(largest, max(smallest, 1 << (num_bytes // TEXT_BYTES_PER_TOKEN).bit_length() >> 1))


def _cached_merges(vocab_size: int, pattern: str, split: Split, cache_dir: Path) -> dict[bytes, int]:
    from data.tokenizer import format_merges, parse_merges

    key = hashlib.sha256(f"1\n{split.sha256}\n{vocab_size}\n{pattern}".encode()).hexdigest()[:16]
    path = cache_dir / f"bpe-{key}.txt"
    try:
        return parse_merges(path.read_bytes()[: verified_size(path)].decode())
    except FileNotFoundError:
        pass
    except (CorruptCache, OSError, ValueError) as error:
        logger.info("%s is damaged (%s): learning the merges again", path, error)
    ranks = _train_merges(vocab_size, pattern, split)
    with atomic_cache_write(path) as f:
        f.write(format_merges(ranks).encode())
    return ranks


def _train_merges(vocab_size: int, pattern: str, split: Split) -> dict[bytes, int]:
    import rustbpe

    from data.tokenizer import segments

    num_bytes = min(split.num_bytes, TRAINING_BYTES)
    logger.info("learning up to %d merges from %.1f MB of text", vocab_size - 256, num_bytes / 1e6)
    logging.getLogger("rustbpe").setLevel(logging.WARNING)  # it logs every percent of its progress
    trainer = rustbpe.Tokenizer()
    texts = segments(_first_bytes(split.read(), TRAINING_BYTES))
    trainer.train_from_iterator(texts, vocab_size, buffer_size=1024, pattern=pattern)
    ranks: dict[bytes, int] = {}
    for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda item: item[1]):
        ranks.setdefault(bytes(token), len(ranks))  # two merges may give the same token
    return ranks


def _first_bytes(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    for text in texts:
        if num_bytes <= 0:
            return
        yield text
        num_bytes -= len(text.encode())
