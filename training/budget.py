"""The time budget of a run: from the time and the measured speed of this machine to the size of the network.

    budget=5m  ->  seconds left to train x FLOP/s  ->  a row of RECIPES  ->  keys of the config

Keys that the user sets, on the command line or in a file chosen there, keep their values.
"""

import math
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from data.corpus import find_files
from data.tokenizers import TOKENIZERS
from data.tokenizers.bpe import vocab_size_for
from model.config import GPTConfig
from model.flops import matmul_parameters, train_step_flops
from model.gpt import GPT
from model.kernels.bfloat16 import matmul_precision
from system.errors import UserError
from training.budget_timer import FULL_VALIDATION_SHARE, SHUTDOWN_SECONDS
from training.config import OptimizerConfig, RunConfig
from training.optim import OPTIMIZERS, build_optimizer
from training.trainer import parse_duration, stop_conditions

DEFAULT_TIME = timedelta(seconds=90)


@dataclass(frozen=True)
class Recipe:
    """What to train with a given amount of compute; docs/EXPERIMENTS.md has the measurements."""

    min_tflop: float
    """Least seconds of training x `measured_speed` / 10^12 for this recipe."""
    num_layers: int
    d_model: int
    vocab_size: int
    bigram_dropout: float
    dropout: float = 0.0
    learning_rates: float = 1.0
    """Factor on the learning rates of an optimizer that is `scaled_by_budget`: fewer steps need larger ones."""


RECIPES = (
    Recipe(0.0, num_layers=2, d_model=128, vocab_size=1024, bigram_dropout=0.2, learning_rates=3.0),
    Recipe(1.9, num_layers=2, d_model=128, vocab_size=1024, bigram_dropout=0.2, learning_rates=2.0),
    Recipe(3.0, num_layers=2, d_model=128, vocab_size=2048, bigram_dropout=0.2, learning_rates=1.5),
    Recipe(7.0, num_layers=2, d_model=128, vocab_size=2048, bigram_dropout=0.2),
    Recipe(14.0, num_layers=2, d_model=128, vocab_size=2048, bigram_dropout=0.3),
    Recipe(22.0, num_layers=2, d_model=192, vocab_size=2048, bigram_dropout=0.4),
    Recipe(50.0, num_layers=2, d_model=192, vocab_size=2048, bigram_dropout=0.5),
    Recipe(90.0, num_layers=3, d_model=192, vocab_size=2048, bigram_dropout=0.6),
)
HEAD_DIM = 32
SECONDS_PER_VALIDATION = 5.0  # least training time between two; with its pictures, one takes half a second
# The network whose training speed is measured: simpler, and of the size of most RECIPES.
REFERENCE = GPTConfig(vocab_size=2048, positions="rope", norm="rmsnorm", norm_affine=False, mlp="relu2", bias=False)
REFERENCE_BATCH, REFERENCE_STEPS = 24, 8


def total_budget(config: RunConfig) -> timedelta | None:
    """Time for the whole command. None: the run ends after a number of steps or epochs, or by trainer.max_time.

    Raises UserError for a budget together with one of these, and for a budget that is not a time.
    """
    bounded = stop_conditions(config.trainer)
    if config.budget == "auto":
        return None if bounded else DEFAULT_TIME
    budget = parse_duration(config.budget, "budget")
    if bounded:
        given = " and ".join(f"trainer.{name}={config.trainer[name]}" for name in bounded)
        unset = " ".join(f"trainer.{name}={default}" for name, default in bounded.items())
        raise UserError(
            f"budget={config.budget} and {given} would both end the run. Use one of them; if a recipe sets the latter, "
            f"unset it with {unset}."
        )
    return budget


