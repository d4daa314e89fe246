"""Sweeps (`-m`): runs that fail do not end the others, results become a table, and interrupted sweeps are resumed."""

import logging
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write

from configs.compose import current_sweep_job, resolve_path, run_config, swept_overrides
from configs.defaults import default_config
from configs.error_lines import error_line, format_hydra_error
from configs.saved_config import escape_interpolation
from system.errors import UserError
from system.files import expand_user
from system.log import share_terminal
from system.process import script_command
from system.streams import print_error, print_note, use_utf8
from system.text import pluralize
from training.ranks import is_duplicate_error, launcher
from training.resume import newest_unfinished
from training.run_dir import SWEEP_FILE, lock_run_dir, remove, resume_command
from training.sweep import JobResult, recorded_arguments, report, save_record

BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_stopped = False  # a signal has arrived in this process, one of several that take runs from one queue


class Sweep:
    """One sweep, in the process that started it.

    Args:
        arguments: the command line as typed, for resuming.
        directory: of the sweep to resume; None: a new one.
    """

    def __init__(self, config_name: str, arguments: Sequence[str], directory: Path | None = None):
        self.results: list[JobResult] = []
        self.interrupted = True
        self._config_name = config_name
        self._arguments = arguments
        self._directory = directory
        self._opened = ExitStack()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Within it, Hydra's sweepers launch their runs through SweepLauncher; at its end, results are reported."""
        instantiate = Plugins.instantiate_launcher

        def wrapped(plugins: Plugins, **kwargs: Any) -> SweepLauncher:
            return SweepLauncher(instantiate(plugins, **kwargs), kwargs["config"], kwargs["hydra_context"], self)

        # Hydra has no hook for either. A run that cannot be composed would end the sweep before its first run.
        with (
            patch.object(Plugins, "instantiate_launcher", wrapped),
            patch.object(Sweeper, "validate_batch_is_legal", lambda sweeper, batch: None),
        ):
            with self._opened:
                try:
                    yield
                    self.interrupted = False
                except ValueError:
                    if not self.results or any(result.summary for result in self.results):
                        raise
                    self.interrupted = False  # the Optuna sweeper found no best run, because all have failed
                finally:
                    if self.results or self._is_open:
                        self._report()

    @property
    def is_resumed(self) -> bool:
        return self._directory is not None

    @property
    def failed(self) -> bool:
        return any(result.error for result in self.results)

    @property
    def _is_open(self) -> bool:
        return self._directory is not None and (self._directory / SWEEP_FILE).is_file()

    def open(self, config: DictConfig) -> None:
        """Reserves the sweep's directory and records the command line, before the first run."""
        first = self._directory is None
        self._directory = Path(config.hydra.sweep.dir)
        self._opened.enter_context(lock_run_dir(self._directory))
        save_record(self._directory, self._arguments, finished=False)
        if first:  # processes of a launcher would each make a new one
            with read_write(config), open_dict(config):
                config.hydra.sweep.dir = escape_interpolation(str(self._directory))
                config.hydra.overrides.hydra.append(sweep_dir_override(self._directory))

    def _report(self) -> None:
        """Prints the table and one line per error. Removes the directory of a sweep in which no run was trained."""
        report(self._directory, self.results)
        failed: dict[str, list[str]] = {}
        for result in self.results:
            if result.error:
                failed.setdefault(result.error, []).append(", ".join(result.settings))
        for message, runs in failed.items():
            which = "" if len(runs) == len(self.results) or message.startswith(runs[0]) else f"{'; '.join(runs)}: "
            if not is_duplicate_error():
                print_error(f"{which}{message}")
        if not any(path.is_dir() for path in self._directory.iterdir()):
            remove(self._directory)
        elif self.interrupted:
            done = sum(bool(result.summary) for result in self.results)
            print_note(
                f"the sweep was interrupted after {pluralize(done, 'finished run')}; resume with: "
                f"{resume_command(self._directory / 'any run')}"
            )
        else:
            save_record(self._directory, self._arguments, finished=True)


