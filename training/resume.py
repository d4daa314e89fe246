"""A run goes on: which one, with which settings, and which of them can't change.

The settings are those of the run's config.yaml; keys on the command line change them, where they can be changed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from system.checks import short
from system.errors import UserError
from training.ranks import told_run_dir
from training.run_dir import given_keys, in_use

# What weights, optimiser state and the order of batches were made with. The text may lie elsewhere: what it says is
# compared (training/initial_state.py).
_FIXED = ("model.", "tokenizer.", "data.", "seed", "optimizer.name")
_FREE = ("model.dropout", "model.bigram_dropout", "data.cache_dir", "data.corpus")
_BOUNDS = ("budget", "trainer.max_steps", "trainer.max_epochs", "trainer.max_time")
_NOT_THE_RUNS = ("resume", "runs_dir")
_CONFIG_BYTES = 1 << 16  # ours has two thousand
_CONFIG_DEPTH = 16  # ours has two
_TEXT_CHARS = 4096  # of a value: the longest path
_BEGINS = (
    *(yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken),
    *(yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken),
)
_ENDS = (yaml.BlockEndToken, yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)


@dataclass(frozen=True)
class Resumed:
    """A run to go on with. `checkpoint` is None where it was stopped before the first one."""

    run_dir: Path
    checkpoint: Path | None
    config: DictConfig
    changes: tuple[str, ...]


def resumed_run(config: DictConfig) -> Resumed | None:
    """The run that `resume` names, or None for a new one.

    Raises UserError where there is none, where it is finished, and for settings that can't change.
    """
    if config.resume in (None, "false"):
        return None
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError("resume goes on with one run, so there is nothing to sweep over. Leave out -m.")
    if config.init_from is not None:
        raise UserError("resume goes on with a run, init_from begins a new one. Leave one out.")
    run_dir, checkpoint = _place(str(config.resume), Path(config.runs_dir))
    saved = _saved_config(run_dir)
    merged, changes = _with_changes(saved, config, run_dir)
    if (run_dir / "summary.json").exists() and not any(change.startswith(_BOUNDS) for change in changes):
        bound = next((key for key in _BOUNDS[1:] if OmegaConf.select(merged, key) not in (None, -1, "auto")), "budget")
        raise UserError(
            f"{run_dir} is finished: {bound}={OmegaConf.select(merged, bound)} is reached. To train on, give a larger "
            f"{bound}."
        )
    return Resumed(run_dir, checkpoint, merged, tuple(changes))


def _place(choice: str, runs_dir: Path) -> tuple[Path, Path | None]:
    """The run's directory, and its checkpoint if there is one."""
    path = told_run_dir() or (_newest_unfinished(runs_dir) if choice == "true" else Path(choice).absolute())
    if path.suffix == ".ckpt" and path.is_file():
        return path.parents[1], path
    if not (path / "config.yaml").is_file():
        raise UserError(f"resume={choice}: {path} is no run directory: it has no config.yaml. Give one below runs_dir.")
    return path, _checkpoint_in(path)


def _checkpoint_in(run_dir: Path) -> Path | None:
    """What a run can be resumed from. None: it was stopped before the first one."""
    found = [run_dir / "checkpoints" / name for name in ("last.ckpt", "previous.ckpt")]
    return next((checkpoint for checkpoint in found if checkpoint.is_file()), None)


def _newest_unfinished(runs_dir: Path) -> Path:
    found = [
        path.parent.absolute()
        for path in runs_dir.glob("**/config.yaml")
        if not (path.parent / "summary.json").exists() and not in_use(path.parent)
    ]
    if not found:
        raise UserError(
            f"resume=true: all runs below {str(runs_dir)!r} are finished or in use. Begin one with: python train.py, "
            "or make a finished one longer: resume=RUN_DIR with a larger trainer.max_steps or budget."
        )
    # Rather one that has saved something: what failed before its first checkpoint would fail again.
    return max(found, key=lambda path: (bool(_checkpoint_in(path)), (path / "config.yaml").stat().st_mtime_ns))


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
        _refuse_what_grows(text)
        saved = OmegaConf.create(text)
    except Exception as error:  # noqa: BLE001 -- whatever PyYAML finds in a damaged file
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}. Start anew.") from error
    if not isinstance(saved, DictConfig):
        raise UserError(f"{path} is no config of a run. Start anew.")
    if wrong := next(_wrong_values(OmegaConf.to_container(saved)), None):
        raise UserError(f"{path} has {wrong}. Put the value in its place.")
    return saved


