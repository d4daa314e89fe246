"""Configs of the commands in analysis/. The defaults are in configs/see.yaml and configs/lessons.yaml."""

from dataclasses import dataclass

from model.config import GPTConfig
from system.errors import UserError


@dataclass(frozen=True)
class InspectConfig:
    """Config of analysis.inspect_attention; configs/see.yaml describes the fields."""

    model: GPTConfig
    prompt: str | None
    prompt_file: str | None
    checkpoint: str | None
    untrained: bool
    layer: int
    head: int
    token: str | None
    value_weighted: bool
    ablate: str | None
    effects: bool
    lens: bool
    attribution: bool
    corrupted: str | None
    answers: str | None
    png: str | None
    html: str | None
    runs_dir: str
    explicit_keys: frozenset[str] = frozenset()
    """Keys set on the command line, or changed from the default by a config file selected there."""

    def __post_init__(self):
        """Validates the fields. Raises UserError."""
        if not self.untrained and any(key.startswith("model.") for key in self.explicit_keys):
            raise UserError("A checkpoint has its own model config. Add untrained=true, or remove the model keys.")
        if self.untrained and self.checkpoint is not None:
            raise UserError("untrained=true and checkpoint are both given. Leave one out.")
        if self.corrupted is not None and self.answers is None:
            raise UserError('corrupted needs two answers to compare. Give them: answers=" Mary| John"')
        if self.answers is not None and self.corrupted is None and not self.attribution:
            raise UserError("answers has no effect without corrupted or attribution=true. Add one, or leave it out.")


@dataclass(frozen=True)
class LessonsConfig:
    """Config of analysis.lessons; configs/lessons.yaml describes the fields."""

    lengths: list[int]
    num_layers: int
    num_heads: int

    def __post_init__(self):
        """Validates the fields. Raises UserError."""
        if not self.lengths or min(self.lengths) < 1:
            raise UserError(f"lengths is {self.lengths}, but must list context lengths of at least 1.")
        for name in ("num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, but must be at least 1.")
