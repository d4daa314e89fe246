"""Every default of the data, once. Imports nothing slow, so that a mistake is refused at once."""

import math
from dataclasses import dataclass

from data.tokenizers import TOKENIZERS
from system.checks import check_fields, short_repr
from system.errors import UserError

MAX_VOCAB_SIZE = 1_000_000
MAX_BATCH_SIZE = 1 << 20


@dataclass(frozen=True)
class DataConfig:
    """Which text, how it is split, and how much of it a batch holds."""

    corpus: str | None = None
    """Text file, folder or glob of UTF-8 text; None is the embedded Shakespeare. Each real file counts once, whatever
    links lead to it; run directories and caches of train.py are left out."""
    val_fraction: float = 0.1
    """Share of the bytes, at the end of the text, that is kept from training."""
    batch_size: int = 24
    """Windows a batch on each device."""
    val_tokens: int | None = 32_768
    """Validations during training predict so many tokens, evenly spread over the split; None is all of them.
    The final figure is over the whole split, as far as a budget allows."""
    cache_dir: str | None = None
    """Where learned merges and encoded text are kept, the 64 files used last; None is `.cache` in the project.
    It can be deleted at any time."""

    def __post_init__(self):
        for name, default in (("corpus", "Shakespeare"), ("cache_dir", ".cache")):
            value = getattr(self, name)
            if not isinstance(value, str | None) or value == "":
                raise UserError(f"data.{name} is {short_repr(value)}; it must be a path, or null for {default}.")
        fraction = self.val_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
            raise UserError(f"data.val_fraction is {short_repr(fraction)}; it must lie between 0 and 1, e.g. 0.1.")
        check_at_least(1, "data.batch_size", self.batch_size, most=MAX_BATCH_SIZE)
        if self.val_tokens is not None:
            check_at_least(1, "data.val_tokens", self.val_tokens)


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes ids."""

    kind: str = "bpe"
    """A function of data/tokenizers/: "byte", "bpe", "tiktoken" ..."""
    vocab_size: int | None = None
    """Tokens that bpe aims for: 256 bytes and the merges. None: what a budget picks, or what suits the text."""
    name: str = "gpt2"
    """Which of tiktoken's own encodings kind "tiktoken" uses."""

    def __post_init__(self):
        check_fields(self, "tokenizer")
        if self.kind not in TOKENIZERS:
            raise UserError(f"tokenizer.kind is {short_repr(self.kind)}; it must be one of {', '.join(TOKENIZERS)}.")
        size = self.vocab_size
        learned = TOKENIZERS[self.kind].learned
        if learned and size is not None and not (type(size) is int and 257 <= size <= MAX_VOCAB_SIZE):
            raise UserError(
                f"tokenizer.vocab_size is {short_repr(size)}; {self.kind} takes a whole number from 257 to "
                f"{MAX_VOCAB_SIZE}, and tokenizer=byte has 256."
            )


def check_at_least(least: int, name: str, value: object, most: float = math.inf) -> None:
    """Raises UserError unless the value is a whole number of at least `least`, and at most `most`."""
    if type(value) is not int or not least <= value <= most:
        bound = f" and at most {most:,}" if most < math.inf else ""
        raise UserError(f"{name} is {short_repr(value)}; it must be a whole number of at least {least}{bound}.")
