"""Configs of the programs in this folder. configs/see.yaml and configs/lessons.yaml have the defaults."""

from dataclasses import dataclass

from model.config import GPTConfig
from system.errors import UserError


@dataclass(frozen=True)
class InspectConfig:
    """All of a call of analysis.inspect_attention."""

    model: GPTConfig
    prompt: str | None
    prompt_file: str | None
    checkpoint: str | None
    untrained: bool
    layer: int
    head: int
    token: str | None
    png: str | None
    html: str | None
    runs_dir: str
    explicit_keys: frozenset[str] = frozenset()
    """Those that the command line gives, or a file that it chooses gives another value than the default."""

    def __post_init__(self):
        """Validates the fields. Raises UserError."""
        if not self.untrained and any(key.startswith("model.") for key in self.explicit_keys):
            raise UserError("A checkpoint brings its own model. Add untrained=true, or leave the model settings out.")
        if self.untrained and self.checkpoint is not None:
            raise UserError("untrained=true and checkpoint are both given. Leave one out.")


@dataclass(frozen=True)
class LessonsConfig:
    """All of a call of analysis.lessons."""

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
