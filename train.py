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
from model.flops import least_weights
from system.deferred_imports import slow_imports
from system.files import shown
from system.log import log_to
from system.memory import refuse_beyond_memory
from system.process import job_start
from training.config import RunConfig
from training.ranks import end_with_parent, ignore_stray_variables, is_first
from training.run_dir import claimed, new_run_dir, removed_if_refused, resume_command

if TYPE_CHECKING:  # the slow imports are in main: a mistake on the command line is answered before them
    from lightning.pytorch import Trainer

    from training.setup import Run

say = logging.getLogger("train").info


def main(config: RunConfig) -> None:
    """One training run, from the config to the summary. Raises UserError for what the user can fix."""
    began = job_start()
    end_with_parent()
    ignore_stray_variables()
    refuse_early(config)

    with slow_imports():
        from system.allocator import keep_freed_memory
        from training.checkpointing import StopOnSignal
        from training.error_context import memory_explained, writing_explained
        from training.initial_state import old_weights
        from training.processes import together
        from training.setup import build_parts, prepare
        from training.summary import say_stopped, summarise

    keep_freed_memory()
    log_to(None, silent=not is_first())  # again: importing Lightning made its own loggers talk
    warnings.filterwarnings("ignore", module="lightning|torch")
    with StopOnSignal() as stop_on_signal, memory_explained(config):
        run = prepare(config, old_weights(config), began)  # data and network
        run_dir = config.resumed.run_dir if config.resumed else new_run_dir(config)

        def kept() -> bool:
            return bool(config.resumed or run.metrics.tokens)

        with claimed(run_dir), removed_if_refused(run_dir, unless=kept):
            with writing_explained(run_dir, resume_command(run_dir), kept), memory_explained(run.config):
                trainer = build_parts(run, run_dir, stop_on_signal)
                open_directory(run, run_dir)
                answer = partial(say_stopped, trainer, run_dir)
                with answered(answer), together(trainer, stop_on_signal, resume_command(run_dir), answer):
                    fit(run, trainer, run_dir)
                    summarise(run, trainer, run_dir)


def refuse_early(config: RunConfig) -> None:
    """Raises UserError for what can be refused without reading the text, and without the slow imports."""
    refuse_beyond_memory(least_weights(replace(config.model, vocab_size=1)))
    log_to(None, silent=not is_first())
    Corpus(find_files(config.data.corpus), config.data.val_fraction)


def open_directory(run: Run, run_dir: Path) -> None:
    """Makes the directory that of a run in progress: config.yaml, train.log, and nothing from after the checkpoint."""
    from training.checkpointing import tidy_checkpoints
    from training.tensorboard import rewind_events

    first, resumed = is_first(), run.config.resumed  # the first of the processes of several devices
    if first:
        save_config(run.config, run_dir)
    log_to(run_dir / "train.log", silent=not first)
    if resumed and first:
        (run_dir / "summary.json").unlink(missing_ok=True)
        rewind_events(run_dir, run.old.step if run.old else -1)
        tidy_checkpoints(run_dir / "checkpoints", resumed.checkpoint, run.network, run.data.tokenizer)
        changes = f"; changed: {', '.join(resumed.changes)}" if resumed.changes else ""
        say(f"going on with {shown(run_dir)} at step {run.old.step if run.old else 0:,}{changes}")


@contextmanager
def answered(answer: Callable[[], None]) -> Iterator[None]:
    """Calls `answer` when a signal stops the run."""
    from training.checkpointing import StoppedBySignal

    try:
        yield
    except StoppedBySignal:
        answer()
        raise


def fit(run: Run, trainer: Trainer, run_dir: Path) -> None:
    """Trains, from the old weights on if there are any, and validates the best ones on the whole split."""
    from checkpoint.checkpoint import record_validation
    from training.checkpointing import best_or_last
    from training.summary import say_start

    say_start(run, trainer)
    goes_on = run.old is not None and run.old.goes_on
    trainer.fit(run.module, datamodule=run.data, ckpt_path=run.old.path if goes_on else None)
    best = best_or_last(run_dir / "checkpoints")
    if run.timer and run.timer.out_of_time(run.module.validation["tokens"]):  # it would see fewer tokens than that
        say("the budget leaves no time for a last validation: the figures are those of one in training")
        return
    whole = run.data.whole_validation()
    trainer.validate(run.module, whole, ckpt_path=best, verbose=False)
    if whole.cut:
        say(f"the last validation saw {run.module.validation['tokens']:,} tokens: the budget leaves no time for more")
    if trainer.is_global_zero:
        record_validation(best, run.module.validation)


if __name__ == "__main__":
    entry_point(main, "train", sweeps=True)
