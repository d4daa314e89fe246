"""Runs a program that can also be swept (`-m`): from the command line to one run, or one per combination of values."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from configs import schema
from configs.arguments import hydra_arguments, only_shows_config
from configs.compose import run_config, swept_overrides
from configs.defaults import CONFIG_DIR
from configs.error_lines import exit_on_user_error, format_hydra_error
from system.errors import UserError
from system.streams import handle_broken_pipe, print_error
from training.ranks import is_child_process, is_duplicate_error, launcher
from training.run_dir import remove


def run(task: Callable[[Any], None], config_name: str) -> None:
    """Composes the config and runs the task, once or once per job of a sweep. Exits with code 2 on a user error."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them
    with exit_on_user_error(config_name):
        schema.register()
        if not is_child_process():  # its arguments have been through this
            sys.argv[1:] = hydra_arguments(sys.argv[1:], config_name)
            schema.register(dry_run=only_shows_config(sys.argv[1:]))

        composed: list[DictConfig] = []  # while it is empty, errors are errors of composing
        sweep = Sweep(config_name)

        @hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=config_name)
        def job(config: DictConfig) -> None:
            # Handled inside as well, because Hydra prints a line of its own about errors that leave the job.
            with handle_broken_pipe(), exit_on_user_error(config_name), sweep.run():
                composed.append(config)
                check_no_sweep_in_launcher()
                task(run_config(config))

        try:
            job()
        except Exception as error:
            if composed:
                raise
            raise UserError(format_hydra_error(error, config_name)) from error
        finally:
            sweep.report()
        if sweep.failed:
            sys.exit(2)


class Sweep:
    """Collects the failed runs of a sweep. They do not end it; they are named at its end."""

    def __init__(self, config_name: str):
        self.failed: dict[str, list[str]] = {}  # error message -> the runs that it ended
        self._config_name = config_name
        self._num_runs = 0
        self._directory: Path | None = None

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around one run, of a sweep or alone. The UserError of a single run passes through."""
        if HydraConfig.get().mode != RunMode.MULTIRUN:
            yield
            return
        self._directory, self._num_runs = Path(HydraConfig.get().sweep.dir), self._num_runs + 1
        try:
            yield
        except (UserError, HydraException, OmegaConfBaseException) as error:
            message = str(error) if isinstance(error, UserError) else format_hydra_error(error, self._config_name)
            self.failed.setdefault(message, []).append(", ".join(swept_overrides()))

    def report(self) -> None:
        """Prints one line per error, and removes the directory of a sweep in which no run was trained."""
        for message, runs in self.failed.items():
            which = "" if len(runs) == self._num_runs else f"{'; '.join(runs)}: "
            if not is_duplicate_error():
                print_error(f"{which}{message}")
        if self.failed and not any(path.is_dir() for path in self._directory.iterdir()):
            remove(self._directory)


def check_no_sweep_in_launcher() -> None:
    """Raises UserError for a sweep under torchrun or srun: each of its processes would start a sweep of its own."""
    if launcher() and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError(
            f"a sweep starts the processes of its runs itself. Use python train.py -m, without {launcher()}."
        )
