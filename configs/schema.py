"""Which keys a config has, of which type; Hydra refuses all others. And the way from them to typed configs.

Keys and types are those of the dataclasses: of each program one, with the groups model, data, tokenizer and optimizer
in it. Defaults of the groups are in the dataclasses too, all others in configs/train.yaml, configs/sample.yaml and so
on.
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

# The benchmarks' own, which are above this room.


@dataclass(frozen=True)
class ContextCostConfig:
    """All of a call of benchmarks.context_cost."""

    model: GPTConfig
    optimizer: OptimizerConfig
    lengths: list[int]
    tokens_per_batch: int
    seconds: float
    memory_mb: float | None
    png: str | None
    logdir: str | None
    device: str
    seed: int


@dataclass(frozen=True)
class AttentionSpeedConfig:
    """All of a call of benchmarks.attention_speed."""

    lengths: list[int]
    tokens_per_batch: int
    device: str


@dataclass(frozen=True)
class TrainingSpeedConfig:
    """All of a call of benchmarks.training_speed."""

    vocab_size: int
    compiled: bool
    keep_memory: bool


@dataclass(frozen=True)
class KernelsConfig:
    """All of a call of benchmarks.kernels."""

    vocab_size: int
    pairs: int
    keep_memory: bool


@dataclass(frozen=True)
class QualityConfig:
    """All of a call of benchmarks.quality."""

    seeds: int
    budgets: list[str]
    corpus: str | None


CONFIG_CLASSES = {"model": GPTConfig, "data": DataConfig, "tokenizer": TokenizerConfig, "optimizer": OptimizerConfig}
GROUPS = (*CONFIG_CLASSES, "trainer")
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
    """The top-level keys of a program's config. Other fields are filled in from where the config comes from."""
    derived = (*getattr(root, "NOT_KEYS", ()), "explicit_keys")
    return [f.name for f in fields(root) if f.name not in derived]


def _schema_of(config_class: type) -> type:
    """A dataclass with the same keys that Hydra can fill in: not frozen, and a group can be any file's content."""
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


def register(only_shown: bool = False) -> None:
    """Makes the schemas known to Hydra, beside the groups so that none is a choice, and what YAML may compute.

    Args:
        only_shown: the config is not run with, and makes no directory.
    """
    OmegaConf.register_new_resolver("div", lambda a, b: max(1, int(a) // int(b)), replace=True)
    OmegaConf.register_new_resolver("new_sweep_dir", str if only_shown else new_sweep_dir, replace=True)
    OmegaConf.register_new_resolver("three_question_marks", lambda: "???", replace=True)
    store = ConfigStore.instance().store
    for name, root in ROOTS.items():
        store(name=f"{name}_schema", node=_schema_of(root))
    for group, config_class in CONFIG_CLASSES.items():
        store(name=f"{group}_schema", node=_schema_of(config_class))
    # Lightning's options are Lightning's to know: any key passes here, training/trainer.py refuses unknown ones.
    store(name="trainer_schema", node=OmegaConf.create({}, flags={"struct": False}))


def build(config_class: type[T], node: DictConfig, **derived: Any) -> T:
    """The dataclass behind a config, with those of its groups; `derived` fills fields that are no keys.

    Raises UserError for a key the dataclass does not have, and (from the dataclass) for values that cannot work.
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
