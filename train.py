"""Trains a GPT:  python train.py [key=value ...]      the keys: configs/train.yaml

Text -> tokens -> batches -> network -> Lightning -> a run directory with checkpoints, TensorBoard
events, the config and summary.json. A run that was stopped goes on with resume=RUN_DIR.
"""

from __future__ import annotations

from configs.entry_point import entry_point  # isort: skip -- first: Ctrl-C may come during the other imports

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from configs.saved_config import save_config
from data.corpus import Corpus, find_files
from model.flops import min_parameters
from system.deferred_imports import deferred_imports
from system.files import relative
from system.log import setup_logging
from system.memory import check_fits_in_memory
from system.process import command_start
from training.config import RunConfig
from training.ranks import exit_with_parent, ignore_stray_variables, is_first
from training.run_dir import cleanup_on_error, lock_run_dir, new_run_dir, resume_command

if TYPE_CHECKING:  # the slow imports are in main: a mistake on the command line is answered before them
    from lightning.pytorch import Trainer

    from training.setup import Run

logger = logging.getLogger(__name__)


def main(config: RunConfig) -> None:
    """The program: one training run. Raises UserError for what the user can fix."""
    exit_with_parent()
    ignore_stray_variables()
    train(config, command_start())


def train(config: RunConfig, started_at: float, exit_on_signal: bool = True) -> Path:
    """One training run, from the config to the summary; tiny_gpt.train calls this too.

    Args:
        started_at: when the run started, a reading of running_seconds().
        exit_on_signal: Ctrl-C, SIGTERM and SIGHUP exit the process; else only Ctrl-C is handled.

    Returns:
        The run directory.

    Raises:
        UserError: what the user can fix.
        TrainingInterrupted: Ctrl-C, if exit_on_signal is False.
    """
    check_early(config)

    with deferred_imports():
        from system.memory import disable_malloc_trim
        from training.callbacks.graceful_stop import GracefulStop
        from training.error_context import explain_out_of_memory, explain_write_errors
        from training.initial_state import load_initial_state
        from training.processes import supervise
        from training.setup import build_run_trainer, prepare_run
        from training.summary import log_stopped, summarize

    disable_malloc_trim()
    setup_logging(None, silent=not is_first())  # again: importing Lightning made its own loggers talk
    warnings.filterwarnings("ignore", module="lightning|torch")
    with GracefulStop(exit_on_signal) as graceful_stop, explain_out_of_memory(config):
        run = prepare_run(config, load_initial_state(config), started_at)  # data and network
        run_dir = config.resumed.run_dir if config.resumed else new_run_dir(config)

        def kept() -> bool:
            return bool(config.resumed or run.metrics.tokens)

        with lock_run_dir(run_dir), cleanup_on_error(run_dir, unless=kept):
            with explain_write_errors(run_dir, resume_command(run_dir), kept), explain_out_of_memory(run.config):
                trainer = build_run_trainer(run, run_dir, graceful_stop)
                open_run_dir(run, run_dir)
                answer = partial(log_stopped, trainer, run_dir)
                with answered(answer), supervise(trainer, graceful_stop, resume_command(run_dir), answer):
                    fit(run, trainer, run_dir)
                    summarize(run, trainer, run_dir)
    return run_dir


def check_early(config: RunConfig) -> None:
    """Raises UserError for what can be refused without reading the text, and without the slow imports."""
    check_fits_in_memory(min_parameters(replace(config.model, vocab_size=1)))
    setup_logging(None, silent=not is_first())
    Corpus(find_files(config.data.corpus), config.data.val_fraction)


def open_run_dir(run: Run, run_dir: Path) -> None:
    """Makes the directory that of a run in progress: config.yaml, train.log, and nothing from after the checkpoint."""
    from training.checkpointing import remove_stale_checkpoints
    from training.tensorboard import rewind_events

    first, resumed = is_first(), run.config.resumed  # the first of the processes of several devices
    if first:
        save_config(run.config, run_dir)
    setup_logging(run_dir / "train.log", silent=not first)
    if resumed and first:
        (run_dir / "summary.json").unlink(missing_ok=True)
        rewind_events(run_dir, run.initial_state.step if run.initial_state else -1)
        remove_stale_checkpoints(run_dir / "checkpoints", resumed.checkpoint, run.network, run.data.tokenizer)
        changes = f"; changed: {', '.join(resumed.changes)}" if resumed.changes else ""
        logger.info(
            f"going on with {relative(run_dir)} at step {run.initial_state.step if run.initial_state else 0:,}{changes}"
        )


@contextmanager
def answered(answer: Callable[[], None]) -> Iterator[None]:
    """Calls `answer` when a signal stops the run."""
    from training.callbacks.graceful_stop import StoppedBySignal

    try:
        yield
    except StoppedBySignal:
        answer()
        raise


def fit(run: Run, trainer: Trainer, run_dir: Path) -> None:
    """Trains, from the old weights on if there are any, and validates the best ones on the whole split."""
    from checkpoint.checkpoint import record_validation
    from training.checkpointing import best_or_last
    from training.summary import log_start

    log_start(run, trainer)
    is_resume = run.initial_state is not None and run.initial_state.is_resume
    trainer.fit(run.module, datamodule=run.data, ckpt_path=run.initial_state.path if is_resume else None)
    best = best_or_last(run_dir / "checkpoints")
    if run.timer and run.timer.out_of_time(run.module.validation["tokens"]):  # it would see fewer tokens than that
        logger.info("the budget leaves no time for a last validation: the figures are those of one in training")
        return
    whole = run.data.full_val_dataloader()
    trainer.validate(run.module, whole, ckpt_path=best, verbose=False)
    if whole.cut:
        logger.info(
            f"the last validation saw {run.module.validation['tokens']:,} tokens: the budget leaves no time for more"
        )
    if trainer.is_global_zero:
        record_validation(best, run.module.validation)


if __name__ == "__main__":
    entry_point(main, "train", sweeps=True)
