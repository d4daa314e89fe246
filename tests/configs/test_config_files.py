"""Every YAML file works, and says only what differs from the one place where defaults are."""

import dataclasses
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from hydra.core.config_store import ConfigStore

from configs import schema
from configs.compose import compose
from configs.defaults import CONFIG_DIR, default_config
from data.config import DataConfig, TokenizerConfig
from model.config import GPTConfig
from model.gpt import GPT
from sampling.config import SamplingConfig
from system.errors import UserError
from training.config import OptimizerConfig, RunConfig
from training.optim import build_optimizer
from training.trainer import resolve_trainer_options

GROUPS = {"model": GPTConfig, "data": DataConfig, "tokenizer": TokenizerConfig, "optimizer": OptimizerConfig}
FILES = sorted(path.relative_to(CONFIG_DIR) for path in Path(CONFIG_DIR).rglob("*.yaml"))
OPTIONAL = [] if find_spec("optuna") else ["tune"]  # recipes that need a package that is not installed
CHOICES = [(path.parent.name, path.stem) for path in FILES if len(path.parts) == 2 and path.stem not in OPTIONAL]
EXPERIMENTS = [name for group, name in CHOICES if group == "experiment"]


def built(overrides):
    """All that a run builds from its config, without text: on the meta device, so that size costs nothing."""
    config = compose("train", overrides)
    resolve_trainer_options(config.trainer)
    return config


@pytest.mark.parametrize(("group", "name"), CHOICES, ids=lambda value: value)
def test_every_file_composes_and_builds(group, name, monkeypatch):
    monkeypatch.setattr("training.loggers.find_spec", lambda package: package)  # as if wandb and mlflow were installed
    config = built([f"{group}={name}"])
    with torch.device("meta"):
        network = GPT(dataclasses.replace(config.model, vocab_size=1000))
    assert len(build_optimizer(network, config.optimizer).param_groups) >= 1


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("more", [["model=llama"], ["optimizer=adamw", "tokenizer=byte"], ["seed=3"]])
def test_every_recipe_takes_changes(name, more):
    assert built([f"experiment={name}", *more])
    for override in more:
        key, value = override.split("=")
        if key == "seed":
            assert compose("train", [f"experiment={name}", *more]).seed == int(value)


def test_sample_composes_with_the_defaults_of_its_dataclass():
    config = compose("sample", [])
    for field in dataclasses.fields(SamplingConfig):
        assert getattr(config, field.name) == field.default


@pytest.mark.parametrize(
    ("group", "name"), [choice for choice in CHOICES if choice[0] in GROUPS], ids=lambda value: value
)
def test_file_states_only_what_differs_from_the_defaults(group, name):
    content = yaml.safe_load((CONFIG_DIR / group / f"{name}.yaml").read_text(encoding="utf-8"))
    starts_from = content.pop("defaults")[0]  # the dataclass's own defaults, or another choice of the group
    if starts_from == f"/{group}_schema@_here_":
        defaults = {field.name: field.default for field in dataclasses.fields(GROUPS[group])}
    else:
        assert (group, starts_from) in CHOICES
        defaults = compose("train", [f"{group}={starts_from}"]).values()[group]
    chosen = {"kind", "name"}  # says which choice this is, also where it is the default one
    assert {key for key, value in content.items() if defaults[key] == value and key not in chosen} == set()


@pytest.mark.parametrize("group", GROUPS)
def test_keys_of_a_group_are_the_fields_of_its_dataclass(group):
    schema.register()
    node = ConfigStore.instance().load(f"{group}_schema.yaml").node
    assert list(node) == [field.name for field in dataclasses.fields(GROUPS[group])]
    for field in dataclasses.fields(GROUPS[group]):
        assert node[field.name] == field.default


@pytest.mark.parametrize("script", ["train", "sample"])
def test_file_of_a_script_gives_every_key_of_its_schema_a_value(script):
    config = default_config(script)
    assert "???" not in config.values()
    assert list(config) == schema.keys_of(schema.ROOTS[script])


@pytest.mark.parametrize("script", ["train", "sample"])
def test_choices_named_in_comments_are_those_there_are(script):
    for line in (CONFIG_DIR / f"{script}.yaml").read_text(encoding="utf-8").splitlines():
        head, _, comment = line.partition("#")
        group = head.strip("- ").partition(":")[0]
        if group == "model":
            assert set(comment.strip().split(", ")) == {name for of, name in CHOICES if of == group}


# The typed config


def test_dotted_keys_are_read_and_replaced_and_nothing_else_changes():
    config = compose("train", ["trainer.max_steps=7"])
    changed = config.replace_values({"model.d_model": 64, "trainer.max_steps": 9, "num_validations": 2})
    keys = ("model.d_model", "trainer.max_steps", "num_validations", "trainer.no_such_option")
    assert [config.get(key) for key in keys] == [128, 7, 5, None]
    assert [changed.get(key) for key in keys] == [64, 9, 2, None]
    assert dataclasses.replace(changed, model=config.model, trainer=config.trainer, num_validations=5) == config
    with pytest.raises(UserError, match="d_model 66 is not divisible"):
        config.replace_values({"model.d_model": 66})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


@pytest.mark.parametrize(
    ("overrides", "given", "not_given"),
    [
        ([], [], ["model.d_model", "num_validations"]),
        (["model.d_model=128", "++seed=0"], ["model.d_model", "seed"], ["model.num_layers"]),
        (["model=llama"], ["model", "model.mlp"], ["model.d_model", "model.norm"]),
        (["experiment=baby_gpt"], ["model.d_model", "num_validations", "trainer.max_steps"], ["seed", "budget"]),
    ],
    ids=str,
)
def test_given_is_what_the_command_line_says_or_a_file_that_it_chooses(overrides, given, not_given):
    config = compose("train", overrides)
    assert set(given) <= config.explicit_keys and not config.explicit_keys & set(not_given)


@pytest.mark.parametrize("overrides", [[], ["experiment=baby_gpt"]], ids=str)
def test_each_dataclass_of_a_run_is_built_once_at_the_door(monkeypatch, overrides):
    built = []
    for config_class in (*GROUPS.values(), RunConfig):
        check = config_class.__post_init__

        def count(self, check=check):
            built.append(type(self).__name__)
            check(self)

        monkeypatch.setattr(config_class, "__post_init__", count)
    compose("train", overrides)
    assert sorted(built) == sorted([config_class.__name__ for config_class in (*GROUPS.values(), RunConfig)])


def test_network_without_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size"):
        GPT(compose("train", []).model)
