"""The typed config of a training run, and the defaults of the optimizer. Does not import torch."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.config import DataConfig, TokenizerConfig
from data.tokenizers import TOKENIZERS
from model.config import RENAMED_FIELDS, GPTConfig
from system.checks import check_fields, short_repr
from system.errors import UserError
from training.loggers import check_loggers
from training.optim import OPTIMIZERS


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = "muon"
    """Name of a function in training/optim.py."""
    lr: float = 3e-3
    """Peak learning rate of AdamW."""
    embedding_lr: float | None = None
    """Peak learning rate of AdamW for bigram embeddings and, unless tied, token embeddings. None: lr."""
    muon_lr: float = 0.014
    """Peak learning rate of Muon: the size of an update in units of an orthogonal matrix."""
    muon_momentum: float = 0.9
    """Decay of Muon's running average of gradients, per step."""
    beta1: float = 0.9
    """Decay of AdamW's first moment, per step."""
    beta2: float = 0.99
    """Decay of AdamW's second moment, per step."""
    weight_decay: float = 0.1
    """Weight decay of matrices, multiplied by the learning rate; vectors such as biases have none."""
    warmup_fraction: float = 0.01
    """Fraction of the run over which the learning rate grows linearly from 0."""
    cooldown_fraction: float = 0.5
    """Fraction of the run, at its end, over which the learning rate falls linearly to 0."""

    def __post_init__(self):
        """Raises UserError for invalid values."""
        check_fields(self, "optimizer")
        if self.name not in OPTIMIZERS:
            raise UserError(f"optimizer.name is {short_repr(self.name)}, but must be one of {', '.join(OPTIMIZERS)}.")
        for field in ("lr", "embedding_lr", "muon_lr"):
            value = getattr(self, field)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"optimizer.{field} is {value}, but must be above 0.")
        for field in ("muon_momentum", "beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise UserError(f"optimizer.{field} is {getattr(self, field)}, but must be at least 0 and below 1.")
        if not 0 <= self.weight_decay < float("inf"):
            raise UserError(f"optimizer.weight_decay is {self.weight_decay}, but must be at least 0.")
        if not (
            self.warmup_fraction >= 0
            and self.cooldown_fraction >= 0
            and self.warmup_fraction + self.cooldown_fraction <= 1
        ):
            raise UserError(
                f"optimizer.warmup_fraction {self.warmup_fraction} and optimizer.cooldown_fraction "
                f"{self.cooldown_fraction} are fractions of the run: each must be at least 0, and their sum at most 1."
            )


@dataclass(frozen=True)
class SweepJob:
    """One run of a sweep."""

    sweep_dir: Path
    number: int
    settings: str
    """The settings that differ between the runs of the sweep, such as "model.num_heads=4"."""

    @property
    def run_dir(self) -> Path:
        """The same whenever the sweep is resumed."""
        settings = re.sub(r"[^\w.,-]+", "_", self.settings)[:80]
        return self.sweep_dir / f"{self.number:02d}_{settings}"


@dataclass(frozen=True)
class Resumed:
    """A run that is resumed. `checkpoint` is None if the run was stopped before it saved one."""

    run_dir: Path
    checkpoint: Path | None
    changes: tuple[str, ...]
    """What the command line changes, as text that begins with the key."""


@dataclass(frozen=True)
class RunConfig:
    """The config of a run. configs/compose.py builds it once; configs/train.yaml explains each key."""

    model: GPTConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    optimizer: OptimizerConfig
    trainer: dict[str, Any]
    """Options of Lightning's Trainer, as plain values."""
    logger: dict[str, dict[str, Any]]
    """Names of loggers (training/loggers) -> their options."""
    seed: int
    budget: Any
    """A time such as "5m", or "auto"; `training.budget.total_budget` reads it."""
    compile: str
    kernels: bool
    num_validations: int
    runs_dir: str
    resume: str | None
    init_from: str | None

    # The following fields are not keys.
    overrides: tuple[str, ...] = ()
    """The command line as Hydra overrides; in a sweep, with the values of this run."""
    explicit_keys: frozenset[str] = frozenset()
    """Keys set on the command line, and keys that a file chosen there sets to another value than the default."""
    sweep_job: SweepJob | None = None
    resumed: Resumed | None = None

    NOT_KEYS = ("overrides", "explicit_keys", "sweep_job", "resumed")

    def __post_init__(self):
        """Raises UserError for invalid values."""
        check_loggers(self.logger)
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed is {self.seed}, but must be a whole number from 0 to {2**32 - 1}.")
        if self.model.vocab_size is not None:
            raise UserError("model.vocab_size comes from the tokenizer. Set tokenizer.vocab_size instead.")
        kind, size = self.tokenizer.kind, self.tokenizer.vocab_size
        registered = TOKENIZERS[kind]
        fixed = not registered.learned and size not in (None, registered.vocab_size)
        if fixed and "tokenizer.vocab_size" in self.overridden_keys:
            own = f"has {registered.vocab_size} tokens" if registered.vocab_size else "has a vocabulary of its own"
            raise UserError(
                f"tokenizer.vocab_size is {size}, but tokenizer={kind} {own}. Leave it out, or use tokenizer=bpe alone."
            )

    @property
    def overridden_keys(self) -> frozenset[str]:
        """Keys and groups set on the command line, in a sweep including those of this run."""
        return keys_of(self.overrides)

    def values(self) -> dict[str, Any]:
        """All keys and their values; groups are dictionaries."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in self.NOT_KEYS}

    def get(self, key: str) -> Any:
        """The value of a dotted key such as "model.d_model"; None for a Trainer option that is not set."""
        group, _, name = key.rpartition(".")
        if not group:
            return getattr(self, name)
        owner = getattr(self, group)
        return owner.get(name) if isinstance(owner, dict) else getattr(owner, name)

    def replace_values(self, values: Mapping[str, Any]) -> "RunConfig":
        """Returns a copy with other values of some dotted keys. Raises UserError if they do not fit each other."""
        groups: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            group, _, name = key.rpartition(".")
            groups.setdefault(group, {})[name] = value
        changed = groups.pop("", {})
        for group, fields in groups.items():
            owner = getattr(self, group)
            changed[group] = owner | fields if isinstance(owner, dict) else dataclasses.replace(owner, **fields)
        return dataclasses.replace(self, **changed)


RENAMED_KEYS = {f"model.{old}": f"model.{new}" for old, new in RENAMED_FIELDS.items()} | {
    "validations": "num_validations",
    "optimizer.warmup": "optimizer.warmup_fraction",
    "optimizer.cooldown": "optimizer.cooldown_fraction",
}
"""Old names of keys -> new names."""


def keys_of(overrides: Iterable[str]) -> frozenset[str]:
    """Keys and groups in overrides such as "model=llama", "+seed=1" and "~trainer.precision"."""
    return frozenset(override.lstrip("+~").partition("=")[0] for override in overrides)
