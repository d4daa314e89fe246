"""A run's config.yaml: written by save_config, and read when the run is resumed.

The file may have been edited, or come from another person, so its values are checked like those of the command line.
"""

import re
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.defaults import default_config, flatten
from system.checks import short_repr
from system.errors import UserError
from system.files import atomic_write
from training.config import RENAMED_KEYS, Resumed, RunConfig
from training.resume import check_unfinished, find_resumable_run, is_fixed

_INVOCATION_KEYS = ("resume", "runs_dir")
_MAX_BYTES = 1 << 16  # save_config writes about 2,000
_MAX_DEPTH = 16  # save_config writes 2 levels
_MAX_CHARS = 4096  # of one value: the longest path
_START_TOKENS = (
    *(yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken),
    *(yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken),
)
_END_TOKENS = (yaml.BlockEndToken, yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)


def save_config(config: RunConfig, run_dir: Path) -> None:
    """Writes config.yaml atomically, with all values of the run, including defaults, and no interpolations."""
    values = OmegaConf.create(_escape_values(config.values()))
    with atomic_write(run_dir / "config.yaml", run_dir / "config.tmp") as file:
        file.write(OmegaConf.to_yaml(values).encode())


def training_command(run_dir: Path) -> dict[str, str]:
    """How a run was trained: "text" and "command". Empty if there is no readable config.yaml."""
    try:
        saved = flatten(OmegaConf.to_container(_saved_config(run_dir)))
    except (OSError, UserError):
        return {}
    default = flatten(default_config("train"))
    ours = {
        key: value for key, value in saved.items() if not isinstance(value, dict) and default.get(key, key) != value
    }
    left_out = ("resume", "init_from", "runs_dir", "data.cache_dir", "model.vocab_size")
    settings = [shlex.quote(f"{key}={_shown(value)}") for key, value in ours.items() if key not in left_out]
    return {
        "text": str(saved.get("data.corpus") or "the embedded Shakespeare"),
        "command": " ".join(["python train.py", *settings]),
    }


def _escape_values(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _escape_values(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_escape_values(value) for value in node]
    return escape_interpolation(node) if isinstance(node, str) else node


def escape_interpolation(text: str) -> str:
    """Escapes ${...}, which OmegaConf would resolve: with a backslash, and backslashes before it doubled."""
    return re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + r"\${", text)


def merge_saved_config(config: DictConfig, overridden_keys: Collection[str]) -> tuple[DictConfig, Resumed | None]:
    """The saved config of the run to resume, with changes from the command line. Without `resume`, the config as it is.

    Raises:
        UserError: there is no such run, it is finished, or a setting cannot be changed.
    """
    if config.resume in (None, "false"):
        return config, None
    if config.init_from is not None:
        raise UserError("resume continues a run, init_from starts a new one. Leave one out.")
    run_dir, checkpoint = find_resumable_run(str(config.resume), Path(config.runs_dir))
    merged, changes = _merge_changes(_saved_config(run_dir), config, overridden_keys, run_dir)
    check_unfinished(run_dir, lambda key: OmegaConf.select(merged, key), changes)
    return merged, Resumed(run_dir, checkpoint, tuple(changes))


def _saved_config(run_dir: Path) -> DictConfig:
    """Reads config.yaml. Raises UserError for links in the run directory and for anything but plain values."""
    path = run_dir / "config.yaml"
    for other in run_dir.rglob("*"):  # the run would overwrite or delete the target of a link
        if other.is_symlink() or not (other.is_file() or other.is_dir()):
            raise UserError(f"{other} is not a regular file. Replace it by a copy of its target, or start a new run.")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        text = path.read_text(encoding="utf-8")
        _check_yaml_expansion(text)
        saved = OmegaConf.create(text)
    except Exception as error:  # noqa: BLE001 -- PyYAML raises many types for a damaged file
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}. Start a new run.") from error
    if not isinstance(saved, DictConfig):
        raise UserError(f"{path} is not the config of a run. Start a new run.")
    if renamed := [
        f"{old} is now {new}" for old, new in RENAMED_KEYS.items() if OmegaConf.select(saved, old) is not None
    ]:
        raise UserError(
            f"{path} was written by an earlier version of the project: {', '.join(renamed)}. Resume the run with that "
            f"version, or start a new one from its weights: init_from={run_dir}"
        )
    if wrong := next(_wrong_values(OmegaConf.to_container(saved)), None):
        raise UserError(f"{path} has {wrong}. Replace it by the run's value.")
    return saved


