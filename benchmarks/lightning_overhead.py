"""Overhead of Lightning: the time of a step in train.py's Trainer, relative to the same step in a plain PyTorch loop.

    python -m benchmarks.lightning_overhead [key=value ...]      the keys: configs/train.yaml
    python -m benchmarks.lightning_overhead shortcuts=true       what each entry of SHORTCUTS saves

For the default run, and for a small network with a short step, where the overhead is a larger part. Both sides train
the same network on the same batches with the same optimizer and learning rates; Lightning has its default callbacks
and logging. They alternate, one round each, and every round starts from the same weights. Times exclude validation
and startup, and are on the CPU. The last line is JSON.

`shortcuts=true` switches off one shortcut of training/lightning_overhead.py at a time. Rounds of the default run with
and without it alternate; the figures are medians over all pairs of neighboring rounds.
"""

import gc
import json
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Callback

from benchmarks.default_run import new_network, prepared_text, train, validation_images_of
from configs.compose import compose
from configs.entry_point import entry_point
from model.kernels.bfloat16 import matmul_precision
from system.machine import machine
from system.text import pluralize
from training.callbacks.graceful_stop import GracefulStop
from training.config import RunConfig
from training.datamodule import TextDataModule
from training.lightning_overhead import SHORTCUTS, without
from training.lr_scheduler import warmup_stable_decay
from training.optim import build_optimizer
from training.trainer import resolve_trainer_options

WARMUP_STEPS, ROUNDS = 20, 15


@dataclass(frozen=True)
class Model:
    """A network, the steps per round, and the largest promised ratio of step times."""

    name: str
    settings: tuple[str, ...]
    steps: int
    promised: float


SMALL = ("model.num_layers=1", "model.num_heads=2", "model.d_model=64", "data.batch_size=8")
MODELS = (Model("default", (), 75, 1.03), Model("small", SMALL, 300, 1.12))


def by_hand(config: RunConfig, data: TextDataModule, steps: int) -> float:
    """Milliseconds per step of a plain PyTorch loop."""
    network, schedule = new_network(config, data), config.optimizer
    optimizer = build_optimizer(network, schedule)
    peaks = [group["lr"] for group in optimizer.param_groups]
    batches = data.train_dataloader()
    precision = resolve_trainer_options(config.trainer | {"accelerator": "cpu"})["precision"]
    for step in range(WARMUP_STEPS + steps):
        if step == WARMUP_STEPS:
            start = time.perf_counter()
        factor = warmup_stable_decay(step / (WARMUP_STEPS + steps), schedule)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        batch = batches.batch(step)  # (B, T + 1)
        with matmul_precision(precision):
            loss = network.loss(batch[:, :-1], batch[:, 1:])
        loss.backward()
        if config.trainer.get("gradient_clip_val"):
            torch.nn.utils.clip_grad_norm_(network.parameters(), config.trainer["gradient_clip_val"])
        optimizer.step()
        optimizer.zero_grad()
    return 1000 * (time.perf_counter() - start) / steps


class Stopwatch(Callback):
    """Times the steps after the warm-up, with all that Lightning and the other callbacks do between them."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx: int) -> None:
        """Starts at the first step after the warm-up."""
        if trainer.global_step == WARMUP_STEPS:
            self.start = time.perf_counter()

    def on_train_end(self, trainer, module) -> None:
        """Stops at the end of training."""
        self.step_ms = 1000 * (time.perf_counter() - self.start) / (trainer.global_step - WARMUP_STEPS)


def by_lightning(config: RunConfig, data: TextDataModule, steps: int, run_dir: Path) -> float:
    """Milliseconds per step of train.py's Trainer."""
    stopwatch = Stopwatch()
    train(
        config,
        data,
        run_dir,
        WARMUP_STEPS + steps,
        num_validations=0,
        first=stopwatch,
        drawing=validation_images_of(config, data),
    )
    return stopwatch.step_ms


def measure(model: Model, overrides: list[str]) -> dict[str, float]:
    """Prints one line per round, and the median ratio."""
    config = compose("train", [*model.settings, *overrides])
    data, rounds = prepared_text(config), []
    print(f"{model.name:>8} {'by hand, ms':>12} {'Lightning, ms':>14} {'ratio':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            hand = by_hand(config, data, model.steps)
            lightning = by_lightning(config, data, model.steps, Path(folder) / str(number))
            rounds.append((hand, lightning))
            print(f"{number + 1:8} {hand:12.2f} {lightning:14.2f} {lightning / hand:7.3f}", flush=True)
    ratio = statistics.median(lightning / hand for hand, lightning in rounds)
    print(
        f"Lightning's step takes {ratio:.3f} times the hand-written one's (median of {ROUNDS} rounds of {model.steps} "
        f"steps); promised: at most {model.promised}\n"
    )
    hand_ms, lightning_ms = (statistics.median(side) for side in zip(*rounds, strict=True))
    return {"hand_ms": round(hand_ms, 3), "lightning_ms": round(lightning_ms, 3), "ratio": round(ratio, 4)}


def measure_shortcuts(overrides: list[str]) -> dict[str, dict[str, float]]:
    """Prints what each shortcut saves per default step, one line each."""
    model, config = MODELS[0], compose("train", overrides)
    data, results = prepared_text(config), {}
    print(f"{'without':28} {'step, ms':>9} {'saves, us':>10} {'without/with':>13}")
    with tempfile.TemporaryDirectory() as folder:
        for name in SHORTCUTS:
            pairs = []
            for number in range(ROUNDS):
                ms = [0.0, 0.0]
                for side in (number % 2, 1 - number % 2):  # each side is first in half of the pairs
                    with without(name) if side else nullcontext():
                        ms[side] = by_lightning(config, data, model.steps, Path(folder) / f"{name}-{number}-{side}")
                pairs.append(ms)
            step_ms = statistics.median(with_ for with_, _ in pairs)
            saved_us = 1000 * statistics.median(without_ - with_ for with_, without_ in pairs)
            ratio = statistics.median(without_ / with_ for with_, without_ in pairs)
            results[name] = {"step_ms": round(step_ms, 3), "saves_us": round(saved_us, 1), "ratio": round(ratio, 4)}
            print(f"{name:28} {step_ms:9.2f} {saved_us:10.0f} {ratio:13.4f}", flush=True)
    return results


def main(arguments: list[str]) -> None:
    """Measures both models, or all shortcuts, and prints one JSON line."""
    overrides = [argument for argument in arguments if argument not in ("shortcuts=true", "shortcuts=false")]
    compose("train", overrides)  # raises for invalid settings
    gc.freeze()  # as train.py does after its imports: system/deferred_imports.py
    print(f"on {machine()}\n{pluralize(torch.get_num_threads(), 'thread')}")
    with GracefulStop():  # handles signals like train.py
        if "shortcuts=true" in arguments:
            results = {"shortcuts": measure_shortcuts(overrides)}
        else:
            results = {model.name: measure(model, overrides) for model in MODELS}
    print(
        json.dumps(
            {"benchmark": "lightning_overhead", "machine": machine(), "threads": torch.get_num_threads(), **results}
        )
    )


if __name__ == "__main__":
    entry_point(main)
