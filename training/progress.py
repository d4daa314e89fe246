"""How much of a run is over, and what follows from it: when it validates. Its learning rates and its end do too.

A run has one or more bounds, `trainer.max_steps`, `max_epochs` and `max_time`; the first one reached ends it.
`min_steps` and `min_epochs` hold back the end by time alone: the run goes on until they are reached too.
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
    """The time spent training, over all resumptions, and the bound on it. It ends no run: `run_progress` says when.

    Time in which the process is stopped, by Ctrl-Z for example, does not count.
    """

    def __init__(self, duration: timedelta | None, min_steps: int | None = None, min_epochs: int | None = None):
        super().__init__(duration, verbose=False)
        self.min_steps = min_steps
        self.min_epochs = min_epochs

    @property
    def state_key(self) -> str:
        """Lightning's Timer's: a run may go on with another kind of bound."""
        return Timer.__qualname__

    # Where Lightning's Timer would end the run, whatever is still to be reached.
    on_fit_start = Callback.on_fit_start
    on_train_batch_end = Callback.on_train_batch_end

    def on_train_start(self, *args: Any) -> None:
        """Starts the clock."""
        self._start_time[RunningStage.TRAINING] = running_seconds()

    def on_train_end(self, *args: Any) -> None:
        """Stops it."""
        self._end_time[RunningStage.TRAINING] = running_seconds()

    def time_elapsed(self, stage: str = RunningStage.TRAINING) -> float:
        """Seconds of training over all resumptions."""
        if stage != RunningStage.TRAINING or self.start_time() is None or self.end_time() is not None:
            return super().time_elapsed(stage)
        return running_seconds() - self.start_time() + self._offset

    def fraction_done(self, steps: int, epochs: float, seconds: float) -> float | None:
        """Of the time, as far as the minimums let it count. None: time is no bound."""
        share = self._time_fraction(seconds)
        if share is None:
            return None
        shares = [share]
        if self.min_steps:
            shares.append(steps / self.min_steps)
        if self.min_epochs:
            shares.append(epochs / self.min_epochs)
        return min(shares)

    def _time_fraction(self, seconds: float) -> float | None:
        return None if self._duration is None else seconds / self._duration

    def can_validate(self) -> bool:
        """Whether there is time for a validation that is due before the end."""
        return True


def run_timer(trainer: Trainer) -> RunTimer:
    """The one of this Trainer."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, RunTimer))


def fractions_done(trainer: Trainer, steps: int, epochs: float, seconds: float) -> dict[str, float]:
    """By each of its bounds, the share of the run that is over after so much; above 1 if the bound was passed."""
    shares = {}
    if trainer.max_steps > 0:
        shares["max_steps"] = steps / trainer.max_steps
    if trainer.max_epochs and trainer.max_epochs > 0:
        shares["max_epochs"] = epochs / trainer.max_epochs
    if (share := run_timer(trainer).fraction_done(steps, epochs, seconds)) is not None:
        shares["max_time"] = share
    return shares


def run_progress(trainer: Trainer, steps_ahead: int = 0) -> float:
    """Share of the run that is over, 0 to 1: by whichever bound is nearest.

    Args:
        steps_ahead: asks for the share after so many optimizer steps more, as long as those until now on average.
    """
    steps, batches = trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.total.processed
    seconds = run_timer(trainer).time_elapsed()
    if steps_ahead:
        seconds *= 1 + steps_ahead / max(1, steps)
        steps, batches = steps + steps_ahead, batches + steps_ahead * trainer.accumulate_grad_batches
    shares = fractions_done(trainer, steps, batches / trainer.num_training_batches, seconds)
    return min(1.0, max(shares.values(), default=0.0))


class ValidationSchedule(Callback):
    """Tells Lightning after which batches to validate; the last time is at the end of the run, always.

    Args:
        num_validations: how many, evenly spread over the run, where there is no interval.
        interval: in its place, a number of batches (int), a share of an epoch (float), or a time since the last one.
    """

    def __init__(self, num_validations: int, interval: int | float | timedelta | None):
        self._num_validations = num_validations
        self._interval = interval
        self._done = 0
        self._last_at = 0.0  # running_seconds() at the end of the last validation

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Those before are done, where the run is resumed."""
        self._done, self._last_at = self._due(trainer, run_progress(trainer)), running_seconds()

    def on_train_batch_end(self, trainer: Trainer, *args) -> None:
        """Lightning validates if the number of batches can be divided by `val_check_batch`."""
        progress = run_progress(trainer)
        due = progress >= 1 or (self._due(trainer, progress) > self._done and run_timer(trainer).can_validate())
        trainer.val_check_batch = 1 if due else NEVER

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """What else became due during a long validation is left out."""
        self.on_train_start(trainer, module)

    def _due(self, trainer: Trainer, progress: float) -> int:
        """How many validations are due by now."""
        if self._interval is None:
            return int(self._num_validations * progress + 1e-9)  # 49 x (1 / 49) is a little less than 1
        batches = trainer.fit_loop.total_batch_idx + 1
        if isinstance(self._interval, timedelta):
            return self._done + (running_seconds() - self._last_at >= self._interval.total_seconds())
        if isinstance(self._interval, float):
            return batches // max(1, round(self._interval * trainer.num_training_batches))
        return batches // self._interval