class SweepLauncher:
    """Launches the runs of a sweep with one of Hydra's launchers, and keeps how each ended.

    A run that Hydra cannot compose is a failed run: the others start.
    """

    def __init__(self, launcher: Launcher, config: DictConfig, hydra_context: Any, sweep: Sweep):
        check_no_sweep_in_launcher()
        self._launcher, self._config, self._loader = launcher, config, hydra_context.config_loader
        self._sweep = sweep
        self._parallel = runs_in_parallel(config.hydra)
        if not config.hydra.verbose:  # they repeat the command line for each run
            for library in ("hydra", "hydra_plugins", "optuna"):
                logging.getLogger(library).setLevel(logging.CRITICAL)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs one job per list of overrides; returns how they ended, in the same order."""
        if not self._sweep.results:
            if not job_overrides or (len(job_overrides) == 1 and not swept_overrides(job_overrides[0])):
                if not self._sweep.is_resumed:
                    remove(Path(self._config.hydra.sweep.dir))
                raise UserError(
                    "-m runs one training per combination of values, but no key has several. List some, for example "
                    "model.num_heads=2,4, or leave out -m."
                )
            self._sweep.open(self._config)
        returns = [self._composition_error(overrides) for overrides in job_overrides]
        waiting = [index for index, job_return in enumerate(returns) if job_return is None]
        try:
            for batch in [waiting] if self._parallel else [[index] for index in waiting]:
                overrides = [job_overrides[index] for index in batch]
                with self._wait_for_jobs() if self._parallel else ExitStack():
                    ended = self._launcher.launch(overrides, initial_job_idx + batch[0]) if batch else ()
                for index, job_return in zip(batch, ended, strict=True):
                    returns[index] = job_return
        finally:
            self._sweep.results += [job_return.return_value for job_return in returns if job_return is not None]
        if any(result.stopped for result in self._sweep.results):
            sys.exit(128 + signal.SIGINT)
        return returns

    def _composition_error(self, overrides: Sequence[str]) -> JobReturn | None:
        try:
            self._loader.load_sweep_config(self._config, list(overrides))
        except Exception as error:  # Hydra does not document which types it raises
            settings = tuple(swept_overrides(overrides))
            result = JobResult(settings, error=format_hydra_error(error, self._sweep._config_name))
            return JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=result)
        return None

    @contextmanager
    def _wait_for_jobs(self) -> Iterator[None]:
        """After the first signal, waits for the processes of the jobs, which save and stop. A second one ends them.

        Ctrl-C reaches them without this process; other signals are passed on.
        """
        received: list[int] = []

        def handle(number: int, frame: Any) -> None:
            if received:
                raise KeyboardInterrupt
            received.append(number)
            for process in psutil.Process().children() if number != signal.SIGINT else ():
                process.send_signal(number)

        before = {}
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            before = {number: signal.signal(number, handle) for number in heard}
        try:
            yield
        except Exception as error:
            if type(error).__name__ not in ("TerminatedWorkerError", "BrokenProcessPool"):
                raise
            if received:
                sys.exit(128 + received[0])
            raise UserError(
                "a process of the sweep was ended from outside, for example because memory ran out. Use a smaller "
                f"hydra.launcher.n_jobs, and resume with: {resume_command(self._sweep._directory / 'any run')}"
            ) from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if received:
            sys.exit(128 + received[0])


def runs_in_parallel(hydra_config: DictConfig) -> bool:
    """Whether the launcher starts processes for the runs."""
    return hydra_config.launcher._target_ != BASIC_LAUNCHER


def run_job(task: Callable[[Any], None], config: DictConfig, config_name: str) -> JobResult:
    """One run of a sweep. Finished runs of a resumed sweep are skipped, and interrupted ones resumed."""
    global _stopped
    job, parallel = current_sweep_job(), runs_in_parallel(HydraConfig.get())
    settings, run_dir = tuple(swept_overrides(HydraConfig.get().overrides.task)), job.run_dir
    if _stopped:
        return JobResult(settings, stopped=True)
    prefix = f"[{job.number:02d}] " if parallel else ""
    if parallel:
        use_utf8()
        share_terminal(prefix)
    skipped = ": finished already" if (run_dir / "summary.json").is_file() else ""
    print(f"{prefix}run {job.number}: {', '.join(settings)}{skipped}", flush=True)
    try:
        if not skipped:
            if run_dir.is_dir() and not (run_dir / "config.yaml").exists():  # interrupted before anything was saved
                shutil.rmtree(run_dir)
            task(run_config(config))
    except (KeyboardInterrupt, SystemExit) as error:
        if not parallel or (isinstance(error, SystemExit) and error.code in (0, None)):
            raise
        _stopped = True
        return JobResult(settings, run_dir, stopped=True)
    except Exception as error:  # whatever it is, the other runs are worth finishing
        message = error_line(error, config_name)
        if message is None:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"
        return JobResult(settings, run_dir, error=message)
    return JobResult(settings, run_dir)


def is_sweep_job() -> bool:
    """Whether Hydra runs a job of a sweep, not a single run."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def resumed_sweep(arguments: Sequence[str]) -> tuple[Path, list[str]] | None:
    """The directory of the sweep that `resume` names, and its command line; None if it names no sweep.

    Raises:
        UserError: settings are given that a resumed sweep cannot change.
    """
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    choice = None if "resume" not in given else resolve_path("resume", given["resume"])
    if choice is None:
        return None
    if choice == "true":
        choice = newest_unfinished(Path(expand_user(given.get("runs_dir", default_config("train")["runs_dir"]))))
    choice = Path(choice).absolute()
    if not (choice / SWEEP_FILE).is_file():
        return None
    kept = [argument for argument in arguments if argument.startswith(("hydra/launcher=", "hydra.launcher."))]
    for argument in arguments:
        if argument.startswith(("resume=", "runs_dir=")) or argument in kept or argument in ("-m", "--multirun"):
            continue
        raise UserError(
            f"{argument} cannot be set for a sweep that is resumed: its runs would not be comparable. Leave it out, or "
            "start a new sweep."
        )
    return choice, recorded_arguments(choice) + kept


def sweep_dir_override(directory: Path) -> str:
    """Hydra's setting of the directory of a sweep."""
    quoted = QuotedString(escape_interpolation(str(directory)), Quote.single).with_quotes()
    return f"hydra.sweep.dir={quoted}"


def check_no_sweep_settings() -> None:
    """Raises UserError if a single run has a launcher or a sweeper, which only sweeps use."""
    for override in HydraConfig.get().overrides.hydra:
        if override.startswith(("hydra/launcher", "hydra/sweeper", "hydra.launcher", "hydra.sweeper")):
            raise UserError(f"{override} is for sweeps. Add -m and a key with several values, or leave it out.")


def check_no_sweep_in_launcher() -> None:
    """Raises UserError for a sweep under torchrun or srun: each of its processes would start a sweep of its own."""
    if launcher():
        raise UserError(
            f"a sweep starts the processes of its runs itself. Use {script_command('train.py')} -m, without "
            f"{launcher()}."
        )
