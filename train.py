"""Trains a GPT on a text.

    python train.py                                                the default: 90 seconds on Shakespeare
    python train.py data.corpus=my.txt budget=5m model=llama       change any key of configs/train.yaml
    python train.py -m model.num_heads=1,2,4                       a sweep: one run per value

Every run gets a directory with its checkpoints, TensorBoard events, config.yaml, train.log, summary.json and
report.html.
A run that was stopped is resumed with resume=RUN_DIR.
"""

from __future__ import annotations

from configs.entry_point import entry_point  # isort: skip -- first: Ctrl-C may arrive during the other imports

import logging
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from configs.saved_config import save_config
from data.corpus import Corpus, find_files
from model.flops import min_parameters
from system.deferred_imports import deferred_imports
from system.log import setup_logging
from system.memory import check_fits_in_memory, disable_malloc_trim
from system.process import command_start
from training.config import RunConfig
from training.ranks import exit_with_parent, ignore_stray_variables, is_first
from training.run_dir import cleanup_on_error, lock_run_dir, new_run_dir, resume_command

if TYPE_CHECKING:  # torch and Lightning are imported in main, after mistakes on the command line were reported
    from lightning.pytorch import Trainer

    from training.setup import Run

logger = logging.getLogger(__name__)


def main(config: RunConfig) -> None:
    """The program. Raises UserError for mistakes that the user can fix."""
    exit_with_parent()
    ignore_stray_variables()
    train(config, command_start())


def train(config: RunConfig, started_at: float, exit_on_signal: bool = True) -> Path:
    """Trains one run, from its config to its summary, and returns its directory. Also the core of tiny_gpt.train.

    Args:
        started_at: when the run started, as a value of running_seconds().
        exit_on_signal: exit the process on Ctrl-C, SIGTERM and SIGHUP. False: only handle Ctrl-C.

    Raises:
        UserError: a mistake that the user can fix.
        TrainingInterrupted: Ctrl-C, if exit_on_signal is False.
    """
    check_before_slow_imports(config)

    with deferred_imports():
        from model import kernels
        from training.callbacks.graceful_stop import GracefulStop
        from training.error_context import explain_out_of_memory, explain_write_errors
        from training.initial_state import load_initial_state
        from training.processes import supervise
        from training.setup import build_run_trainer, prepare_run
        from training.summary import log_stopped, summarize

    disable_malloc_trim()
    setup_logging(None, silent=not is_first())  # again, because importing Lightning adds log handlers
    warnings.filterwarnings("ignore", module="lightning|torch")
    with (
        GracefulStop(exit_on_signal) as graceful_stop,
        explain_out_of_memory(config),
        kernels.set_enabled(config.kernels),
    ):
        run = prepare_run(config, load_initial_state(config), started_at)  # data and network
        run_dir = config.resumed.run_dir if config.resumed else new_run_dir(config)
        command = resume_command(run_dir)

        def has_progress() -> bool:
            return bool(config.resumed or run.metrics.tokens)

        with lock_run_dir(run_dir), cleanup_on_error(run_dir, unless=has_progress):
            with explain_write_errors(run_dir, command, has_progress), explain_out_of_memory(run.config):
                trainer = build_run_trainer(run, run_dir, graceful_stop)
                initialize_run_dir(run, run_dir, trainer)
                with supervise(trainer, graceful_stop, command, partial(log_stopped, trainer, run_dir)):
                    fit(run, trainer)
                    validate_best(run, trainer, run_dir)
                    summarize(run, trainer, run_dir)
    return run_dir


def check_before_slow_imports(config: RunConfig) -> None:
    """Raises UserError for mistakes that can be found without torch and without tokenizing the text."""
    check_fits_in_memory(min_parameters(replace(config.model, vocab_size=1)))
    setup_logging(None, silent=not is_first())
    Corpus(find_files(config.data.corpus), config.data.val_fraction)


def initialize_run_dir(run: Run, run_dir: Path, trainer: Trainer) -> None:
    """Writes config.yaml, returns a resumed run's directory to the state of its checkpoint, and starts the logs."""
    from training.report import record_facts
    from training.setup import rewind_run_dir

    if is_first():  # rank 0 of the processes
        save_config(run.config, run_dir)
        record_facts(run, run_dir)
    setup_logging(run_dir / "train.log", silent=not is_first())
    if is_first() and run.config.resumed:
        rewind_run_dir(run, run_dir, trainer)
    for log in trainer.loggers if is_first() else ():
        log.start()


def fit(run: Run, trainer: Trainer) -> None:
    """Trains, with the checkpoint's full state if the run is resumed."""
    from training.summary import log_start

    log_start(run, trainer)
    is_resume = run.initial_state is not None and run.initial_state.is_resume
    trainer.fit(run.module, datamodule=run.data, ckpt_path=run.initial_state.path if is_resume else None)


def validate_best(run: Run, trainer: Trainer, run_dir: Path) -> None:
    """Validates the best checkpoint on the full validation split, or on as much of it as the budget allows."""
    from checkpoint.checkpoint import record_validation
    from training.checkpointing import best_or_last

    if run.timer and run.timer.out_of_time(run.module.validation["tokens"]):  # fewer tokens than during training
        logger.info("the budget leaves no time for a final validation: the results are from validation during training")
        return
    best, loader = best_or_last(run_dir / "checkpoints"), run.data.full_val_dataloader()
    trainer.validate(run.module, loader, ckpt_path=best, verbose=False)
    if loader.truncated:
        tokens = run.module.validation["tokens"]
        logger.info(f"the final validation covers {tokens:,} tokens: the budget leaves no time for more")
    if trainer.is_global_zero:
        record_validation(best, run.module.validation)


if __name__ == "__main__":
    entry_point(main, "train", sweeps=True)
