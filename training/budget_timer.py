"""Ends training early enough for the whole command to keep its budget.

After training come one more validation with its pictures and checkpoints, the validation of the whole split, and a
sample. How long they take depends on how busy the machine is, which changes. Their cost is therefore measured in
training steps, averaged over the validations so far, and multiplied by the current time per step:

    end of training = deadline - cost of the shutdown in steps x current seconds per step

If that leaves too little time for training, or turns out too low, the last validation is cut short.
"""

import logging
import math
import statistics
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from system.running_clock import running_seconds
from training.progress import RunTimer

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 1.2  # all that comes after training on an idle machine, except the validation of the whole split
EXIT_SECONDS = 0.5  # the part of it after that validation: saving, a sample, the exit of the process
FULL_VALIDATION_SHARE = 1 / 3  # of the time left at the start: the most that is reserved for the whole split
MIN_VALIDATION_GAP = 2.0  # least time between validations, in units of what one takes, so that they leave time to train
MAX_OVERRUN = 0.03  # of the budget: a validation that would exceed it by more is cut short
MIN_COOLDOWN_BATCHES = 10  # the learning rate takes at least this many to fall to 0, even if time is short
STEP_TIME_DECAY_SECONDS = 3.0  # time constant of the moving average of the time per step
WARMUP_STEPS = 5  # allocate memory and compile, so they are not timed


