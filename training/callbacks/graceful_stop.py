"""Ctrl-C, SIGTERM and SIGHUP."""

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from system.errors import TrainingInterrupted
from training.callbacks.checkpoints import LastCheckpoint, begins_step, last_checkpoint


class GracefulStop(Callback):
    """After Ctrl-C, SIGTERM or SIGHUP, finishes the step and a validation that is due, saves, and stops training.

    A second signal, or a signal outside training, stops at once. As a context manager it handles these signals, except
    those that are ignored, such as SIGHUP under nohup, and exits with 128 plus the signal's number.

    With several processes, a signal to any of them stops all of them after the same step: a few times per second, at
    steps that they agree on, they exchange the signals they received.

    Args:
        exit_on_signal: False for a program that continues, such as a notebook: only Ctrl-C is handled, and it raises
            TrainingInterrupted. Outside the main thread, which alone receives signals, nothing is handled.
    """

    SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
    SECONDS_BETWEEN_TALKS = 0.2

    def __init__(self, exit_on_signal: bool = True):
        self._exit_on_signal = exit_on_signal
        self._run_dir: Path | None = None
        self.training = False  # then a signal waits for the end of the step
        self._last_checkpoint: LastCheckpoint | None = None
        self._received = 0  # number of the signal; 0: none
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "GracefulStop":
        if threading.current_thread() is threading.main_thread():  # the only one that can set handlers
            signals = self.SIGNALS if self._exit_on_signal else (signal.SIGINT,)
            heard = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback) -> None:
        stopped = isinstance(error, StoppedBySignal) and self._exit_on_signal
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if stopped else handler)  # another signal must not interrupt the exit
        if stopped:
            sys.exit(128 + error.args[0])
        if isinstance(error, StoppedBySignal):
            raise TrainingInterrupted(self._run_dir) from None

    def _handle(self, number: int, frame) -> None:
        if not self.training or self._received:
            raise StoppedBySignal(number)
        self._received = number

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """From now on, a signal waits for the end of the step."""
        self._last_checkpoint = last_checkpoint(trainer)
        self._run_dir = Path(trainer.default_root_dir)
        self.training = True
        if trainer.world_size > 1:
            self._group = torch.distributed.new_group(backend="gloo")  # works on CPU tensors, whatever device trains
            self._steps_between, self._steps_left, self._talked_at = 1, 1, time.monotonic()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        """Saves and stops if a signal has arrived."""
        if begins_step(trainer, batch_idx) and (number := self._received_by_any(trainer)):
            self._last_checkpoint.save(trainer)
            raise StoppedBySignal(number)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Stops before the last validation, which a resumed run repeats; everything is saved already."""
        self._steps_left = 1
        number = self._received_by_any(trainer)
        self.training = False
        if number:
            raise StoppedBySignal(number)

    def _received_by_any(self, trainer: Trainer) -> int:
        """The signal that any process has received; 0 if none has, or if it is not yet time to ask the others."""
        if trainer.world_size == 1:
            return self._received
        self._steps_left -= 1
        if self._steps_left > 0:
            return 0
        seconds = time.monotonic() - self._talked_at
        heard = torch.tensor([self._received, seconds], dtype=torch.float64)
        torch.distributed.all_reduce(heard, torch.distributed.ReduceOp.MAX, self._group)
        number, seconds = heard.tolist()
        pace = self._steps_between * self.SECONDS_BETWEEN_TALKS / max(seconds, 1e-3)
        self._steps_between = self._steps_left = max(1, min(2 * self._steps_between, int(pace)))
        self._talked_at = time.monotonic()
        return int(number)


class StoppedBySignal(BaseException):
    """A signal stopped the run; args[0] is its number. Not an Exception, so that no `except Exception` catches it."""
