"""Loss, learning rates, speed and memory during training."""

import math
import statistics
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from analysis.recording import append_to_curve
from system.checks import COUNT, SECONDS, Bounded, Predicate
from system.memory import memory_mb, peak_memory_mb, reset_peak_memory
from system.running_clock import exclude_suspensions, running_seconds
from training.progress import run_progress

RECORDED = {
    "loss": "Loss/train",
    "tokens": "Progress/tokens",
    "memory_mb": "System/memory_mb",
    "step_ms": "Speed/step_ms",
}
"""What analysis/recording.py keeps of the curves: its names -> tags."""


class MetricsLogger(Callback):
    """Logs the training curves every `trainer.log_every_n_steps` steps and at the end of the run.

    `step_ms` is the time of one optimizer step. It is measured between two synchronizations with the device, after
    WARMUP_STEPS steps, and leaves out validation, logging, pictures and checkpoints.
    """

    WARMUP_STEPS = 5

    def __init__(self, hyperparameters: dict[str, float | str | None], varied: Collection[str] = ()):
        self.hyperparameters = hyperparameters
        self.recorded_in: Path | None = None  # directory of the run, whose report shows the curves
        self.varied = varied  # those that the user has set or sweeps over
        self.step_ms_readings: list[float] = []  # one per logging interval
        self._warmup_ms = math.nan
        self.train_seconds = 0.0  # like step_ms, leaves out everything but steps
        self.tokens = 0  # trained on so far, by all ranks
        self.peak_memory_mb = (
            math.nan
        )  # of the steps before the first validation, beyond the memory used before training
        self._clock: float | None = None
        self._interval_seconds, self._interval_steps, self._interval_batches = 0.0, 0, 0
        self._loss_sum: Tensor | float = 0.0

    @property
    def step_ms(self) -> float:
        """Median over the logging intervals after warm-up; in a run that ends during warm-up, the mean of its steps."""
        return statistics.median(self.step_ms_readings or [self._warmup_ms])

    @property
    def tokens_per_second(self) -> float:
        """Training tokens per second of optimizer steps."""
        return self.tokens / self.train_seconds if self.train_seconds else math.nan

    # A resumed run restores these, so that its curves and its summary are those of an uninterrupted run.
    STATE = {
        "step_ms_readings": [Bounded(float, 0, 1e10)],
        "train_seconds": SECONDS,
        "tokens": COUNT,
        "peak_memory_mb": Bounded(float, -1e10, 1e10, allow_nan=True),
        "_warmup_ms": Bounded(float, 0, 1e10, allow_nan=True),
        "_interval_seconds": SECONDS,
        "_interval_steps": COUNT,
        "_interval_batches": COUNT,
        "_loss_sum": (float, Predicate("one number", lambda value: isinstance(value, Tensor) and value.ndim == 0)),
    }

    def state_dict(self) -> dict[str, Any]:
        """Everything counted so far."""
        return {name: getattr(self, name) for name in self.STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the counts of a checkpoint."""
        for name in self.STATE:
            setattr(self, name, state[name])

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Starts to measure memory, and to notice when the process is suspended."""
        exclude_suspensions()
        reset_peak_memory(trainer.strategy.root_device.type)
        self._memory_before_mb = memory_mb(trainer.strategy.root_device.type)

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Logs the hyperparameters."""
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_settings(self.hyperparameters, self.varied)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        """Starts the clock unless it is running."""
        if self._clock is None:
            self._clock = _now(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs, batch: Tensor, batch_idx: int
    ) -> None:
        """Counts the batch, and logs at the end of an interval."""
        self._loss_sum = self._loss_sum + module.last_loss
        self._interval_batches += 1
        self.tokens += batch.size(0) * (batch.size(1) - 1) * trainer.world_size
        if trainer.fit_loop._should_accumulate():  # the batch was only added to the gradient
            return
        self._interval_steps += 1
        if trainer.global_step == self.WARMUP_STEPS:  # the first steps allocate memory and compile
            self._stop_clock(trainer)
            self.train_seconds += self._interval_seconds
            self._warmup_ms = 1000 * self._interval_seconds / self._interval_steps
            self._interval_seconds, self._interval_steps = 0.0, 0
        if trainer.global_step % trainer.log_every_n_steps == 0 or run_progress(trainer) >= 1:
            self._stop_clock(trainer)
            self._write(trainer)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Stops the clock and reads the peak memory: validation is not part of a step."""
        self._stop_clock(trainer)
        if math.isnan(self.peak_memory_mb) and trainer.state.fn == "fit":
            self.peak_memory_mb = peak_memory_mb(trainer.strategy.root_device.type) - self._memory_before_mb

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer) -> None:
        """Computes the gradient norm of a step that will be logged, before clipping."""
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            self.grad_norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])

    @contextmanager
    def clock_stopped(self, trainer: Trainer) -> Iterator[None]:
        """Stops the clock during work that is not part of a step."""
        running = self._clock is not None
        self._stop_clock(trainer)
        yield
        if running:
            self._clock = _now(trainer)

    def _stop_clock(self, trainer: Trainer) -> None:
        if self._clock is not None:
            self._interval_seconds += _now(trainer) - self._clock
            self._clock = None

    def _write(self, trainer: Trainer) -> None:
        values = {
            "Loss/train": float(self._loss_sum) / self._interval_batches,
            "Progress/tokens": self.tokens,
            "System/memory_mb": peak_memory_mb(trainer.strategy.root_device.type),
        }
        for group in trainer.optimizers[0].param_groups:
            values[f"Optimizer/lr_{group['name']}"] = group["lr"]
        if trainer.global_step % trainer.log_every_n_steps == 0:
            values["Optimizer/grad_norm"] = float(self.grad_norm)
        self.train_seconds += self._interval_seconds
        if self._interval_steps and self._interval_seconds:
            step_ms = 1000 * self._interval_seconds / self._interval_steps
            if trainer.global_step <= self.WARMUP_STEPS:
                self._warmup_ms = step_ms
            else:
                self.step_ms_readings.append(step_ms)
                values["Speed/step_ms"] = step_ms
                values["Speed/tokens_per_second"] = self.tokens_per_second
        for logger in trainer.loggers:
            logger.log_metrics(values, trainer.global_step)
        if self.recorded_in and trainer.is_global_zero:
            row = {name: values.get(tag) for name, tag in RECORDED.items()}
            append_to_curve(self.recorded_in, {"step": trainer.global_step, **row})
        self._interval_seconds, self._interval_steps, self._interval_batches = 0.0, 0, 0
        self._loss_sum = 0.0


def _now(trainer: Trainer) -> float:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return running_seconds()
