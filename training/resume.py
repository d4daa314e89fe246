"""Finds the run to resume, and says which of its settings cannot change. configs/saved_config.py reads them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from system.checks import short_repr
from system.errors import UserError
from system.process import script_command
from training.config import RunConfig
from training.ranks import published_run_dir
from training.run_dir import SWEEP_FILE, is_locked

# Weights, optimizer state and the order of batches depend on these. The text may be in another file with the same
# content, which training/initial_state.py compares.
FIXED_KEYS = ("model.", "tokenizer.", "data.", "seed", "optimizer.name")
CHANGEABLE_KEYS = ("model.dropout", "model.bigram_dropout", "data.cache_dir", "data.corpus")
BOUNDS = ("budget", "trainer.max_steps", "trainer.max_epochs", "trainer.max_time")


def find_resumable_run(choice: str, runs_dir: Path) -> tuple[Path, Path | None]:
    """Returns the directory of the run to resume, and its checkpoint if it has one.

    A sweep is not a run: configs/sweep.py resumes those.

    Args:
        choice: a run directory, a checkpoint in it, or "true" for the newest unfinished run below `runs_dir`.

    Raises:
        UserError: there is no such run.
    """
    path = published_run_dir() or (newest_unfinished(runs_dir) if choice == "true" else Path(choice).absolute())
    if path.suffix == ".ckpt" and path.is_file():
        return path.parents[1], path
    if not (path / "config.yaml").is_file():
        raise UserError(f"resume={choice}: {path} is not a run directory: it has no config.yaml. Use one in runs_dir.")
    return path, _checkpoint_in(path)


def _checkpoint_in(run_dir: Path) -> Path | None:
    """The checkpoint to resume from. None: the run was stopped before it saved one."""
    found = [run_dir / "checkpoints" / name for name in ("last.ckpt", "previous.ckpt")]
    return next((checkpoint for checkpoint in found if checkpoint.is_file()), None)


def newest_unfinished(runs_dir: Path) -> Path:
    """The directory of the newest unfinished run or sweep. Raises UserError if there is none."""
    sweeps = [path.parent.absolute() for path in runs_dir.glob(f"**/{SWEEP_FILE}") if not _is_finished_sweep(path)]
    found = [sweep for sweep in sweeps if not is_locked(sweep)]
    found += [
        path.parent.absolute()
        for path in runs_dir.glob("**/config.yaml")
        if not (path.parent / "summary.json").exists()
        and path.parent.parent.absolute() not in sweeps
        and not is_locked(path.parent)
    ]
    if not found:
        raise UserError(
            f"resume=true: all runs below {str(runs_dir)!r} are finished or in use. Start one with: "
            f"{script_command('train.py')}, or extend a finished one: resume=RUN_DIR with a larger trainer.max_steps "
            "or budget."
        )
    return max(found, key=_priority)


def _priority(path: Path) -> tuple[bool, int]:
    """By age. Prefers runs with a checkpoint: one that failed before its first checkpoint would fail again."""
    if (path / SWEEP_FILE).is_file():
        return True, max(file.stat().st_mtime_ns for file in (path / SWEEP_FILE, *path.glob("*/config.yaml")))
    return bool(_checkpoint_in(path)), (path / "config.yaml").stat().st_mtime_ns


def _is_finished_sweep(record: Path) -> bool:
    """Whether every run of a sweep has had its turn; also for a damaged record, which cannot be resumed."""
    try:
        return json.loads(record.read_text(encoding="utf-8"))["finished"] is not False
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True


def check_unfinished(run_dir: Path, get: Callable[[str], Any], changes: list[str]) -> None:
    """Raises UserError for a finished run, unless one of the changes extends it.

    Args:
        get: returns the value of a dotted key.
        changes: changed settings as text that begins with the key.
    """
    if (run_dir / "summary.json").exists() and not any(change.startswith(BOUNDS) for change in changes):
        bound = next((key for key in BOUNDS[1:] if get(key) not in (None, -1, "auto")), "budget")
        raise UserError(f"{run_dir} is finished: {bound}={get(bound)} is reached. To train on, use a larger {bound}.")


def fixed_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of a run that cannot change, for its checkpoints, which have those of the network anyway."""
    values = config.values()
    flat = {f"{group}.{name}": value for group in ("tokenizer", "data") for name, value in values[group].items()}
    flat |= {"seed": values["seed"], "optimizer.name": values["optimizer"]["name"]}
    return {key: value for key, value in flat.items() if is_fixed(key)}


def is_fixed(key: str) -> bool:
    """Whether the value of this dotted key cannot change when a run is resumed."""
    return key.startswith(FIXED_KEYS) and key not in CHANGEABLE_KEYS


def check_same_settings(saved: dict[str, Any], config: RunConfig) -> None:
    """Raises UserError if fixed settings in config.yaml were changed since the run started.

    Args:
        saved: `fixed_settings` of the checkpoint; empty in checkpoints of earlier versions.
    """
    ours = fixed_settings(config)
    differ = [
        f"{key} is {short_repr(ours[key])}, was {short_repr(value)}"
        for key, value in saved.items()
        if key in ours and ours[key] != value
    ]
    if differ:
        raise UserError(
            f"{config.resumed.run_dir / 'config.yaml'} was changed after the run started: {'; '.join(differ)}. Undo "
            f"that, or start a new run: init_from={config.resumed.checkpoint}"
        )
