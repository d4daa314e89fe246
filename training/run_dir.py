"""One directory a run, never shared: config.yaml, train.log, checkpoints/, TensorBoard events, summary.json."""

import logging
import os
import re
import shlex
import shutil
import sys
import time
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

import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from system.errors import UserError
from system.files import expand_user, written_whole
from system.running_clock import running_seconds
from system.streams import write_nowhere
from system.text import escape_control_chars
from training.ranks import is_first, tell_run_dir, told_run_dir


def new_run_dir(config: DictConfig) -> Path:
    """Makes the directory of this run: below `runs_dir`, or below its sweep's directory.

    Raises UserError where it cannot be made.
    """
    if told := told_run_dir():
        return told
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        changed = re.sub(r"[^\w.,-]+", "_", ",".join(swept_settings()))[:80]
        run_dir = make_new_dir(Path(hydra.sweep.dir), f"{hydra.job.num:02d}_{changed}")
    else:
        run_dir = make_new_dir(Path(config.runs_dir).absolute(), time_stamp())
    return run_dir


def swept_settings() -> list[str]:
    """The settings of this run of a sweep that are not the same in all of its runs."""
    given = {argument.partition("=")[0]: argument for argument in sys.argv}  # as typed: the same in all
    return [text for text in HydraConfig.get().overrides.task if given.get(text.partition("=")[0]) != text]


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Makes the directory this process's own, and that of the others of its run, until it ends, however it ends.

    Raises UserError where another process trains in it.
    """
    if not is_first():
        yield
        return
    descriptor = os.open(run_dir, os.O_RDONLY) if fcntl else None
    try:
        if not _lock(descriptor):
            raise UserError(f"another process is training in {run_dir}. Wait for it, or stop it.")
        tell_run_dir(run_dir)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def in_use(run_dir: Path) -> bool:
    """Whether another process trains in it."""
    if fcntl is None:
        return False
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int | None) -> bool:
    """Whether nobody else has the lock, which the system takes away with the process. True where there are no locks."""
    try:
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def given_keys() -> set[str]:
    """Keys and groups that the command line sets, in a sweep those of this run too."""
    return {override.lstrip("+~").partition("=")[0] for override in HydraConfig.get().overrides.task}


@contextmanager
def removed_if_refused(run_dir: Path, unless: Callable[[], Any]) -> Iterator[None]:
    """Takes the directory away again where the run failed before it began: nothing half-made stays to be resumed.

    Args:
        unless: whether there is something in it to keep.
    """
    try:
        yield
    except Exception:
        if unless() or not is_first():
            raise
        log_to(None)
        remove(run_dir)
        raise


def remove(run_dir: Path) -> None:
    """Takes a directory away with all in it, and the one it was made in where nothing else is there."""
    shutil.rmtree(run_dir, ignore_errors=True)
    with suppress(OSError):  # it has other runs
        run_dir.parent.rmdir()


@cache  # Hydra asks more than once in a sweep, and means the same directory
def new_sweep_dir(runs_dir: str) -> str:
    """Makes the directory that holds the runs of one sweep."""
    return str(make_new_dir(Path(expand_user(runs_dir)).absolute(), f"{time_stamp()}_sweep"))


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
    """Writes config.yaml, whole or not at all: every choice of the run, defaults included; nothing left to compute."""
    values = OmegaConf.create(_as_text(OmegaConf.to_container(config, resolve=True)))
    with written_whole(run_dir / "config.yaml", run_dir / "config.tmp") as file:
        file.write(OmegaConf.to_yaml(values).encode())


def _as_text(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _as_text(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_as_text(value) for value in node]
    return escaped(node) if isinstance(node, str) else node


def escaped(text: str) -> str:
    """The text in such a way that OmegaConf takes it as text.

    It would resolve ${...}: a backslash makes that text, and backslashes before it count double.
    """
    return re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + r"\${", text)


def log_to(run_dir: Path | None) -> None:
    """Sends the project's lines to the screen, above a progress bar, and to the run's train.log.

    With several devices the first one speaks for all.
    """
    root = logging.getLogger()
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [_Screen()]
    if not is_first():
        handlers = [logging.NullHandler()]
    elif run_dir is not None:
        handlers.append(_LogFile(run_dir / "train.log", encoding="utf-8", errors="backslashreplace"))
    for handler in handlers:
        handler.setFormatter(_Harmless("%(message)s"))
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    for library in ("lightning", "lightning.pytorch", "lightning.fabric", "torch", "matplotlib", "PIL", "rustbpe"):
        logging.getLogger(library).setLevel(logging.ERROR)


class _Harmless(logging.Formatter):
    """Lines for a terminal, of which train.log is one day shown on one too."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_control_chars(super().format(record))


class _Screen(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record))
            sys.stdout.flush()  # a pipe or a file would keep the line until the end
        except OSError:  # nobody reads any more, or the disk is full: the run goes on, train.log has its lines
            write_nowhere(sys.stdout)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        raise  # a full disk: the run ends with one line, where logging would print a traceback and go on


# Commands that a run suggests, as one would type them here


def tensorboard_command(logdir: Path) -> str:
    """What shows all runs below a directory."""
    where = shlex.quote(str(shown(logdir)))
    return f"{this_python()} -m tensorboard.main --logdir {where} --samples_per_plugin images=100"


def this_python() -> str:
    """What starts the Python running now."""
    return "python" if shutil.which("python") == sys.executable else shlex.quote(str(shown(Path(sys.executable))))


def shown(path: Path) -> Path:
    """The path, from the working directory if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


_job_starts: list[float] = []


def job_start() -> float:
    """When this run began, as running_seconds() would have read: for the first of a process, when the process did."""
    age = 0.0 if _job_starts else max(0.0, process_age())
    _job_starts.append(running_seconds() - age)
    return _job_starts[-1]


def process_age() -> float:
    """Seconds since this process began."""
    stat = Path("/proc/self/stat")
    if stat.exists() and hasattr(time, "CLOCK_BOOTTIME"):  # to a hundredth; psutil knows the boot to a second only
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # field 22, starttime, see proc(5)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - psutil.Process().create_time()
