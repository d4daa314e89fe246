"""Config of the data and the tokenizer, with all defaults. Imports nothing slow, so that errors appear at once."""

import math
from dataclasses import dataclass

from data.tokenizers import TOKENIZERS
from data.tokenizers.bpe import PATTERNS
from system.checks import check_fields, short_repr
from system.errors import UserError

MAX_VOCAB_SIZE = 1_000_000
MAX_BATCH_SIZE = 1 << 20


@dataclass(frozen=True)
class DataConfig:
    """The training text, how it is split, and the size of a batch."""

    corpus: str | None = None
    """Text to train on: a UTF-8 file, a folder, or a glob. None: the embedded Shakespeare. Binary files, duplicates,
    and the project's own run directories and cache files are skipped."""
    val_fraction: float = 0.1
    """Fraction of the text, at its end, that is held out for validation."""
    batch_size: int = 24
    """Number of sequences per batch, on each device."""
    val_tokens: int | None = 32_768
    """Number of tokens to predict in each validation, spread evenly over the validation split. None: all of them.
    The final validation uses the whole split, as far as the budget allows."""
    cache_dir: str | None = None
    """Directory for learned tokenizers and tokenized text (the 64 most recently used files), which can be deleted at
    any time. None: .cache in the project."""

    def __post_init__(self):
        """Validates the fields. Raises UserError."""
        for name, default in (("corpus", "Shakespeare"), ("cache_dir", ".cache")):
            value = getattr(self, name)
            if not isinstance(value, str | None) or value == "":
                raise UserError(f"data.{name} is {short_repr(value)}; it must be a path, or null for {default}.")
        fraction = self.val_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
            raise UserError(f"data.val_fraction is {short_repr(fraction)}; it must be between 0 and 1, such as 0.1.")
        check_at_least(1, "data.batch_size", self.batch_size, most=MAX_BATCH_SIZE)
        if self.val_tokens is not None:
            check_at_least(1, "data.val_tokens", self.val_tokens)


@dataclass(frozen=True)
class TokenizerConfig:
    """How text is converted to token ids."""

    kind: str = "bpe"
    """Tokenizer, one of data/tokenizers/: "bpe" (learned from the training text), "byte", or "tiktoken"."""
    vocab_size: int | None = None
    """Vocabulary size of bpe: 256 bytes plus the merges to learn. None: chosen by the budget, or by the text's size."""
    pattern: str = "default"
    """How bpe splits text into the pieces within which it merges: "default", or "gpt2" for an export to llama.cpp."""
    name: str = "gpt2"
    """Name of the tiktoken encoding, for kind "tiktoken"."""

    def __post_init__(self):
        """Validates the fields. Raises UserError."""
        check_fields(self, "tokenizer")
        if self.kind not in TOKENIZERS:
            raise UserError(f"tokenizer.kind is {short_repr(self.kind)}; it must be one of {', '.join(TOKENIZERS)}.")
        if self.pattern not in PATTERNS:
            raise UserError(f"tokenizer.pattern is {short_repr(self.pattern)}; it must be {' or '.join(PATTERNS)}.")
        size = self.vocab_size
        learned = TOKENIZERS[self.kind].learned
        if learned and size is not None and not (type(size) is int and 257 <= size <= MAX_VOCAB_SIZE):
            raise UserError(
                f"tokenizer.vocab_size is {short_repr(size)}; {self.kind} takes a whole number from 257 to "
                f"{MAX_VOCAB_SIZE}, and tokenizer=byte has 256."
            )


def check_at_least(least: int, name: str, value: object, most: float = math.inf) -> None:
    """Raises UserError unless the value is an integer from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        bound = f" and at most {most:,}" if most < math.inf else ""
        raise UserError(f"{name} is {short_repr(value)}; it must be a whole number of at least {least}{bound}.")
