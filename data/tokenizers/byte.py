"""Byte-level tokenizer: one token per byte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from data.tokenizers import tokenizer

if TYPE_CHECKING:
    import tiktoken

    from data.config import TokenizerConfig
    from data.corpus import Split

PATTERN = r"(?s:.{1,64})"


@tokenizer(vocab_size=256)
def byte(config: TokenizerConfig, train_split: Split, cache_dir: Path) -> tiktoken.Encoding:
    """256 tokens, one per byte. Independent of the text."""
    from data.tokenizer import make_encoding

    return make_encoding("byte", PATTERN, {bytes([byte]): byte for byte in range(256)})
