"""Saves the best weights and the latest state of a run; training/checkpointing.py describes the files."""

import math
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from system.checks import Bounded
from system.running_clock import running_seconds
from training.budget_timer import BudgetTimer
from training.callbacks.metrics_logger import MetricsLogger
from training.progress import run_progress, run_timer


class BestCheckpoint(Checkpoint):
    """Saves the weights when a validation has the lowest loss so far."""

    def __init__(self, path: Path):
        self.path = path
        self.lowest = math.inf  # nats per token

    STATE = {"lowest": Bounded(float, 0)}

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Saves if the loss is the lowest so far."""
        loss = module.validation["nats_per_token"]
        if trainer.state.fn == "fit" and loss < self.lowest:
            self.lowest = loss
            trainer.save_checkpoint(self.path, weights_only=True)

    def state_dict(self) -> dict[str, float]:
        """The lowest loss."""
        return {"lowest": self.lowest}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores the lowest loss, if the checkpoint with it still exists."""
        if self.path.is_file():
            self.lowest = state["lowest"]


class LastCheckpoint(Checkpoint):
    """Saves the state of the run after every validation, and once a minute in between.

    It saves between two optimizer steps, never inside one: a checkpoint has no partly accumulated gradients. Logs are
    flushed first, so that they are never behind the checkpoint.

    Args:
        path: of last.ckpt.
        metrics: its clock is stopped while a checkpoint is saved.
        run: further entries about the run, saved under the key "run".
        started_at: start of the run, as a reading of running_seconds(); for a resumed run, earlier by the time that
            it has used before.
    """

    SECONDS_BETWEEN = 60.0

    def __init__(self, path: Path, metrics: MetricsLogger, run: dict[str, Any] | None = None, started_at: float = 0.0):
        self.path = path
        self._metrics = metrics
        self._run = run or {}
        self._started_at = started_at
        self._due = False
        self._saved_at = time.monotonic()
        self.saved_step = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Starts from the step of the checkpoint that the run was resumed from."""
        self.saved_step, self._saved_at = trainer.global_step, time.monotonic()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Saves at the end of the run; before that, at the start of the next optimizer step."""
        if trainer.state.fn == "fit":
            self._due = True
            if run_progress(trainer) >= 1:
                self.save(trainer)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        """Saves if a validation or a minute has passed."""
        late = time.monotonic() - self._saved_at > self.SECONDS_BETWEEN and trainer.world_size == 1  # clocks differ
        if (self._due or late) and begins_step(trainer, batch_idx):
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Saves last.ckpt; the old one becomes previous.ckpt."""
        with self._metrics.clock_stopped(trainer):
            for logger in trainer.loggers:
                logger.save()
            trainer.save_checkpoint(self.path, storage_options=self.path.with_stem("previous"))
        self._due, self._saved_at, self.saved_step = False, time.monotonic(), trainer.global_step

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the entry "run", and uncounts the batch that has just started, which Lightning would count as done."""
        timer = run_timer(trainer)
        used = {
            "seconds": running_seconds() - self._started_at,
            "train_seconds": timer.time_elapsed(),
            "max_time": timer.max_time if isinstance(timer, BudgetTimer) else None,
        }
        checkpoint["run"] = self._run | used
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for count in (batches["total"], batches["current"]):
            count.update(dict.fromkeys(("ready", "started", "processed"), count["completed"]))


def begins_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether an optimizer step starts with this batch of the epoch."""
    return batch_idx % trainer.accumulate_grad_batches == 0


def last_checkpoint(trainer: Trainer) -> LastCheckpoint:
    """The LastCheckpoint callback of this Trainer."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, LastCheckpoint))


def saved_step(trainer: Trainer) -> int:
    """The optimizer step at which last.ckpt was saved; 0 if it does not exist yet."""
    return last_checkpoint(trainer).saved_step
