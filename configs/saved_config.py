"""A run's config.yaml: written by save_config, and read again where the run is resumed.

It may have been edited, or come from elsewhere: its values are checked as those of the command line are.
"""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from system.checks import short_repr
from system.errors import UserError
from system.files import atomic_write
from training.config import RENAMED_KEYS, Resumed, RunConfig
from training.resume import check_unfinished, find_resumable_run, is_fixed

_INVOCATION_KEYS = ("resume", "runs_dir")
_CONFIG_BYTES = 1 << 16  # ours has two thousand
_CONFIG_DEPTH = 16  # ours has two
_TEXT_CHARS = 4096  # of a value: the longest path
_BEGINS = (
    *(yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken),
    *(yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken),
)
_ENDS = (yaml.BlockEndToken, yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)


def save_config(config: RunConfig, run_dir: Path) -> None:
    """Writes config.yaml, whole or not at all: every choice of the run, defaults included; nothing left to compute."""
    values = OmegaConf.create(_as_text(config.values()))
    with atomic_write(run_dir / "config.yaml", run_dir / "config.tmp") as file:
        file.write(OmegaConf.to_yaml(values).encode())


def _as_text(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _as_text(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_as_text(value) for value in node]
    return escape_interpolation(node) if isinstance(node, str) else node


def escape_interpolation(text: str) -> str:
    """The text in such a way that OmegaConf takes it as text.

    It would resolve ${...}: a backslash makes that text, and backslashes before it count double.
    """
    return re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + r"\${", text)


def merge_saved_config(config: DictConfig, overridden_keys: Collection[str]) -> tuple[DictConfig, Resumed | None]:
    """The config of the run that `resume` names, with what the command line changes; or the config as it is, and None.

    Raises UserError where there is no such run, where it is finished, and for settings that can't change.
    """
    if config.resume in (None, "false"):
        return config, None
    if config.init_from is not None:
        raise UserError("resume goes on with a run, init_from begins a new one. Leave one out.")
    run_dir, checkpoint = find_resumable_run(str(config.resume), Path(config.runs_dir))
    merged, changes = _with_changes(_saved_config(run_dir), config, overridden_keys, run_dir)
    check_unfinished(run_dir, lambda key: OmegaConf.select(merged, key), changes)
    return merged, Resumed(run_dir, checkpoint, tuple(changes))


def _saved_config(run_dir: Path) -> DictConfig:
    """What config.yaml says, which may come from elsewhere: plain values alone, and no links to other places."""
    path = run_dir / "config.yaml"
    for other in run_dir.rglob("*"):  # we would write, or take away, what a link leads to
        if other.is_symlink() or not (other.is_file() or other.is_dir()):
            raise UserError(f"{other} is no plain file. Put a copy of what it leads to in its place, or start anew.")
    try:
        if path.stat().st_size > _CONFIG_BYTES:
            raise ValueError(f"it has more than {_CONFIG_BYTES:,} bytes")
        text = path.read_text(encoding="utf-8")
        _check_yaml_expansion(text)
        saved = OmegaConf.create(text)
    except Exception as error:  # noqa: BLE001 -- whatever PyYAML finds in a damaged file
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}. Start anew.") from error
    if not isinstance(saved, DictConfig):
        raise UserError(f"{path} is no config of a run. Start anew.")
    if renamed := [
        f"{old} is now {new}" for old, new in RENAMED_KEYS.items() if OmegaConf.select(saved, old) is not None
    ]:
        raise UserError(
            f"{path} was written by an earlier version of the project: {', '.join(renamed)}. Resume the run with that "
            f"version, or start a new one from its weights: init_from={run_dir}"
        )
    if wrong := next(_wrong_values(OmegaConf.to_container(saved)), None):
        raise UserError(f"{path} has {wrong}. Put the value in its place.")
    return saved


