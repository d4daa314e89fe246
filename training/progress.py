"""The progress of a run from 0 to 1, which decides when it validates and ends, and its learning rates.

A run ends when it reaches the first of its bounds: `trainer.max_steps`, `max_epochs` or `max_time`. `min_steps` and
`min_epochs` only delay an end by `max_time`.
"""

import sys
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.states import RunningStage

from system.running_clock import running_seconds

NEVER = sys.maxsize


class RunTimer(Timer):
    """Measures the training time of a run, including the time before it was resumed, against `trainer.max_time`.

    Unlike Lightning's Timer it does not stop the run; `run_progress` decides that. Time in which the process is
    suspended, for example with Ctrl-Z, does not count.
    """

    def __init__(self, duration: timedelta | None, min_steps: int | None = None, min_epochs: int | None = None):
        super().__init__(duration, verbose=False)
        self.min_steps = min_steps
        self.min_epochs = min_epochs

    @property
    def state_key(self) -> str:
        """That of Lightning's Timer, so that a run can be resumed with another kind of bound."""
        return Timer.__qualname__

    # Here Lightning's Timer would stop the run, even before `min_steps`.
    on_fit_start = Callback.on_fit_start
    on_train_batch_end = Callback.on_train_batch_end

    def on_train_start(self, *args: Any) -> None:
        """Starts the clock."""
        self._start_time[RunningStage.TRAINING] = running_seconds()

    def on_train_end(self, *args: Any) -> None:
        """Stops the clock."""
        self._end_time[RunningStage.TRAINING] = running_seconds()

    def time_elapsed(self, stage: str = RunningStage.TRAINING) -> float:
        """Seconds of training, including those before the run was resumed."""
        if stage != RunningStage.TRAINING or self.start_time() is None or self.end_time() is not None:
            return super().time_elapsed(stage)
        return running_seconds() - self.start_time() + self._offset

    def fraction_done(self, steps: int, epochs: float, seconds: float) -> float | None:
        """Fraction of the time that is used, as far as the minimums allow. None: no bound on time."""
        time_fraction = self._time_fraction(seconds)
        if time_fraction is None:
            return None
        fractions = [time_fraction]
        if self.min_steps:
            fractions.append(steps / self.min_steps)
        if self.min_epochs:
            fractions.append(epochs / self.min_epochs)
        return min(fractions)

    def _time_fraction(self, seconds: float) -> float | None:
        return None if self._duration is None else seconds / self._duration

    def can_validate(self) -> bool:
        """Whether there is time for a validation before the end of the run."""
        return True


def run_timer(trainer: Trainer) -> RunTimer:
    """The RunTimer of this Trainer."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, RunTimer))


def fractions_done(trainer: Trainer, steps: int, epochs: float, seconds: float) -> dict[str, float]:
    """For each bound of the run, the fraction of it that is reached; above 1 if it is exceeded."""
    fractions = {}
    if trainer.max_steps > 0:
        fractions["max_steps"] = steps / trainer.max_steps
    if trainer.max_epochs and trainer.max_epochs > 0:
        fractions["max_epochs"] = epochs / trainer.max_epochs
    if (time_fraction := run_timer(trainer).fraction_done(steps, epochs, seconds)) is not None:
        fractions["max_time"] = time_fraction
    return fractions


def run_progress(trainer: Trainer, steps_ahead: int = 0) -> float:
    """Fraction of the run that is done, 0 to 1, by the bound that is nearest.

    Args:
        steps_ahead: predicts the fraction after this many more optimizer steps of average duration.
    """
    steps, batches = trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.total.processed
    seconds = run_timer(trainer).time_elapsed()
    if steps_ahead:
        seconds *= 1 + steps_ahead / max(1, steps)
        steps, batches = steps + steps_ahead, batches + steps_ahead * trainer.accumulate_grad_batches
    fractions = fractions_done(trainer, steps, batches / trainer.num_training_batches, seconds)
    return min(1.0, max(fractions.values(), default=0.0))


class ValidationSchedule(Callback):
    """Tells Lightning after which batches to validate; the last validation is always at the end of the run.

    Args:
        num_validations: number of validations, evenly spread over the run; used if `interval` is None.
        interval: number of batches (int), fraction of an epoch (float), or time between validations.
    """

    def __init__(self, num_validations: int, interval: int | float | timedelta | None):
        self._num_validations = num_validations
        self._interval = interval
        self._num_done = 0
        self._last_ended_at = 0.0  # running_seconds() at the end of the last validation

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Counts the validations that a resumed run has done before."""
        self._num_done, self._last_ended_at = self._due(trainer, run_progress(trainer)), running_seconds()

    def on_train_batch_end(self, trainer: Trainer, *args) -> None:
        """Sets `val_check_batch`: Lightning validates when the number of batches is a multiple of it."""
        progress = run_progress(trainer)
        due = progress >= 1 or (self._due(trainer, progress) > self._num_done and run_timer(trainer).can_validate())
        trainer.val_check_batch = 1 if due else NEVER

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Skips validations that became due during this one."""
        self.on_train_start(trainer, module)

    def _due(self, trainer: Trainer, progress: float) -> int:
        """How many validations are due by now."""
        if self._interval is None:
            return int(self._num_validations * progress + 1e-9)  # 49 x (1 / 49) is a little less than 1
        batches = trainer.fit_loop.total_batch_idx + 1
        if isinstance(self._interval, timedelta):
            return self._num_done + (running_seconds() - self._last_ended_at >= self._interval.total_seconds())
        if isinstance(self._interval, float):
            return batches // max(1, round(self._interval * trainer.num_training_batches))
        return batches // self._interval
