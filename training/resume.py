"""Which run is resumed, and which of its settings can't change. configs/saved_config.py reads them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from system.checks import short_repr
from system.errors import UserError
from training.config import RunConfig
from training.ranks import published_run_dir
from training.run_dir import is_locked

# What weights, optimiser state and the order of batches were made with. The text may lie elsewhere: what it says is
# compared (training/initial_state.py).
_FIXED = ("model.", "tokenizer.", "data.", "seed", "optimizer.name")
_FREE = ("model.dropout", "model.bigram_dropout", "data.cache_dir", "data.corpus")
_BOUNDS = ("budget", "trainer.max_steps", "trainer.max_epochs", "trainer.max_time")


def find_run(choice: str, runs_dir: Path) -> tuple[Path, Path | None]:
    """The directory of the run that is meant, and its checkpoint if there is one.

    Args:
        choice: a run directory, one of its checkpoints, or "true": the newest unfinished run below `runs_dir`.

    Raises:
        UserError: there is none.
    """
    path = published_run_dir() or (_newest_unfinished(runs_dir) if choice == "true" else Path(choice).absolute())
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
        if not (path.parent / "summary.json").exists() and not is_locked(path.parent)
    ]
    if not found:
        raise UserError(
            f"resume=true: all runs below {str(runs_dir)!r} are finished or in use. Begin one with: python train.py, "
            "or make a finished one longer: resume=RUN_DIR with a larger trainer.max_steps or budget."
        )
    # Rather one that has saved something: what failed before its first checkpoint would fail again.
    return max(found, key=lambda path: (bool(_checkpoint_in(path)), (path / "config.yaml").stat().st_mtime_ns))


def check_unfinished(run_dir: Path, get: Callable[[str], Any], changes: list[str]) -> None:
    """Raises UserError for a run that is finished, unless one of the changes makes it longer.

    Args:
        get: the value of a dotted key.
        changes: in words, each begins with its key.
    """
    if (run_dir / "summary.json").exists() and not any(change.startswith(_BOUNDS) for change in changes):
        bound = next((key for key in _BOUNDS[1:] if get(key) not in (None, -1, "auto")), "budget")
        raise UserError(f"{run_dir} is finished: {bound}={get(bound)} is reached. To train on, give a larger {bound}.")


def fixed_settings(config: RunConfig) -> dict[str, Any]:
    """What can't change in a run, for its checkpoints; the network is there anyway."""
    values = config.values()
    flat = {f"{group}.{name}": value for group in ("tokenizer", "data") for name, value in values[group].items()}
    flat |= {"seed": values["seed"], "optimizer.name": values["optimizer"]["name"]}
    return {key: value for key, value in flat.items() if is_fixed(key)}


def is_fixed(key: str) -> bool:
    """Whether a run keeps the value of this dotted key."""
    return key.startswith(_FIXED) and key not in _FREE


def check_same_settings(saved: dict[str, Any], config: RunConfig) -> None:
    """Raises UserError where config.yaml has other fixed values than the run was made with.

    Args:
        saved: `fixed_settings`, from the checkpoint; empty in those of earlier versions.
    """
    ours = fixed_settings(config)
    differ = [
        f"{key} {short_repr(ours[key])} in place of {short_repr(value)}"
        for key, value in saved.items()
        if key in ours and ours[key] != value
    ]
    if differ:
        raise UserError(
            f"{config.resumed.run_dir / 'config.yaml'} was changed after the run was made: {', '.join(differ)}. Put "
            f"that back, or start anew: init_from={config.resumed.checkpoint}"
        )
