"""One directory a run, never shared: config.yaml, train.log, checkpoints/, TensorBoard events, summary.json."""

import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from pathlib import Path

import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from configs.errors import UserError

# Lightning starts one process a further device; they inherit the directory of the first.
_INHERITED = "TINY_GPT_RUN_DIR"


def started_by_lightning() -> bool:
    """Whether another process of this run, that of the first device, started this one."""
    return os.environ.get("LOCAL_RANK", "0") != "0" and _INHERITED in os.environ


def new_run_dir(config: DictConfig) -> Path:
    """Makes the directory of this run: below `runs_dir`, or below its sweep's directory.

    Raises UserError where it cannot be made.
    """
    if started_by_lightning():
        return Path(os.environ[_INHERITED])
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        given = {argument.partition("=")[0]: argument for argument in sys.argv}  # as typed: the same in all jobs
        swept = [override for override in hydra.overrides.task if given.get(override.partition("=")[0]) != override]
        changed = re.sub(r"[^\w.,-]+", "_", ",".join(swept))[:80]
        run_dir = make_new_dir(Path(hydra.sweep.dir), f"{hydra.job.num:02d}_{changed}")
    else:
        run_dir = make_new_dir(Path(config.runs_dir).absolute(), time_stamp())
    os.environ[_INHERITED] = str(run_dir)
    return run_dir


def given_keys() -> set[str]:
    """Keys and groups that the command line sets, in a sweep those of this run too."""
    return {override.lstrip("+~").partition("=")[0] for override in HydraConfig.get().overrides.task}


@contextmanager
def removed_if_refused(run_dir: Path) -> Iterator[None]:
    """Takes the directory away again where the user's choices cannot work: nothing half-made stays."""
    try:
        yield
    except UserError:
        log_to(None)
        remove(run_dir)
        raise


def remove(run_dir: Path) -> None:
    """Takes a directory away with all in it, and the one it was made in where nothing else is there."""
    shutil.rmtree(run_dir, ignore_errors=True)
    with suppress(OSError):  # it has other runs
        run_dir.parent.rmdir()


@contextmanager
def sweep_removed_if_refused() -> Iterator[None]:
    """The same for the directory of a sweep whose first run is refused; Hydra has written multirun.yaml there."""
    try:
        yield
    except UserError:
        hydra = HydraConfig.get()
        if hydra.mode == RunMode.MULTIRUN and not any(path.is_dir() for path in Path(hydra.sweep.dir).iterdir()):
            remove(Path(hydra.sweep.dir))
        raise


@cache  # Hydra asks more than once in a sweep, and means the same directory
def new_sweep_dir(runs_dir: str) -> str:
    """Makes the directory that holds the runs of one sweep."""
    return str(make_new_dir(Path(runs_dir).absolute(), f"{time_stamp()}_sweep"))


def time_stamp() -> str:
    """The time now, in an order that sorts."""
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def make_new_dir(parent: Path, name: str) -> Path:
    """Makes parent/name, or parent/name_2 and so on: mkdir tells atomically whether it was there."""
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
                f"cannot make a directory in {parent}: {error.strerror}. Choose another runs_dir."
            ) from None
    raise UserError(f"{parent} has 10,000 runs named {name}. Choose another runs_dir.")


def save_config(config: DictConfig, run_dir: Path) -> None:
    """Writes config.yaml: every choice of the run, defaults included."""
    OmegaConf.save(config, run_dir / "config.yaml")


def log_to(run_dir: Path | None) -> None:
    """Sends the project's lines to the screen, above a progress bar, and to the run's train.log.

    With several devices the first one speaks for all.
    """
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [_Screen()]
    if started_by_lightning():
        handlers = [logging.NullHandler()]
    elif run_dir is not None:
        handlers.append(logging.FileHandler(run_dir / "train.log", encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(message)s"))
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    for library in ("lightning", "lightning.pytorch", "lightning.fabric", "torch", "matplotlib", "PIL", "rustbpe"):
        logging.getLogger(library).setLevel(logging.ERROR)


class _Screen(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record))
            sys.stdout.flush()  # a pipe or a file would keep the line until the end
        except OSError:  # nobody reads any more, or the disk is full: the run goes on, train.log has its lines
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_job_starts: list[float] = []


def job_start() -> float:
    """When this run began, in seconds since the epoch: for the first of a process, when the process did."""
    _job_starts.append(time.time() if _job_starts else psutil.Process().create_time())
    return _job_starts[-1]
