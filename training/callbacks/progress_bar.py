"""Progress and validation loss on the terminal."""

import logging
import math
import sys

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from system.log import shares_terminal
from system.running_clock import running_seconds
from training.callbacks.metrics_logger import MetricsLogger
from training.progress import run_progress

logger = logging.getLogger(__name__)


class RunProgressBar(ProgressBar):
    """Progress bar on a terminal, otherwise a line every few seconds; and one line per validation.

    Args:
        enabled: False shows only the lines of the validations.
    """

    SECONDS_BETWEEN_LINES = 10.0
    SECONDS_BETWEEN_REFRESHES = 0.2

    def __init__(self, metrics: MetricsLogger, enabled: bool = True):
        super().__init__()
        self._metrics = metrics
        self._enabled = enabled
        self._bar: tqdm | None = None
        self._shown = self._started = self._done_before = 0.0
        self._tokens_before = 0
        self._after_first_batch = False

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Shows the empty bar."""
        self._shown, self._after_first_batch = running_seconds(), False
        if self._enabled and trainer.is_global_zero and sys.stderr.isatty() and not shares_terminal():
            self._bar = tqdm(total=1.0, bar_format="{percentage:3.0f}%|{bar}| {desc}", leave=False, dynamic_ncols=True)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args) -> None:
        """Updates the bar or logs a line, a few times per second or minute."""
        now = running_seconds()
        if not self._after_first_batch:  # speed and time left exclude it: it may compile the network
            self._started = self._shown = now
            self._after_first_batch = True
            self._done_before, self._tokens_before = run_progress(trainer), self._metrics.tokens
            return
        pace = self.SECONDS_BETWEEN_REFRESHES if self._bar is not None else self.SECONDS_BETWEEN_LINES
        if now - self._shown < pace or not (self._enabled and trainer.is_global_zero):
            return
        self._shown, done = now, run_progress(trainer)
        newly_done = done - self._done_before
        left = (now - self._started) * (1 - done) / newly_done if newly_done > 0 else math.nan
        state = (
            f"step {trainer.global_step:,}  loss {float(module.last_loss):.3f}  "
            f"{(self._metrics.tokens - self._tokens_before) / (now - self._started):,.0f} tokens/s  "
            f"{_minutes(left)} left"
        )
        if self._bar is not None:
            self._bar.n = done
            self._bar.set_description_str(state)
        else:
            logger.info(f"{done:4.0%}  {state}")

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Logs one line with the validation loss."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and trainer.is_global_zero:
            loss = module.validation
            cut = f" (only {loss['tokens']:,} tokens: out of time)" if trainer.val_dataloaders.truncated else ""
            logger.info(
                f"step {trainer.global_step:,}: validation {loss['nats_per_token']:.3f} nats per token, "
                f"{loss['bits_per_byte']:.3f} bits per byte{cut}"
            )

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        """Removes the bar, also after Ctrl-C, so that the shell's prompt starts on a line of its own."""
        self.teardown(trainer, module, "fit")

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def disable(self) -> None:
        """Does nothing: Lightning calls it on all ranks but the first, which show nothing anyway."""

    def print(self, *args, **kwargs) -> None:
        """Logs what Lightning prints."""
        logger.info(" ".join(map(str, args)))


def _minutes(seconds: float) -> str:
    return "?" if math.isnan(seconds) else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
