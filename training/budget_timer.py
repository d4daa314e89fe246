"""The end of a run with a budget: training stops when what comes after it just fits.

What comes after is one more validation with its pictures and checkpoints, the validation of the whole split, a sample.
How long that takes depends on how busy the machine is, and that changes. So its cost is kept in training steps,
averaged over the validations so far, and multiplied by what a step takes at the moment:

    training ends at  deadline - steps that the end costs x seconds a step now

Where that would leave too little for training, and where it turns out wrong, the last validation is cut.
"""

import logging
import math
import statistics
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from system.running_clock import running_seconds
from training.progress import RunTimer

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 1.2  # on an idle machine, all that comes after training but the validation of the whole split
EXIT_SECONDS = 0.5  # of these, after that validation: saving, a sample, the end of the process
FULL_VALIDATION_SHARE = 1 / 3  # of what the start leaves: time kept for the whole split at most
MIN_GAP = 2.0  # times what a validation takes: so far it stays from the next one, which cannot eat the budget then
GRACE = 0.03  # of the budget: a validation is cut when it would end so much later than planned
COOLING_STEPS = 10  # the learning rate falls to 0 over so many batches at least, however late it is
STEP_TIME_DECAY_SECONDS = 3.0  # a step's time counts e times less after so long
WARMUP_STEPS = 5  # allocate and compile: not a step's time


class BudgetTimer(RunTimer):
    """Lightning's Timer, with an end that is estimated again at every step.

    Args:
        budget: seconds of the whole command.
        val_tokens: of the whole split.
        min_steps, min_epochs: of RunTimer.
        max_time: seconds of training over the run's whole life, as far as is known before it.
        deadline: a reading of running_seconds() at which the process should be over. None: it follows from `max_time`.
        whole_seconds: what validating the whole split takes, as far as is known before training.
        load: how many times longer than on an idle machine the start took.
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
        self.share = 0.0
        """Share of the run that is over, 0 to 1."""
        # What the end consists of: in seconds, as expected before training; in steps, a reading each validation.
        self._expected = {
            "whole": whole_seconds,
            "validation": (SHUTDOWN_SECONDS - EXIT_SECONDS) * load,
            "exit": EXIT_SECONDS * load,
        }
        self._measured: dict[str, list[float]] = {name: [] for name in self._expected}
        self._step_seconds_at_first = math.inf  # as soon as it is known
        available = budget if deadline is None else deadline - running_seconds()
        self._most = {"whole": FULL_VALIDATION_SHARE * max(0.0, available), "exit": 0.1 * budget}  # seconds
        self._batches = 0
        self._recent_batches = self._recent_seconds = 0.0  # the older, the less they count
        self._batch_ended = 0.0
        self._validation_began: float | None = None
        self._validation_ended = -math.inf
        self._told = False

    # What the end takes

    @property
    def step_seconds(self) -> float:
        """What a batch takes at the moment; 0 before there was one."""
        return self._recent_seconds / self._recent_batches if self._recent_batches else 0.0

    def _seconds_of(self, name: str) -> float:
        """What is kept for a part of the end."""
        return min(self._cost(name), self._most.get(name, self.budget))

    def _cost(self, name: str) -> float:
        """Seconds that it takes at the moment."""
        if readings := self._measured[name]:
            return statistics.fmean(readings) * self.step_seconds
        return self._expected[name] * max(1.0, self.step_seconds / self._step_seconds_at_first)

    def _left(self) -> float:
        """Seconds until training should end; below 0 if it should have."""
        return self.deadline - sum(map(self._seconds_of, self._expected)) - running_seconds()

    def late(self) -> bool:
        """Whether the process should be about to end by now: there is no time for pictures."""
        return self.deadline is not None and running_seconds() > self.deadline - self._seconds_of("exit")

    def out_of_time(self, tokens: int = 0) -> bool:
        """Whether a validation has to be cut to keep the budget; or would have to be, one of so many tokens."""
        if self.deadline is None:
            return False
        latest = self.deadline - self._seconds_of("exit") + GRACE * self.budget
        return running_seconds() + tokens * self._cost("whole") / self.val_tokens > latest

    # Training

    def _time_fraction(self, seconds: float) -> float:
        """Before training, of `max_time`; then as if the time went on evenly from the share that is over by now."""
        if self.start_time() is None:
            return seconds / max(self.max_time, 1e-9)
        ahead = max(0.0, seconds - self.time_elapsed())
        return self.share + (1 - self.share) * ahead / max(ahead, self._left(), 1e-9)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Begins, or goes on at the share of the run that its time is of all."""
        super().on_train_start(trainer, module)
        self._batch_ended, before = running_seconds(), self._offset
        if self.deadline is None:
            left = max(0.0, self.max_time - before)
            self.deadline = self._batch_ended + left + sum(map(self._seconds_of, self._expected))
        if before:
            self.share = before / (before + max(0.0, self._left()))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        """Takes the batch's time, and that of a validation before it; sees how far the run is."""
        now = running_seconds()
        seconds, self._batch_ended = now - self._batch_ended, now
        self._batches += 1
        if self._validation_began is not None:
            validation_s = max(0.0, now - self._validation_began - self.step_seconds)
            self._measured["validation"].append(validation_s / self.step_seconds)
            self._validation_began, self._validation_ended = None, now
        elif self._batches > 2 or not self._recent_batches:
            fade = math.exp(-seconds / STEP_TIME_DECAY_SECONDS)
            self._recent_batches = fade * self._recent_batches + 1
            self._recent_seconds = fade * self._recent_seconds + seconds
        if self._batches == WARMUP_STEPS:
            self._step_seconds_at_first = self.step_seconds
        self._follow(seconds)

    def _follow(self, seconds: float) -> None:
        """Moves on by the seconds of a batch: evenly from where the run is to its end, wherever that is by now."""
        left, rest = self._left() - self.step_seconds, 1 - self.share  # 0: another batch would end too late
        self.max_time = self.time_elapsed() + max(0.0, left)
        left = max(left, (math.ceil(COOLING_STEPS * rest) - 1) * self.step_seconds)
        self.share = 1.0 if left <= 0 else self.share + rest * seconds / (left + seconds)

    # Validations

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Starts the clock."""
        if trainer.state.fn == "fit":
            self._validation_began = running_seconds()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """What it took a token, and so what the whole split will; pictures and checkpoints are yet to come."""
        if trainer.state.fn == "fit" and self.step_seconds:
            seconds = (running_seconds() - self._validation_began) * self.val_tokens / module.validation["tokens"]
            self._measured["whole"].append(seconds / self.step_seconds)

    def can_validate(self) -> bool:
        """Whether a validation that is due is far enough from the one before, and from the last one."""
        apart = MIN_GAP * self._cost("validation")
        if self._left() > apart and running_seconds() - self._validation_ended > apart:
            return True
        if not self._told:
            logger.info(f"validations are {apart:.0f} s apart at least: one takes {apart / MIN_GAP:.1f} s")
        self._told = True
        return False

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Lightning's, and what the end takes."""
        return super().state_dict() | {"end": {name: self._seconds_of(name) for name in self._expected}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The time used so far; the end takes as long as it did, until there is a validation."""
        super().load_state_dict(state_dict)
        self._expected |= state_dict.get("end", {})


def budget_timer(trainer: Trainer) -> BudgetTimer | None:
    """That of this Trainer; None: no budget bounds the run."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, BudgetTimer)), None)
