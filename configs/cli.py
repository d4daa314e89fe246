"""Runs a program that can also be swept (`-m`): from the command line to one run, or one per combination of values."""

import os
import sys
from collections.abc import Callable
from typing import Any

import hydra
from omegaconf import DictConfig

from configs import schema
from configs.arguments import hydra_arguments, only_shows_config
from configs.compose import run_config
from configs.defaults import CONFIG_DIR
from configs.error_lines import exit_on_user_error, format_hydra_error
from configs.sweep import Sweep, check_no_sweep_settings, is_sweep_job, resumed_sweep, run_job, sweep_dir_override
from system.errors import UserError
from system.streams import handle_broken_pipe
from training.ranks import is_child_process
from training.sweep import JobResult


def run(task: Callable[[Any], None], config_name: str) -> None:
    """Composes the config and runs the task, once or once per job of a sweep. Exits with code 2 on a user error."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them
    with exit_on_user_error(config_name):
        schema.register()
        sweep = Sweep(config_name, sys.argv[1:])
        if not is_child_process():  # its arguments have been through this
            sweep = prepare_arguments(config_name)
            schema.register(dry_run=only_shows_config(sys.argv[1:]))

        composed: list[DictConfig] = []  # while it is empty, errors are errors of composing

        @hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=config_name)
        def job(config: DictConfig) -> JobResult | None:
            # Handled inside as well, because Hydra prints a line of its own about errors that leave the job.
            with handle_broken_pipe(), exit_on_user_error(config_name):
                composed.append(config)
                if is_sweep_job():
                    return run_job(task, config, config_name)
                check_no_sweep_settings()
                task(run_config(config))

        try:
            with sweep.launching():
                job()
        except Exception as error:
            if composed:
                raise
            raise UserError(format_hydra_error(error, config_name)) from error
        if sweep.failed:
            sys.exit(2)


def prepare_arguments(config_name: str) -> Sweep:
    """Makes sys.argv what Hydra accepts; for a sweep that is resumed, the command line that started it."""
    arguments, directory = sys.argv[1:], None
    if found := resumed_sweep(arguments):
        directory, arguments = found
    sys.argv[1:] = hydra_arguments(arguments, config_name)
    if directory:
        sys.argv.append(sweep_dir_override(directory))
    return Sweep(config_name, arguments, directory)
