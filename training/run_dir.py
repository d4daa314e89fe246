"""The directory of a run: config.yaml, train.log, checkpoints/, logs, summary.json. No two runs share one."""

import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has no locks on directories
    fcntl = None

from system.errors import UserError
from system.files import expand_user, relative
from system.log import setup_logging
from system.process import python_command, script_command
from training.config import RunConfig
from training.ranks import is_first, publish_run_dir, published_run_dir

SWEEP_FILE = "sweep.json"
"""In the directory of a sweep: its command line, and whether it is finished."""


def new_run_dir(config: RunConfig) -> Path:
    """Creates the directory of this run, below `runs_dir` or the directory of its sweep.

    Raises UserError if it cannot be created.
    """
    if published := published_run_dir():
        return published
    if job := config.sweep_job:
        return make_new_dir(job.run_dir.parent, job.run_dir.name)
    return make_new_dir(Path(config.runs_dir).absolute(), timestamp())


@contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Reserves the directory for the processes of this run until this process ends.

    Raises UserError if another run uses it.
    """
    if not is_first():
        yield
        return
    descriptor = os.open(run_dir, os.O_RDONLY) if fcntl else None
    try:
        if not _lock(descriptor):
            raise UserError(f"another process is training in {run_dir}. Wait for it, or stop it.")
        publish_run_dir(run_dir)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_locked(run_dir: Path) -> bool:
    """Whether another process is training in it."""
    if fcntl is None:
        return False
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int | None) -> bool:
    """Locks a directory until the process ends; returns False if another process has the lock."""
    try:
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


@contextmanager
def cleanup_on_error(run_dir: Path, unless: Callable[[], Any]) -> Iterator[None]:
    """Removes the directory if the run fails before it has trained, so that no incomplete run is left to resume.

    Args:
        unless: returns whether the directory has something to keep.
    """
    try:
        yield
    except Exception:
        if unless() or not is_first():
            raise
        setup_logging(None)
        remove(run_dir)
        raise


def remove(run_dir: Path) -> None:
    """Removes a directory, and its parent if that is empty then."""
    shutil.rmtree(run_dir, ignore_errors=True)
    with suppress(OSError):  # the parent has other runs
        run_dir.parent.rmdir()


@cache  # Hydra asks more than once per sweep
def new_sweep_dir(runs_dir: str) -> str:
    """Creates the directory for the runs of one sweep."""
    return str(make_new_dir(Path(expand_user(runs_dir)).absolute(), f"{timestamp()}_sweep"))


def timestamp() -> str:
    """The current time in a format that sorts."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def make_new_dir(parent: Path, name: str) -> Path:
    """Creates parent/name, or parent/name_2 and so on if it exists. mkdir is atomic, so no two runs get the same."""
    for number in range(1, 10_000):
        path = parent / (name if number == 1 else f"{name}_{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not path.exists() or not parent.is_dir():
                raise UserError(f"{parent} is not a directory. Choose another runs_dir.") from None
        except OSError as error:
            raise UserError(
                f"cannot create a directory in {parent}: {error.strerror}. Choose another runs_dir."
            ) from None
    raise UserError(f"{parent} has 10,000 runs named {name}. Choose another runs_dir.")


# Commands that a run suggests


def tensorboard_command(logdir: Path) -> str:
    """The command that shows all runs below a directory in TensorBoard."""
    where = shlex.quote(str(relative(logdir)))
    return f"{python_command()} -m tensorboard.main --logdir {where} --samples_per_plugin images=100"


def resume_command(run_dir: Path) -> str:
    """The command that resumes the run, and with it its sweep."""
    directory = run_dir.parent if (run_dir.parent / SWEEP_FILE).is_file() else run_dir
    return f"{script_command('train.py')} resume={shlex.quote(str(relative(directory)))}"
