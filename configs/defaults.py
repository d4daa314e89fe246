"""The default config of each program, and the names of its keys."""

from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from configs import schema

CONFIG_DIR = Path(__file__).resolve().parent


def default_config(config_name: str) -> dict[str, Any]:
    """The config without any command-line settings, as plain values."""
    GlobalHydra.instance().clear()  # a run that failed may have left it initialized
    schema.register()
    with hydra.initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        return OmegaConf.to_container(hydra.compose(config_name, []), resolve=True)


def known_keys(config_name: str) -> list[str]:
    """All dotted keys and groups of a program's config."""
    return list(flatten(default_config(config_name)))


def choices(group: str) -> list[str]:
    """The files of a config group."""
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, including the groups themselves."""
    flat = {}
    for name, value in config.items():
        flat[prefix + name] = value
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
    return flat
