"""Every default of the optimizer, once. Needs no torch."""

from dataclasses import dataclass

from system.checks import check_fields, short
from system.errors import UserError
from training.optim import OPTIMIZERS


@dataclass(frozen=True)
class OptimizerConfig:
    """How weights follow gradients."""

    name: str = "muon"
    """A function of training/optim.py."""
    lr: float = 3e-3
    """Peak learning rate of AdamW."""
    embedding_lr: float | None = None
    """Peak learning rate of AdamW for token (unless tied) and bigram embeddings. None: lr."""
    muon_lr: float = 0.014
    """Peak learning rate of Muon: the size of an update, relative to an orthogonal matrix."""
    muon_momentum: float = 0.9
    """Share of Muon's running average kept each step."""
    beta1: float = 0.9
    """Share of AdamW's first moment kept each step."""
    beta2: float = 0.99
    """Share of AdamW's second moment kept each step."""
    weight_decay: float = 0.1
    """Share of a matrix forgotten per unit of learning rate; never applied to vectors and biases."""
    warmup: float = 0.01
    """Share of the run over which the learning rate grows from 0."""
    cooldown: float = 0.5
    """Share of the run, at its end, over which the learning rate falls linearly to 0."""

    def __post_init__(self):
        """Refuses what cannot work. Raises UserError."""
        check_fields(self, "optimizer")
        if self.name not in OPTIMIZERS:
            raise UserError(f"optimizer.name is {short(self.name)}, but must be one of {', '.join(OPTIMIZERS)}.")
        for field in ("lr", "embedding_lr", "muon_lr"):
            value = getattr(self, field)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"optimizer.{field} is {value}, but must be above 0.")
        for field in ("muon_momentum", "beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise UserError(f"optimizer.{field} is {getattr(self, field)}, but must be at least 0 and below 1.")
        if not 0 <= self.weight_decay < float("inf"):
            raise UserError(f"optimizer.weight_decay is {self.weight_decay}, but must be at least 0.")
        if not (self.warmup >= 0 and self.cooldown >= 0 and self.warmup + self.cooldown <= 1):
            raise UserError(
                f"optimizer.warmup {self.warmup} and optimizer.cooldown {self.cooldown} are shares of the run: "
                "each at least 0, together at most 1."
            )