@cache  # once per process, so that all runs of a sweep get the same recipe
def measured_speed(device: torch.device, precision: str) -> float:
    """FLOP/s of a few training steps of a small network at this `trainer.precision`, including the optimizer.

    On a GPU this is too low, since the steps are in float32 and not compiled; a smaller recipe is the result.
    """
    T = REFERENCE.context_length
    with torch.random.fork_rng(devices=[]):  # keeps the random state
        network = GPT(REFERENCE).to(device)
        ids = torch.randint(REFERENCE.vocab_size, (REFERENCE_BATCH, T)).to(device)
    optimizer = build_optimizer(network, OptimizerConfig())

    def steps(number: int) -> float:
        start = time.perf_counter()
        for _ in range(number):
            with matmul_precision(precision):
                loss = network.loss(ids, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        next(network.parameters()).sum().item()  # waits for the device
        return (time.perf_counter() - start) / number

    steps(2)
    seconds = min(steps(REFERENCE_STEPS // 2), steps(REFERENCE_STEPS // 2))
    return REFERENCE_BATCH * train_step_flops(REFERENCE, T, "sdpa") / seconds


def recipe_for(min_tflop: float) -> Recipe:
    """The row of RECIPES for this amount of compute."""
    return [recipe for recipe in RECIPES if recipe.min_tflop <= max(0.0, min_tflop)][-1]


_first_run_seconds: dict[timedelta, float] = {}


def apply_recipe(config: RunConfig, budget: timedelta, spent: float, flops_per_second: float) -> tuple[RunConfig, str]:
    """Returns the config with the recipe for the rest of the budget, and a line that explains the choice.

    Args:
        spent: seconds of the budget that are used up.
        flops_per_second: result of `measured_speed`.
    """
    # In a sweep only the first run spends time on imports. Its time counts for all runs, so that they can be compared.
    seconds = _first_run_seconds.setdefault(budget, max(0.0, budget.total_seconds() - spent))
    recipe = recipe_for(seconds * flops_per_second / 1e12)
    picked: dict[str, Any] = {
        "model.num_layers": recipe.num_layers,
        "model.d_model": recipe.d_model,
        "model.num_heads": recipe.d_model // HEAD_DIM,
        "model.dropout": recipe.dropout,
    }
    if config.model.bigram_table_size:
        picked["model.bigram_dropout"] = recipe.bigram_dropout
    if TOKENIZERS[config.tokenizer.kind].learned:
        text_bytes = sum(file.stat().st_size for file in find_files(config.data.corpus))
        default = vocab_size_for(int((1 - config.data.val_fraction) * text_bytes))
        picked["tokenizer.vocab_size"] = min(recipe.vocab_size, 2 * default)  # the default is for runs of a minute
    optimizer = OPTIMIZERS[config.optimizer.name]
    rates = [f"optimizer.{key}" for key in optimizer.learning_rates if optimizer.scaled_by_budget]
    if recipe.learning_rates != 1:
        defaults = {key: config.get(key) for key in rates}  # those that the user sets are kept, see below
        picked |= {key: float(f"{recipe.learning_rates * rate:.6g}") for key, rate in defaults.items() if rate}
    if seconds < SECONDS_PER_VALIDATION * config.num_validations:
        picked["num_validations"] = max(1, int(seconds / SECONDS_PER_VALIDATION))
    picked = {key: value for key, value in picked.items() if key not in config.explicit_keys}
    if "model.d_model" in config.explicit_keys or not is_valid(config, picked):
        for key in ("model.d_model", "model.num_heads"):  # their defaults fit each other and the rest
            picked.pop(key, None)
    shape = config.replace_values(picked).model
    if (shape.num_layers, shape.d_model) != (recipe.num_layers, recipe.d_model):
        for key in rates:  # they were measured with the network of the recipe
            picked.pop(key, None)
    return config.replace_values(picked), (
        f"budget: about {seconds:.0f} s to train at {flops_per_second / 1e9:.0f} GFLOP/s, measured; picked "
        + (" ".join(f"{key}={value}" for key, value in picked.items()) or "nothing, because all is set")
    )


def is_valid(config: RunConfig, values: dict[str, Any]) -> bool:
    """Whether the config accepts these values, for example because the heads divide the width."""
    try:
        return bool(config.replace_values(values))
    except UserError:
        return False


def full_validation_seconds(network: GPT, val_tokens: int, flops_per_second: float) -> float:
    """Expected seconds to validate the whole split."""
    return 2 * matmul_parameters(network.config) * val_tokens / flops_per_second


def training_time(budget: timedelta, spent: float, processor_s: float, whole_seconds: float) -> timedelta:
    """The part of the budget that is left for training, after the start and before the last validation and the exit.

    On a busy machine it can be zero or negative; then the run trains for a few steps.

    Args:
        spent: seconds of the budget that are used up.
        processor_s: processor time that this process has used, which is how long the start takes on an idle machine.
        whole_seconds: result of `full_validation_seconds`.

    Raises:
        UserError: the budget is too short even for an idle machine.
    """
    total = budget.total_seconds()
    idle = min(spent, processor_s)
    end = SHUTDOWN_SECONDS + min(
        whole_seconds, FULL_VALIDATION_SHARE * (SHUTDOWN_SECONDS + 1) / (1 - FULL_VALIDATION_SHARE)
    )  # with one second left to train
    if total - idle < end + 1:
        raise UserError(
            f"A budget of {total:g} s leaves no time to train: starting takes {idle:.0f} s of processor time, "
            f"validation and exit about {end:.0f} s. Use at least budget={math.ceil(idle + end + 2)}s, or "
            "trainer.max_steps=100 instead."
        )
    left = total - spent
    return timedelta(seconds=left - SHUTDOWN_SECONDS - min(whole_seconds, FULL_VALIDATION_SHARE * max(0.0, left)))