def _check_yaml_expansion(text: str) -> None:
    """Raises ValueError for YAML of which a few lines take gigabytes or hours; looks no further than to the first."""
    depth = 0
    for token in yaml.scan(text):
        if isinstance(token, yaml.AliasToken):
            raise ValueError("it has YAML's aliases, of which a few lines make gigabytes")
        depth += isinstance(token, _BEGINS) - isinstance(token, _ENDS)
        if depth > _CONFIG_DEPTH:
            raise ValueError(f"its values lie in each other more than {_CONFIG_DEPTH} deep")


def _wrong_values(node: Any) -> Iterator[str]:
    """What no run writes, in words: sizes beyond all use, and texts in which OmegaConf would resolve ${...}.

    Those are the ones where it is not behind an odd number of backslashes.
    """
    if isinstance(node, (dict, list)):
        for value in node.values() if isinstance(node, dict) else node:
            yield from _wrong_values(value)
    elif isinstance(node, str) and len(node) > _TEXT_CHARS:
        yield f"a text of {len(node):,} characters"
    elif isinstance(node, int) and node.bit_length() > 63:
        yield short_repr(node)
    elif isinstance(node, str) and re.search(r"(?<!\\)(\\\\)*\$\{", node):
        yield f"{short_repr(node)}, which would be computed"


def _with_changes(
    saved: DictConfig, config: DictConfig, overridden_keys: Collection[str], run_dir: Path
) -> tuple[DictConfig, list[str]]:
    """The run's config with what the command line gives, and what that changes."""
    for key in config:
        value = OmegaConf.select(saved, key)
        if isinstance(config[key], DictConfig) and key in saved and not isinstance(value, DictConfig):
            raise UserError(f"{run_dir}/config.yaml has {key}: {_shown(value)}, but it must have keys of its own.")
    try:
        defaults = config.copy()
        if "logger" in saved:  # the saved loggers replace the default one; other groups always have the same keys
            OmegaConf.update(defaults, "logger", {}, merge=False)
            OmegaConf.set_struct(defaults.logger, False)
        merged = OmegaConf.merge(defaults, saved)
    except OmegaConfBaseException as error:
        reason = " ".join(str(error).split("\n")[0].split())[:200]
        key = str(error.full_key or "a key")[:100]
        raise UserError(
            f"{run_dir}/config.yaml: {key} does not fit this version of the project ({reason}). Put back what the run "
            "wrote there, or start anew."
        ) from error
    for key in sorted(OmegaConf.missing_keys(merged)):
        raise UserError(f"{run_dir}/config.yaml has no value for {key}. Put one there, or start anew.")
    merged.resume = None
    changes, refused = [], []
    for key in _changed_keys(config, overridden_keys):
        old, new = OmegaConf.select(saved, key), OmegaConf.select(config, key)
        if old != new:
            (refused if is_fixed(key) else changes).append(f"{key} {_shown(old)} -> {_shown(new)}")
            OmegaConf.update(merged, key, new, merge=False)
    if refused:
        raise UserError(
            f"{run_dir} can't go on with {', '.join(refused)}: its weights and batches were made with the first value. "
            "Leave it out, or start anew: init_from=CHECKPOINT begins with old weights."
        )
    return merged, changes


def _changed_keys(config: DictConfig, overridden_keys: Collection[str]) -> list[str]:
    """Dotted keys of the run that the command line gives, groups written out. Raises UserError for a recipe."""
    keys = []
    for key in sorted(overridden_keys):
        if key == "experiment":
            raise UserError("experiment can't be chosen for a run that is resumed. Give the keys to change.")
        node = OmegaConf.select(config, key)
        if key in _INVOCATION_KEYS or key.startswith("hydra"):
            continue
        keys += [f"{key}.{name}" for name in node] if isinstance(node, DictConfig) and key != "logger" else [key]
    return keys


def _shown(value: Any) -> str:
    if isinstance(value, DictConfig):  # loggers
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else value if isinstance(value, str) and len(value) < 80 else short_repr(value)
