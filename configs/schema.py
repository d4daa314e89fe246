"""The keys and types of each program's config, for Hydra, and the conversion to typed configs.

Keys and types come from dataclasses: one per program, which contains those of the groups model, data, tokenizer and
optimizer. The dataclasses also have the defaults of the groups; all other defaults are in configs/train.yaml,
configs/sample.yaml and so on.
"""

import dataclasses
import difflib
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, TypeVar, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf

from analysis.config import InspectConfig, LessonsConfig
from data.config import DataConfig, TokenizerConfig
from model.config import GPTConfig
from sampling.config import SampleConfig
from system.errors import UserError
from training.config import OptimizerConfig, RunConfig
from training.run_dir import new_sweep_dir

T = TypeVar("T")

# The configs of the benchmarks are here because benchmarks/ imports configs/.


@dataclass(frozen=True)
class ContextCostConfig:
    """The config of benchmarks.context_cost."""

    model: GPTConfig
    optimizer: OptimizerConfig
    lengths: list[int]
    tokens_per_batch: int
    seconds: float
    memory_mb: float | None
    png: str | None
    logdir: str | None
    device: str
    kernels: bool
    seed: int


@dataclass(frozen=True)
class AttentionSpeedConfig:
    """The config of benchmarks.attention_speed."""

    lengths: list[int]
    tokens_per_batch: int
    device: str


@dataclass(frozen=True)
class TrainingSpeedConfig:
    """The config of benchmarks.training_speed."""

    vocab_size: int
    compiled: bool
    kernels: bool
    keep_memory: bool


@dataclass(frozen=True)
class KernelsConfig:
    """The config of benchmarks.kernels."""

    vocab_size: int
    pairs: int
    keep_memory: bool


@dataclass(frozen=True)
class QualityConfig:
    """The config of benchmarks.quality."""

    seeds: int
    budgets: list[str]
    corpus: str | None


CONFIG_CLASSES = {"model": GPTConfig, "data": DataConfig, "tokenizer": TokenizerConfig, "optimizer": OptimizerConfig}
GROUPS = (*CONFIG_CLASSES, "trainer", "logger")
ROOTS = {
    "train": RunConfig,
    "sample": SampleConfig,
    "see": InspectConfig,
    "lessons": LessonsConfig,
    "context_cost": ContextCostConfig,
    "attention_speed": AttentionSpeedConfig,
    "training_speed": TrainingSpeedConfig,
    "kernels": KernelsConfig,
    "quality": QualityConfig,
}


def keys_of(root: type) -> list[str]:
    """The top-level keys of a program's config. Its other fields are derived from how the program was called."""
    derived = (*getattr(root, "NOT_KEYS", ()), "explicit_keys")
    return [f.name for f in fields(root) if f.name not in derived]


def _schema_of(config_class: type) -> type:
    """A dataclass with the same keys for Hydra: not frozen, and with groups of type Any."""
    types = get_type_hints(config_class)
    return make_dataclass(
        config_class.__name__,
        [
            (
                f.name,
                Any if f.name in GROUPS else types[f.name],
                field(default=MISSING if f.default is dataclasses.MISSING else f.default),
            )
            for f in fields(config_class)
            if f.name in keys_of(config_class)
        ],
    )


def register(dry_run: bool = False) -> None:
    """Registers schemas and resolvers with Hydra. The schemas are outside of the groups, so that none is a choice.

    Args:
        dry_run: the config is only shown, so that no directory is made for it.
    """
    OmegaConf.register_new_resolver("div", lambda a, b: max(1, int(a) // int(b)), replace=True)
    OmegaConf.register_new_resolver("new_sweep_dir", str if dry_run else new_sweep_dir, replace=True)
    OmegaConf.register_new_resolver("three_question_marks", lambda: "???", replace=True)
    store = ConfigStore.instance().store
    for name, root in ROOTS.items():
        store(name=f"{name}_schema", node=_schema_of(root))
    for group, config_class in CONFIG_CLASSES.items():
        store(name=f"{group}_schema", node=_schema_of(config_class))
    # The trainer group accepts any key; training/trainer.py knows Lightning's options and rejects the others.
    store(name="trainer_schema", node=OmegaConf.create({}, flags={"struct": False}))


def build(config_class: type[T], node: DictConfig, **derived: Any) -> T:
    """Converts a config and its groups to dataclasses. `derived` fills fields that are not keys.

    Raises:
        UserError: a key that the dataclass does not have, or (from the dataclass) a value that cannot work.
    """
    names = keys_of(config_class)
    for key in node:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=3)
            fix = f"Did you mean {' or '.join(near)}?" if near else f"It has: {', '.join(names)}."
            raise UserError(f"{key} is an unknown key of {config_class.__name__}. {fix}")
    values = {}
    for key in node:
        value = node[key]
        if key in CONFIG_CLASSES and config_class in ROOTS.values():
            value = build(CONFIG_CLASSES[key], value)
        elif isinstance(value, (DictConfig, ListConfig)):
            value = OmegaConf.to_container(value, resolve=True)
        values[key] = value
    return config_class(**values, **derived)
