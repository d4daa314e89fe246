"""Registry of tokenizers, one file each: `tokenizer.kind=NAME`.

To add one, write one file here and one in configs/tokenizer/ (see docs/extending.md). Names are validated before slow
imports, so these files import what they need inside their functions.
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
    """A registered tokenizer."""

    build: Build
    learned: bool
    """Whether it learns a vocabulary of tokenizer.vocab_size tokens from the training text."""
    vocab_size: int | None
    """Number of tokens, if it is fixed."""


TOKENIZERS: dict[str, RegisteredTokenizer] = {}  # tokenizer.kind -> tokenizer


def tokenizer(learned: bool = False, vocab_size: int | None = None) -> Callable[[Build], Build]:
    """Registers a function under its name. For the arguments see RegisteredTokenizer.

    The function takes the config, the training split and the cache directory. It returns an encoding, made with
    `make_encoding` of data/tokenizer.py, which is saved in checkpoints.
    """

    def register(build: Build) -> Build:
        TOKENIZERS[build.__name__] = RegisteredTokenizer(build, learned, vocab_size)
        return build

    return register


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
