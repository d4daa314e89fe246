"""Everything a training run is made of, and every default of the optimizer, once. Needs no torch."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.config import DataConfig, TokenizerConfig
from data.tokenizers import TOKENIZERS
from model.config import RENAMED_FIELDS, GPTConfig
from system.checks import check_fields, short_repr
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
    warmup_fraction: float = 0.01
    """Share of the run over which the learning rate grows from 0."""
    cooldown_fraction: float = 0.5
    """Share of the run, at its end, over which the learning rate falls linearly to 0."""

    def __post_init__(self):
        """Refuses what cannot work. Raises UserError."""
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
                f"{self.cooldown_fraction} are shares of the run: each at least 0, together at most 1."
            )


@dataclass(frozen=True)
class SweepJob:
    """One run of a sweep."""

    sweep_dir: Path
    number: int
    settings: str
    """What is not the same in all of its runs, such as "model.num_heads=4"."""


@dataclass(frozen=True)
class Resumed:
    """A run that is resumed. `checkpoint` is None where it was stopped before the first one."""

    run_dir: Path
    checkpoint: Path | None
    changes: tuple[str, ...]
    """What the command line changes, in words."""


@dataclass(frozen=True)
class RunConfig:
    """Everything a run is made of. configs/cli.py builds it, once; configs/train.yaml says what each key means."""

    model: GPTConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    optimizer: OptimizerConfig
    trainer: dict[str, Any]
    """Options of Lightning's Trainer, as plain values."""
    seed: int
    budget: Any
    """A time such as "5m", or "auto"; `training.budget.total_budget` reads it."""
    compile: str
    num_validations: int
    runs_dir: str
    resume: str | None
    init_from: str | None

    # What follows is no key.
    overrides: tuple[str, ...] = ()
    """The arguments of the command line as Hydra takes them; in a sweep those of this run too."""
    explicit_keys: frozenset[str] = frozenset()
    """Those that the command line gives, or a file that it chooses gives another value than the default."""
    sweep_job: SweepJob | None = None
    resumed: Resumed | None = None

    NOT_KEYS = ("overrides", "explicit_keys", "sweep_job", "resumed")

    def __post_init__(self):
        """Refuses what cannot work. Raises UserError."""
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed is {self.seed}, but must be a whole number from 0 to {2**32 - 1}.")
        if self.model.vocab_size is not None:
            raise UserError("model.vocab_size comes from the tokenizer. Set tokenizer.vocab_size in its place.")
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
        """Keys and groups that the command line sets, in a sweep those of this run too."""
        return keys_of(self.overrides)

    def values(self) -> dict[str, Any]:
        """The keys and their values, groups as dictionaries."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in self.NOT_KEYS}

    def get(self, key: str) -> Any:
        """The value of a dotted key, such as "model.d_model"; None where there is none."""
        group, _, name = key.rpartition(".")
        if not group:
            return getattr(self, name)
        owner = getattr(self, group)
        return owner.get(name) if isinstance(owner, dict) else getattr(owner, name)

    def replace_values(self, values: Mapping[str, Any]) -> "RunConfig":
        """A copy with these values of dotted keys. Raises UserError where they cannot work together."""
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
"""Keys of earlier versions -> what they are called now."""


def keys_of(overrides: Iterable[str]) -> frozenset[str]:
    """Keys and groups that settings such as "model=llama", "+seed=1" and "~trainer.precision" are about."""
    return frozenset(override.lstrip("+~").partition("=")[0] for override in overrides)
