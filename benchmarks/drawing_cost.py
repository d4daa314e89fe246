"""What drawing costs: all of ValidationImages, at each validation of a default run, as a share of that run's time.

    python -m benchmarks.drawing_cost [key=value ...]

Trains STEPS steps in the Trainer of train.py, on the CPU, with as many validations as a run has, and times each call
of ValidationImages inside them: attention maps, head scores, writing, and TensorBoard's file up to the disk. How long a
call takes does not depend on how many steps lie between two. The first also loads what draws, in every run anew, and
counts in full. The share is that of a whole default run, DEFAULT_TIME from start to exit. The last line is JSON.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback

from benchmarks.default_run import prepared_text, train, validation_images_of
from configs.entry_point import entry_point
from system.machine import machine
from system.text import pluralize
from training.budget import DEFAULT_TIME
from training.callbacks.graceful_stop import GracefulStop
from training.callbacks.validation_images import ValidationImages
from training.config import RunConfig

STEPS = 200
PROMISED_SHARE = 0.03


class TimedDrawing(Callback):
    """ValidationImages, with a clock around it."""

    def __init__(self, snapshots: ValidationImages):
        self.snapshots = snapshots
        self.calls: list[tuple[int, float]] = []
        """Training step and seconds of each."""

    def on_validation_end(self, trainer, module) -> None:
        """Draws; TensorBoard writes in a thread of its own, which is waited for."""
        writer = trainer.logger.experiment
        writer.flush()  # what others have written is not ours
        start = time.perf_counter()
        self.snapshots.on_validation_end(trainer, module)
        writer.flush()
        self.calls.append((trainer.global_step, time.perf_counter() - start))


def main(config: RunConfig) -> None:
    """Prints a line a validation, the share, and one JSON line."""
    data = prepared_text(config)
    drawing = TimedDrawing(validation_images_of(data))
    with GracefulStop(), tempfile.TemporaryDirectory() as folder:  # train.py's Trainer takes the signals over
        began = time.perf_counter()
        train(config, data, Path(folder), STEPS, config.num_validations, first=Callback(), drawing=drawing)
        run_s = time.perf_counter() - began
    seconds = [each for _, each in drawing.calls]
    print(f"{'validation':>10} {'step':>6} {'drawing, s':>11}")
    for number, (step, each) in enumerate(drawing.calls):
        print(f"{number + 1:10} {step:6,} {each:11.3f}")
    default_s = DEFAULT_TIME.total_seconds()
    share = sum(seconds) / default_s
    print(f"in a run of {run_s:.1f} s, {pluralize(torch.get_num_threads(), 'thread')}; "
          f"median {statistics.median(seconds):.3f} s a validation, the first {seconds[0]:.3f} s")  # fmt: skip
    print(f"{len(seconds)} drawings take {sum(seconds):.2f} s, {share:.2%} of a default run of {default_s:.0f} s; "
          f"promised: at most {PROMISED_SHARE:.0%}")  # fmt: skip
    print(json.dumps({"benchmark": "drawing_cost", "machine": machine(),
                      "threads": torch.get_num_threads(), "steps": STEPS,
                      "run_s": round(run_s, 2), "drawing_s": [round(each, 4) for each in seconds],
                      "share_of_default_run": round(share, 5)}))  # fmt: skip


if __name__ == "__main__":
    entry_point(main, "train")
