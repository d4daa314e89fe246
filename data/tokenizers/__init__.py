"""The tokenizers by name, `tokenizer.kind=NAME`: one file each.

To add one: one file here and one in configs/tokenizer/ (docs/extending.md). Names are checked before the slow imports;
so the files here import what they need inside their functions.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tiktoken

    from data.config import TokenizerConfig
    from data.corpus import Split

Build = Callable[["TokenizerConfig", "Split", Path], "tiktoken.Encoding"]


@dataclass(frozen=True)
class RegisteredTokenizer:
    """What the rest of a run needs to know of a tokenizer."""

    build: Build
    learned: bool
    """Whether it learns as many tokens as tokenizer.vocab_size says."""
    vocab_size: int | None
    """Its number of tokens, if that is always the same."""


TOKENIZERS: dict[str, RegisteredTokenizer] = {}  # by the value of tokenizer.kind


def tokenizer(learned: bool = False, vocab_size: int | None = None) -> Callable[[Build], Build]:
    """Registers a function by its name. The arguments: RegisteredTokenizer.

    It takes the config, the training split and the directory of the cache, and returns an encoding
    (data/tokenizer.py, `make_encoding`), which checkpoints carry whole.
    """

    def register(build: Build) -> Build:
        TOKENIZERS[build.__name__] = RegisteredTokenizer(build, learned, vocab_size)
        return build

    return register


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
