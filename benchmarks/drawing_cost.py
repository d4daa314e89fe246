"""Cost of drawing: the time of ValidationImages as a share of a default run.

    python -m benchmarks.drawing_cost [key=value ...]

Trains STEPS steps in train.py's Trainer on the CPU, with as many validations as a default run, and times each call of
ValidationImages: attention maps, head scores, ablations, the logit lens, a generated sample, and writing them to
TensorBoard's file and to the recording for the report. The time of a call does not depend on the number of steps
between validations. The first call includes imports, as in every run. The
share is relative to DEFAULT_TIME, the time of a default run from start to exit. The last line is JSON.
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
PROMISED_SHARE = 0.02


class TimedDrawing(Callback):
    """Times ValidationImages."""

    def __init__(self, snapshots: ValidationImages):
        self.snapshots = snapshots
        self.calls: list[tuple[int, float]] = []
        """Training step and seconds of each call."""

    def on_validation_end(self, trainer, module) -> None:
        """Draws and waits until TensorBoard's thread has written everything."""
        writer = trainer.logger.experiment
        writer.flush()  # exclude what others have written
        start = time.perf_counter()
        self.snapshots.on_validation_end(trainer, module)
        writer.flush()
        self.calls.append((trainer.global_step, time.perf_counter() - start))


def main(config: RunConfig) -> None:
    """Prints one line per validation, the share, and one JSON line."""
    data = prepared_text(config)
    drawing = TimedDrawing(validation_images_of(config, data))
    with GracefulStop(), tempfile.TemporaryDirectory() as folder:  # handles signals like train.py
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