class BudgetTimer(RunTimer):
    """RunTimer that estimates the end of training again at every step.

    Args:
        budget: seconds for the whole command.
        val_tokens: number of tokens in the whole validation split.
        min_steps, min_epochs: see RunTimer.
        max_time: expected seconds of training, including those before the run was resumed.
        deadline: when the process should end, as a reading of running_seconds(). None: computed from `max_time`.
        whole_seconds: expected seconds to validate the whole split.
        load: how many times longer the start took than on an idle machine.
    """

    def __init__(
        self,
        budget: float,
        val_tokens: int,
        min_steps: int | None = None,
        min_epochs: int | None = None,
        *,
        max_time: float,
        deadline: float | None = None,
        whole_seconds: float = 0.0,
        load: float = 1.0,
    ):
        super().__init__(None, min_steps, min_epochs)
        self.budget = budget
        self.deadline = deadline
        self.max_time = max_time
        self.val_tokens = val_tokens
        self.progress = 0.0
        """Fraction of the run that is done, 0 to 1."""
        # The parts of the shutdown: seconds expected before training, and steps measured at each validation.
        self._expected = {
            "whole": whole_seconds,
            "validation": (SHUTDOWN_SECONDS - EXIT_SECONDS) * load,
            "exit": EXIT_SECONDS * load,
        }
        self._measured: dict[str, list[float]] = {name: [] for name in self._expected}
        self._first_step_seconds = math.inf  # until the first steps were timed
        available = budget if deadline is None else deadline - running_seconds()
        self._max_seconds = {"whole": FULL_VALIDATION_SHARE * max(0.0, available), "exit": 0.1 * budget}  # seconds
        self._batches = 0
        self._recent_batches = self._recent_seconds = 0.0  # exponentially weighted sums
        self._batch_ended_at = 0.0
        self._validation_started_at: float | None = None
        self._validation_ended_at = -math.inf
        self._gap_logged = False

    # Cost of the shutdown

    @property
    def step_seconds(self) -> float:
        """Current seconds per batch; 0 before the first one."""
        return self._recent_seconds / self._recent_batches if self._recent_batches else 0.0

    def _seconds_of(self, name: str) -> float:
        """Seconds reserved for a part of the shutdown."""
        return min(self._cost(name), self._max_seconds.get(name, self.budget))

    def _cost(self, name: str) -> float:
        """Seconds that a part of the shutdown would take now."""
        if readings := self._measured[name]:
            return statistics.fmean(readings) * self.step_seconds
        return self._expected[name] * max(1.0, self.step_seconds / self._first_step_seconds)

    def _seconds_left(self) -> float:
        """Seconds until training should end; negative if it should have ended before."""
        return self.deadline - sum(map(self._seconds_of, self._expected)) - running_seconds()

    def is_late(self) -> bool:
        """Whether the process should be exiting by now, so that there is no time for pictures."""
        return self.deadline is not None and running_seconds() > self.deadline - self._seconds_of("exit")

    def out_of_time(self, tokens: int = 0) -> bool:
        """Whether a validation has to stop to keep the budget, or cannot start if it has so many tokens."""
        if self.deadline is None:
            return False
        latest = self.deadline - self._seconds_of("exit") + MAX_OVERRUN * self.budget
        return running_seconds() + tokens * self._cost("whole") / self.val_tokens > latest

    # Training

    def _time_fraction(self, seconds: float) -> float:
        """Before training, the fraction of `max_time`; later, extrapolates linearly from the progress so far."""
        if self.start_time() is None:
            return seconds / max(self.max_time, 1e-9)
        ahead = max(0.0, seconds - self.time_elapsed())
        return self.progress + (1 - self.progress) * ahead / max(ahead, self._seconds_left(), 1e-9)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Starts the clock; a resumed run starts at the fraction of its training time that it has used."""
        super().on_train_start(trainer, module)
        self._batch_ended_at, before = running_seconds(), self._offset
        if self.deadline is None:
            left = max(0.0, self.max_time - before)
            self.deadline = self._batch_ended_at + left + sum(map(self._seconds_of, self._expected))
        if before:
            self.progress = before / (before + max(0.0, self._seconds_left()))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        """Measures the time of the batch, and of a validation before it; updates the progress."""
        now = running_seconds()
        seconds, self._batch_ended_at = now - self._batch_ended_at, now
        self._batches += 1
        if self._validation_started_at is not None:
            validation_s = max(0.0, now - self._validation_started_at - self.step_seconds)
            self._measured["validation"].append(validation_s / self.step_seconds)
            self._validation_started_at, self._validation_ended_at = None, now
        elif self._batches > 2 or not self._recent_batches:
            fade = math.exp(-seconds / STEP_TIME_DECAY_SECONDS)
            self._recent_batches = fade * self._recent_batches + 1
            self._recent_seconds = fade * self._recent_seconds + seconds
        if self._batches == WARMUP_STEPS:
            self._first_step_seconds = self.step_seconds
        self._advance(seconds)

    def _advance(self, seconds: float) -> None:
        """Adds the seconds of a batch to the progress, in proportion to the seconds that are left now."""
        left, rest = (
            self._seconds_left() - self.step_seconds,
            1 - self.progress,
        )  # 0 or less: no time for a batch
        self.max_time = self.time_elapsed() + max(0.0, left)
        left = max(left, (math.ceil(MIN_COOLDOWN_BATCHES * rest) - 1) * self.step_seconds)
        self.progress = 1.0 if left <= 0 else self.progress + rest * seconds / (left + seconds)

    # Validations

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Starts the clock."""
        if trainer.state.fn == "fit":
            self._validation_started_at = running_seconds()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Estimates the time for the whole split from this validation, before its pictures and checkpoints."""
        if trainer.state.fn == "fit" and self.step_seconds:
            seconds = (running_seconds() - self._validation_started_at) * self.val_tokens / module.validation["tokens"]
            self._measured["whole"].append(seconds / self.step_seconds)

    def can_validate(self) -> bool:
        """Whether a validation that is due is far enough from the previous one and from the end."""
        apart = MIN_VALIDATION_GAP * self._cost("validation")
        if self._seconds_left() > apart and running_seconds() - self._validation_ended_at > apart:
            return True
        if not self._gap_logged:
            logger.info(
                f"validations are at least {apart:.0f} s apart, because one takes {apart / MIN_VALIDATION_GAP:.1f} s"
            )
        self._gap_logged = True
        return False

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The time used, and the expected cost of the shutdown."""
        return super().state_dict() | {"end": {name: self._seconds_of(name) for name in self._expected}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the time used; the shutdown is expected to cost the same until a validation measures it."""
        super().load_state_dict(state_dict)
        self._expected |= state_dict.get("end", {})


def budget_timer(trainer: Trainer) -> BudgetTimer | None:
    """The BudgetTimer of this Trainer; None if the run has no budget."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, BudgetTimer)), None)
