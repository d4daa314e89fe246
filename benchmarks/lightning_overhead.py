"""What Lightning costs: a step inside train.py's Trainer, beside a hand-written loop of the same step.

    python -m benchmarks.lightning_overhead [key=value ...]      the keys: configs/train.yaml

For the default run, and for a small network, whose step is so short that what Lightning adds to any step shows.
Both sides train the same network on the same batches with the same optimiser and learning rates; Lightning's has
the default callbacks and logging on. They take turns, a round each, and every round starts from the same weights.
Times are of the steps alone, on the CPU: no validation, no start-up. The last line is JSON.
"""

import gc
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Callback

from benchmarks.default_run import new_network, prepared_text, train, validation_images_of
from benchmarks.machine import machine
from configs.compose import compose
from configs.entry_point import entry_point
from model.kernels.bfloat16 import matmul_precision
from system.text import pluralize
from training.callbacks.graceful_stop import GracefulStop
from training.config import RunConfig
from training.datamodule import TextDataModule
from training.lr_scheduler import warmup_stable_decay
from training.optim import build_optimizer
from training.trainer import resolve_trainer_options

WARMUP_STEPS, ROUNDS = 20, 15


@dataclass(frozen=True)
class Model:
    """What is trained, for how many steps a round, and how much longer Lightning's step may take."""

    name: str
    settings: tuple[str, ...]
    steps: int
    promised: float


SMALL = ("model.num_layers=1", "model.num_heads=2", "model.d_model=64", "data.batch_size=8")
MODELS = (Model("default", (), 75, 1.03), Model("small", SMALL, 300, 1.12))


def by_hand(config: RunConfig, data: TextDataModule, steps: int) -> float:
    """Milliseconds a step of a plain PyTorch loop."""
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
        """Stops."""
        self.step_ms = 1000 * (time.perf_counter() - self.start) / (trainer.global_step - WARMUP_STEPS)


def by_lightning(config: RunConfig, data: TextDataModule, steps: int, run_dir: Path) -> float:
    """Milliseconds a step of the Trainer of train.py."""
    stopwatch = Stopwatch()
    train(
        config,
        data,
        run_dir,
        WARMUP_STEPS + steps,
        num_validations=0,
        first=stopwatch,
        drawing=validation_images_of(data),
    )
    return stopwatch.step_ms


def measure(model: Model, overrides: list[str]) -> dict[str, float]:
    """Prints a line a round and the median ratio."""
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


def main(overrides: list[str]) -> None:
    """Measures both models, and prints one JSON line."""
    compose("train", overrides)  # refuses what cannot be set
    gc.freeze()  # as train.py does after its imports: system/deferred_imports.py
    print(f"on the CPU, {pluralize(torch.get_num_threads(), 'thread')}")
    with GracefulStop():  # train.py's Trainer takes the signals over
        results = {model.name: measure(model, overrides) for model in MODELS}
    print(
        json.dumps(
            {"benchmark": "lightning_overhead", "machine": machine(), "threads": torch.get_num_threads(), **results}
        )
    )


if __name__ == "__main__":
    entry_point(main)
