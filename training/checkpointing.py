"""What is kept of a run: the best network, the state to go on from, and a clean stop.

best.ckpt        the weights with the lowest validation loss
last.ckpt        all it takes to go on as if nothing had happened; written between two optimiser steps
previous.ckpt    the last.ckpt before it, while the run is not finished
"""

import logging
import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import tiktoken
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer, __version__
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from checkpoint.checkpoint import check_same_weights
from checkpoint.io import read_checkpoint, write_checkpoint
from model.gpt import GPT
from system.checks import Number
from system.errors import UserError
from system.running_clock import running_seconds
from training.budget_timer import BudgetTimer
from training.callbacks import MetricsLogger
from training.progress import run_progress, run_timer

logger = logging.getLogger(__name__)


class AtomicCheckpointIO(TorchCheckpointIO):
    """How the Trainer writes and reads checkpoints. `storage_options` says where the old file goes."""

    def __init__(self):
        super().__init__()
        self.restorable: tuple[Path, dict[str, Any]] | None = None
        """A checkpoint that is read and checked already (training/run_state.py)."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str, storage_options: Path | None = None) -> None:
        """Writes it whole, or not at all."""
        write_checkpoint(checkpoint, Path(path), previous=storage_options)

    def load_checkpoint(self, path: str, *args, **kwargs) -> dict[str, Any]:
        """All of the checkpoint that the run resumes from; of any other the weights."""
        if self.restorable and self.restorable[0] == Path(path):
            (_, state), self.restorable = self.restorable, None
            return state
        return {"state_dict": read_checkpoint(Path(path))["state_dict"], "pytorch-lightning_version": __version__}


class BestCheckpoint(Checkpoint):
    """Writes the weights at each validation whose loss is the lowest so far."""

    def __init__(self, path: Path):
        self.path = path
        self.lowest = math.inf  # nats per token

    STATE = {"lowest": Number(float, 0)}

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Writes, if it is the lowest."""
        loss = module.validation["nats_per_token"]
        if trainer.state.fn == "fit" and loss < self.lowest:
            self.lowest = loss
            trainer.save_checkpoint(self.path, weights_only=True)

    def state_dict(self) -> dict[str, float]:
        """The loss to beat."""
        return {"lowest": self.lowest}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Takes it over, if the file that has it is still there."""
        if self.path.is_file():
            self.lowest = state["lowest"]


class LastCheckpoint(Checkpoint):
    """Writes the state of the run after every validation, and once a minute between them.

    Always before a batch that begins an optimiser step, or at the end: what a step adds up from several batches is
    in no checkpoint. Curves reach the disk first, so that a checkpoint never is ahead of them.

    Args:
        path: of last.ckpt.
        metrics: whose clock stops meanwhile.
        run: what else the checkpoint says of the run, under its key "run".
        started_at: when the run started, a reading of running_seconds(); earlier by what a resumed run has
            used already.
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
        """A run that goes on is saved as far as it has come."""
        self.saved_step, self._saved_at = trainer.global_step, time.monotonic()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Writes at the end of the run; before it, the next batch shows whether a step is complete."""
        if trainer.state.fn == "fit":
            self._due = True
            if run_progress(trainer) >= 1:
                self.save(trainer)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        """Writes where it is time."""
        late = time.monotonic() - self._saved_at > self.SECONDS_BETWEEN and trainer.world_size == 1  # clocks differ
        if (self._due or late) and begins_step(trainer, batch_idx):
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Writes last.ckpt; the one before becomes previous.ckpt."""
        with self._metrics.clock_stopped(trainer):
            for logger in trainer.loggers:
                logger.save()
            trainer.save_checkpoint(self.path, storage_options=self.path.with_stem("previous"))
        self._due, self._saved_at, self.saved_step = False, time.monotonic(), trainer.global_step

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the run's own entry, and takes back that a batch had begun: Lightning would count it as trained on."""
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
    """Whether this batch of the epoch is the first of an optimiser step."""
    return batch_idx % trainer.accumulate_grad_batches == 0


def last_checkpoint(trainer: Trainer) -> LastCheckpoint:
    """The one of this Trainer."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, LastCheckpoint))


def saved_step(trainer: Trainer) -> int:
    """The step that last.ckpt is of; 0: there is none yet."""
    return last_checkpoint(trainer).saved_step


def remove_stale_checkpoints(
    directory: Path, resumed_from: Path | None, network: GPT, tokenizer: tiktoken.Encoding
) -> None:
    """Takes away what a kill left half written, and checkpoints that the run does not go on from.

    Args:
        network, tokenizer: the run's. A best.ckpt of others is put aside.
    """
    for path in directory.glob("*.tmp"):
        path.unlink()
    last, best = directory / "last.ckpt", directory / "best.ckpt"
    if resumed_from != last:  # else it would push out the one that is whole
        last.unlink(missing_ok=True)
    try:
        if best.exists():
            check_same_weights(best, network, tokenizer)
    except UserError as error:
        aside = best.replace(best.with_suffix(".unusable"))
        logger.info(f"{error} It is {aside.name} now; the best from here on is kept.")


def best_or_last(directory: Path) -> Path:
    """The best checkpoint; where it was damaged and no later one was better, the last in its place."""
    best = directory / "best.ckpt"
    if not best.exists():
        write_checkpoint(read_checkpoint(directory / "last.ckpt"), best)
    return best


class GracefulStop(Callback):
    """Ctrl-C, SIGTERM or SIGHUP: the step, and a validation that is due, are finished; all is saved; training stops.

    A second signal, or one outside of training, stops at once. As a context manager it takes the signals over, but for
    those that are ignored, as SIGHUP behind nohup, and ends the process with 128 and the signal's number.

    With several processes a signal to any of them stops all after the same step: a few times a second, at steps that
    are the same for all, they tell each other what they received.
    """

    SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
    SECONDS_BETWEEN_TALKS = 0.2

    def __init__(self):
        self.training = False  # a signal waits for the step's end
        self._keep: LastCheckpoint | None = None
        self._received = 0  # the signal's number
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "GracefulStop":
        heard = [number for number in self.SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle) for number in heard}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback) -> None:
        stopped = isinstance(error, StoppedBySignal)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if stopped else handler)  # one more must not disturb the end
        if stopped:
            sys.exit(128 + error.args[0])

    def _handle(self, number: int, frame) -> None:
        if not self.training or self._received:
            raise StoppedBySignal(number)
        self._received = number

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """From now on a signal waits for the step's end."""
        self._keep = last_checkpoint(trainer)
        self.training = True
        if trainer.world_size > 1:
            self._group = torch.distributed.new_group(backend="gloo")  # numbers in the CPU's memory
            self._steps_between, self._steps_left, self._talked_at = 1, 1, time.monotonic()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        """Saves and stops, if a signal came during the steps before."""
        if begins_step(trainer, batch_idx) and (number := self._received_by_any(trainer)):
            self._keep.save(trainer)
            raise StoppedBySignal(number)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Stops before the last validation, which a resumed run makes up for; all is saved already."""
        self._steps_left = 1
        number = self._received_by_any(trainer)
        self.training = False
        if number:
            raise StoppedBySignal(number)

    def _received_by_any(self, trainer: Trainer) -> int:
        """The signal that this process received, or another one; 0: none, or the others were not asked."""
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
    """The run was stopped from outside; args[0] is the signal's number. No Exception: nothing must swallow it."""
