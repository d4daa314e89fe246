"""Which keys a config has, of which type; Hydra refuses all others.

Defaults and types of the groups model, data, tokenizer and optimizer are those of the dataclasses in
model/ and data/. What a run or a sample is made of beside them has its types here and its values in
configs/train.yaml and configs/sample.yaml.
"""

import dataclasses
import difflib
from dataclasses import dataclass, field, make_dataclass
from typing import Any, TypeVar, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from data.config import DataConfig, TokenizerConfig
from model.config import GPTConfig, SamplingConfig
from system.errors import UserError
from training.config import OptimizerConfig
from training.run_dir import new_sweep_dir

T = TypeVar("T")


def _thawed(config_class: type) -> type:
    """The same dataclass, not frozen: Hydra could not override a frozen one."""
    types = get_type_hints(config_class)
    return make_dataclass(
        config_class.__name__,
        [
            (f.name, types[f.name], field(default=MISSING if f.default is dataclasses.MISSING else f.default))
            for f in dataclasses.fields(config_class)
        ],
    )


@dataclass
class TrainSchema:
    """Keys of configs/train.yaml."""

    model: Any = MISSING
    data: Any = MISSING
    tokenizer: Any = MISSING
    optimizer: Any = MISSING
    trainer: Any = MISSING
    budget: Any = MISSING
    seed: int = MISSING
    compile: str = MISSING
    validations: int = MISSING
    runs_dir: str = MISSING
    resume: str | None = MISSING
    init_from: str | None = MISSING


@dataclass
class SampleSchema(_thawed(SamplingConfig)):
    """Keys of configs/sample.yaml: how tokens are drawn, and these."""

    prompt: str | None = MISSING
    prompt_file: str | None = MISSING
    checkpoint: str | None = MISSING
    export: str | None = MISSING
    mode: str = MISSING
    format: str = MISSING
    device: str = MISSING
    runs_dir: str = MISSING


@dataclass
class SeeSchema:
    """Keys of configs/see.yaml."""

    model: Any = MISSING
    prompt: str | None = MISSING
    prompt_file: str | None = MISSING
    checkpoint: str | None = MISSING
    untrained: bool = MISSING
    layer: int = MISSING
    head: int = MISSING
    token: str | None = MISSING
    png: str | None = MISSING
    html: str | None = MISSING
    runs_dir: str = MISSING


@dataclass
class LessonsSchema:
    """Keys of configs/lessons.yaml."""

    lengths: list[int] = MISSING
    num_layers: int = MISSING
    num_heads: int = MISSING


@dataclass
class ContextCostSchema:
    """Keys of configs/context_cost.yaml."""

    model: Any = MISSING
    optimizer: Any = MISSING
    lengths: list[int] = MISSING
    tokens_per_batch: int = MISSING
    seconds: float = MISSING
    memory_mb: float | None = MISSING
    png: str | None = MISSING
    logdir: str | None = MISSING
    device: str = MISSING
    seed: int = MISSING


@dataclass
class AttentionSpeedSchema:
    """Keys of configs/attention_speed.yaml."""

    lengths: list[int] = MISSING
    tokens_per_batch: int = MISSING
    device: str = MISSING


@dataclass
class TrainingSpeedSchema:
    """Keys of configs/training_speed.yaml."""

    vocab_size: int = MISSING
    compiled: bool = MISSING
    keep_memory: bool = MISSING


@dataclass
class KernelsSchema:
    """Keys of configs/kernels.yaml."""

    vocab_size: int = MISSING
    pairs: int = MISSING
    keep_memory: bool = MISSING


@dataclass
class QualitySchema:
    """Keys of configs/quality.yaml."""

    seeds: int = MISSING
    budgets: list[str] = MISSING
    corpus: str | None = MISSING


CONFIG_CLASSES = {"model": GPTConfig, "data": DataConfig, "tokenizer": TokenizerConfig, "optimizer": OptimizerConfig}
GROUPS = (*CONFIG_CLASSES, "trainer")
ROOTS = {
    "train": TrainSchema,
    "sample": SampleSchema,
    "see": SeeSchema,
    "lessons": LessonsSchema,
    "context_cost": ContextCostSchema,
    "attention_speed": AttentionSpeedSchema,
    "training_speed": TrainingSpeedSchema,
    "kernels": KernelsSchema,
    "quality": QualitySchema,
}


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
        store(name=f"{name}_schema", node=root)
    for group, config_class in CONFIG_CLASSES.items():
        store(name=f"{group}_schema", node=_thawed(config_class))
    # Lightning's options are Lightning's to know: any key passes here, training/trainer.py refuses unknown ones.
    store(name="trainer_schema", node=OmegaConf.create({}, flags={"struct": False}))


def build(config_class: type[T], node: DictConfig, **derived: Any) -> T:
    """The dataclass behind a group of the config; `derived` fills fields the config leaves open.

    Raises UserError for a key the dataclass does not have, and (from the dataclass) for values that cannot work.
    """
    names = [f.name for f in dataclasses.fields(config_class)]
    for key in node:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=3)
            mend = f"Did you mean {' or '.join(near)}?" if near else f"It has: {', '.join(names)}."
            raise UserError(f"{key} is no key of {config_class.__name__}. {mend}")
    values = {key: node[key] for key in node if not OmegaConf.is_missing(node, key)}
    return config_class(**{**values, **derived})
