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
from configs.sweep import Sweep, check_no_sweep_in_launcher
from system.errors import UserError
from system.streams import handle_broken_pipe
from training.ranks import is_child_process


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