def _check_yaml_expansion(text: str) -> None:
    """Raises ValueError for YAML that would expand to gigabytes or take hours, without parsing all of it."""
    depth = 0
    for token in yaml.scan(text):
        if isinstance(token, yaml.AliasToken):
            raise ValueError("it has YAML aliases, which can expand to gigabytes")
        depth += isinstance(token, _START_TOKENS) - isinstance(token, _END_TOKENS)
        if depth > _MAX_DEPTH:
            raise ValueError(f"its values are nested more than {_MAX_DEPTH} levels deep")


def _wrong_values(node: Any) -> Iterator[str]:
    """Describes values that no run writes: huge ones, and texts with a ${...} that OmegaConf would resolve.

    OmegaConf does not resolve it after an odd number of backslashes.
    """
    if isinstance(node, (dict, list)):
        for value in node.values() if isinstance(node, dict) else node:
            yield from _wrong_values(value)
    elif isinstance(node, str) and len(node) > _MAX_CHARS:
        yield f"a text of {len(node):,} characters"
    elif isinstance(node, int) and node.bit_length() > 63:
        yield short_repr(node)
    elif isinstance(node, str) and re.search(r"(?<!\\)(\\\\)*\$\{", node):
        yield f"{short_repr(node)}, which is an interpolation"


def _merge_changes(
    saved: DictConfig, config: DictConfig, overridden_keys: Collection[str], run_dir: Path
) -> tuple[DictConfig, list[str]]:
    """The saved config with the keys of the command line, and a description of each change."""
    for key in config:
        value = OmegaConf.select(saved, key)
        if isinstance(config[key], DictConfig) and key in saved and not isinstance(value, DictConfig):
            raise UserError(f"{run_dir}/config.yaml has {key}: {_shown(value)}, but it must be a group of keys.")
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
            f"{run_dir}/config.yaml: {key} does not fit this version of the project ({reason}). Restore the value "
            "that the run wrote, or start a new run."
        ) from error
    for key in sorted(OmegaConf.missing_keys(merged)):
        raise UserError(f"{run_dir}/config.yaml has no value for {key}. Add one, or start a new run.")
    merged.resume = None
    changes, rejected = [], []
    for key in _changed_keys(config, overridden_keys):
        old, new = OmegaConf.select(saved, key), OmegaConf.select(config, key)
        if old != new:
            (rejected if is_fixed(key) else changes).append(f"{key} {_shown(old)} -> {_shown(new)}")
            OmegaConf.update(merged, key, new, merge=False)
    if rejected:
        raise UserError(
            f"{run_dir} cannot be resumed with {', '.join(rejected)}: weights and batches depend on the first value. "
            "Leave it out, or start a new run from its weights: init_from=CHECKPOINT"
        )
    return merged, changes


def _changed_keys(config: DictConfig, overridden_keys: Collection[str]) -> list[str]:
    """Dotted keys of the run that the command line sets, with groups expanded. Raises UserError for a recipe."""
    keys = []
    for key in sorted(overridden_keys):
        if key == "experiment":
            raise UserError("experiment cannot be set for a resumed run. Give only the keys to change.")
        node = OmegaConf.select(config, key)
        if key in _INVOCATION_KEYS or key.startswith("hydra"):
            continue
        keys += [f"{key}.{name}" for name in node] if isinstance(node, DictConfig) and key != "logger" else [key]
    return keys


def _shown(value: Any) -> str:
    if isinstance(value, DictConfig):  # loggers
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else value if isinstance(value, str) and len(value) < 80 else short_repr(value)
