"""Config of sampling, with all defaults. Does not import torch."""

import json
from dataclasses import dataclass

from system.errors import UserError


@dataclass(frozen=True)
class SamplingConfig:
    """How text is sampled."""

    max_new_tokens: int = 300
    """Number of tokens to generate."""
    num_samples: int = 1
    """Number of continuations of the prompt."""
    seed: int = 0
    """Random seed. The n-th sample depends only on the seed and n."""
    temperature: float = 0.8
    """Divides the logits: above 1 the text is more varied, below 1 more predictable. 0: always the likeliest token."""
    top_k: int | None = None
    """Sample only from the k likeliest tokens. None or 0: from all."""
    top_p: float | None = None
    """Sample only from the likeliest tokens that together reach this probability. None or 1: from all."""
    min_p: float | None = None
    """Sample only from tokens at least this fraction as likely as the likeliest one. None or 0: from all."""
    repetition_penalty: float = 1.0
    """Above 1, tokens already in the context become less likely: positive logits are divided by it, negative ones
    multiplied."""
    stop: str | None = None
    """Text that ends generation and is not included. For several, a JSON list: ["\\n\\n", "HAMLET."]."""

    def __post_init__(self):
        """Validates the fields. Raises UserError."""
        for name in ("max_new_tokens", "num_samples"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed is {self.seed}, but must be a whole number from 0 to {2**32 - 1}.")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}, but must be 0 (greedy) or above.")
        if self.top_k is not None and self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}, but must be 0 (off) or the number of tokens to draw among.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}, but must be above 0 and at most 1 (off).")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p}, but must be from 0 (off) to 1 (only the likeliest).")
        if not 1e-6 <= self.repetition_penalty <= 1e6:  # beyond, logits would overflow
            raise UserError(
                f"repetition_penalty is {self.repetition_penalty}, but must be above 0, from 1e-6 to 1e6; 1 is off, "
                "1.2 is much."
            )
        self.stop_sequences  # noqa: B018 -- looked at here to be refused here

    @property
    def filters(self) -> bool:
        """Whether top_k, top_p or min_p is on."""
        return bool(self.top_k or self.min_p or (self.top_p or 1) < 1)

    @property
    def stop_sequences(self) -> list[str]:
        """The texts at which writing ends. Raises UserError for what begins like a list but is none of texts."""
        if not (self.stop or "").startswith("["):
            return [self.stop] if self.stop else []
        try:
            stops = json.loads(self.stop)
        except json.JSONDecodeError:
            stops = None
        if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
            raise UserError(f'stop is {self.stop}, but must be a text, or a JSON list of texts: ["\\n\\n", "["].')
        return stops


@dataclass(frozen=True, kw_only=True)
class SampleConfig(SamplingConfig):
    """All of a call of sample.py: configs/sample.yaml has the values, with what they mean."""

    prompt: str | None
    prompt_file: str | None
    checkpoint: str | None
    export: str | None
    mode: str
    format: str
    device: str
    kernels: bool
    runs_dir: str

    MODES = ("write", "interactive", "score")
    FORMATS = ("text", "jsonl")

    def __post_init__(self):
        """Validates the fields. Raises UserError."""
        super().__post_init__()
        for key, choices in (("mode", self.MODES), ("format", self.FORMATS)):
            if getattr(self, key) not in choices:
                raise UserError(f"{key} is {getattr(self, key)!r}, but must be one of {', '.join(choices)}.")