def _refuse_what_grows(text: str) -> None:
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
        yield short(node)
    elif isinstance(node, str) and re.search(r"(?<!\\)(\\\\)*\$\{", node):
        yield f"{short(node)}, which would be computed"


def _with_changes(saved: DictConfig, config: DictConfig, run_dir: Path) -> tuple[DictConfig, list[str]]:
    """The run's config with what the command line gives, and what that changes."""
    for key in config:
        value = OmegaConf.select(saved, key)
        if isinstance(config[key], DictConfig) and key in saved and not isinstance(value, DictConfig):
            raise UserError(f"{run_dir}/config.yaml has {key}: {_shown(value)}, but it must have keys of its own.")
    try:
        merged = OmegaConf.merge(config, saved)
    except OmegaConfBaseException as error:
        reason = " ".join(str(error).split("\n")[0].split())[:200]
        key = str(error.full_key or "a key")[:100]
        raise UserError(
            f"{run_dir}/config.yaml: {key} does not fit this version of the project ({reason}). Put back what the run "
            "wrote there, or start anew."
        ) from error
    for key in sorted(OmegaConf.missing_keys(merged) - {"model.vocab_size"}):
        raise UserError(f"{run_dir}/config.yaml has no value for {key}. Put one there, or start anew.")
    merged.resume = None
    changes, refused = [], []
    for key in _keys_on_command_line(config):
        old, new = OmegaConf.select(saved, key), OmegaConf.select(config, key)
        if old != new:
            (refused if _is_fixed(key) else changes).append(f"{key} {_shown(old)} -> {_shown(new)}")
            OmegaConf.update(merged, key, new)
    if refused:
        raise UserError(
            f"{run_dir} can't go on with {', '.join(refused)}: its weights and batches were made with the first value. "
            "Leave it out, or start anew: init_from=CHECKPOINT begins with old weights."
        )
    return merged, changes


def fixed_settings(config: DictConfig) -> dict[str, Any]:
    """What can't change in a run, for its checkpoints; the network is there anyway."""
    values = OmegaConf.to_container(config, resolve=True)
    flat = {f"{group}.{name}": value for group in ("tokenizer", "data") for name, value in values[group].items()}
    flat |= {"seed": values["seed"], "optimizer.name": values["optimizer"]["name"]}
    return {key: value for key, value in flat.items() if _is_fixed(key)}


def _is_fixed(key: str) -> bool:
    return key.startswith(_FIXED) and key not in _FREE


def refuse_other_settings(saved: dict[str, Any], resumed: Resumed) -> None:
    """Raises UserError where config.yaml has other fixed values than the run was made with.

    Args:
        saved: `fixed_settings`, from the checkpoint; empty in those of earlier versions.
    """
    ours = fixed_settings(resumed.config)
    differ = [
        f"{key} {short(ours[key])} in place of {short(value)}"
        for key, value in saved.items()
        if key in ours and ours[key] != value
    ]
    if differ:
        raise UserError(
            f"{resumed.run_dir / 'config.yaml'} was changed after the run was made: {', '.join(differ)}. Put that "
            f"back, or start anew: init_from={resumed.checkpoint}"
        )


def _keys_on_command_line(config: DictConfig) -> list[str]:
    keys = []
    for key in sorted(given_keys()):
        if key == "experiment":
            raise UserError("experiment can't be chosen for a run that is resumed. Give the keys to change.")
        node = OmegaConf.select(config, key)
        if key in _NOT_THE_RUNS or key.startswith("hydra"):
            continue
        keys += [f"{key}.{name}" for name in node] if isinstance(node, DictConfig) else [key]
    return keys


def _shown(value: Any) -> str:
    return "null" if value is None else value if isinstance(value, str) and len(value) < 80 else short(value)
