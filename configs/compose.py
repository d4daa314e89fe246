"""From settings to the frozen, typed config of a program."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from configs import schema
from configs.arguments import PATH_KEYS, quote_literal
from configs.defaults import CONFIG_DIR, flatten
from configs.error_lines import abbreviated_repr, format_hydra_error
from configs.saved_config import escape_interpolation, merge_saved_config
from configs.unknown_keys import explain_unknown_key
from system.errors import UserError
from system.files import expand_user
from training.config import RunConfig, SweepJob, keys_of
from training.trainer_options import REJECTED, SUPPORTED_OPTIONS

YES, NO = ("true", "yes", "on", "y", "1"), ("false", "no", "off", "n", "0")


def compose(config_name: str, overrides: list[str]) -> Any:
    """The typed config of a program, without Hydra's run directory and sweeps. Raises UserError."""
    schema.register()
    overrides = [quote_literal(override, config_name) for override in overrides]
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        try:
            config = hydra.compose(config_name, overrides)
        except Exception as error:  # Hydra does not document which types it raises
            raise UserError(format_hydra_error(error, config_name)) from error
        config = check_config(config, config_name)
        if config_name != "train":
            return typed_config(config, config_name, overrides)
        config, resumed = merge_saved_config(config, keys_of(overrides))
        return typed_config(config, config_name, overrides, resumed=resumed)


def run_config(config: DictConfig) -> RunConfig:
    """The typed config of a training run under hydra.main; of a resumed run, based on its config.yaml.

    Raises:
        UserError: a value that cannot work.
    """
    hydra_config, sweep_job = HydraConfig.get(), None
    if hydra_config.mode == RunMode.MULTIRUN:
        sweep_job = current_sweep_job()
    overrides = tuple(OmegaConf.to_container(hydra_config.overrides.task))  # ${...} in them stays as typed
    config, changed = check_config(config, "train"), keys_of(overrides)
    if sweep_job and config.resume not in (None, "false"):
        raise UserError("resume continues a run or a sweep, so there is nothing to sweep over. Leave out -m.")
    if sweep_job and (sweep_job.run_dir / "config.yaml").is_file():  # the sweep was interrupted in this run
        config.resume, changed = str(sweep_job.run_dir), frozenset()
    config, resumed = merge_saved_config(config, changed)
    return typed_config(config, "train", overrides, sweep_job=sweep_job, resumed=resumed)


def current_sweep_job() -> SweepJob:
    """The run of the sweep that Hydra has just composed."""
    hydra_config = HydraConfig.get()
    settings = swept_overrides(OmegaConf.to_container(hydra_config.overrides.task))
    return SweepJob(Path(hydra_config.sweep.dir), hydra_config.job.num, ",".join(settings))


def swept_overrides(overrides: Sequence[str]) -> list[str]:
    """The overrides of a run of a sweep that differ between its runs."""
    typed = {argument.partition("=")[0]: argument for argument in sys.argv}  # the same in all runs
    return [text for text in overrides if typed.get(text.partition("=")[0]) != text]


def typed_config(config: DictConfig, config_name: str, overrides: Sequence[str], **derived: Any) -> Any:
    """The composed config as the program's frozen dataclass. Raises UserError for values that cannot work.

    Args:
        overrides: the settings of the command line, in Hydra's syntax.
        derived: fields that are not keys.
    """
    root = schema.ROOTS[config_name]
    names = [field.name for field in dataclasses.fields(root)]
    if "overrides" in names:
        derived["overrides"] = tuple(overrides)
    if "explicit_keys" in names:
        derived["explicit_keys"] = explicit_keys(config, config_name, keys_of(overrides))
    return schema.build(root, config, **derived)


def explicit_keys(config: DictConfig, config_name: str, overridden: frozenset[str]) -> frozenset[str]:
    """Keys set on the command line, and keys that a chosen file sets to another value than the default."""
    if not overridden & {*schema.GROUPS, "experiment"}:
        return overridden
    default = hydra.compose(config_name, [])
    default, chosen = (flatten(OmegaConf.to_container(node, resolve=True)) for node in (default, config))
    return overridden.union(key for key in chosen if key not in default or chosen[key] != default[key])


def check_config(config: DictConfig, config_name: str) -> DictConfig:
    """The config with its paths expanded. Raises UserError for unknown keys, missing values and invalid paths."""
    known = schema.keys_of(schema.ROOTS[config_name])
    for key in config:
        if key not in known:  # Hydra accepts any key with a leading +
            raise UserError(explain_unknown_key(str(key), config_name))
    for option in config.get("trainer") or ():  # a group that Hydra cannot check
        if option not in (*SUPPORTED_OPTIONS, *REJECTED):
            raise UserError(explain_unknown_key(f"trainer.{option}", config_name))
    missing = {key for key in known if key not in config} | OmegaConf.missing_keys(config)  # by ~key or key=???
    for key in sorted(missing):
        raise UserError(f"{key} has no value. Give one, or leave it out for the default.")
    for key in PATH_KEYS:
        value = OmegaConf.select(config, key)
        if isinstance(value, str) and (expanded := resolve_path(key, value)) != value:
            OmegaConf.update(config, key, None if expanded is None else escape_interpolation(expanded))
    return config


def resolve_path(key: str, value: str) -> str | None:
    """The path with a leading ~ expanded. `resume` also takes yes and no, which become "true" and None.

    Raises:
        UserError: the value cannot be a path.
    """
    if key == "resume" and value.lower() in YES + NO:  # a directory with one of these names: resume=./1
        return "true" if value.lower() in YES else None
    expanded = expand_user(value)
    try:
        os.lstat(expanded)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # too long, not permitted, or with a NUL character
        long = f"a text of {len(value):,} characters ({abbreviated_repr(value, 40)})"
        given = long if len(value) > 255 else abbreviated_repr(value)
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{key} is {given}, but must be a valid path: {reason}.") from error
    return expanded
