"""The dial: from the time a run may take and this machine's measured speed to the shape of the model.

    budget=5m  ->  seconds left to train x FLOP/s  ->  a row of RECIPES  ->  keys of the config

What is given on the command line stays as it is given.
"""

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from configs.errors import UserError
from configs.run_directory import given_keys
from data.config import vocab_size_for
from data.corpus import find_files
from model.config import GPTConfig, OptimizerConfig
from model.cost import matrix_weights, step_flops
from model.gpt import GPT
from model.optimizer import build_optimizer
from model.trainer import is_bounded, parse_duration

DEFAULT_TIME = timedelta(seconds=90)
END_S = 2.0  # after the last validation: saving, a sample, the end of the process


@dataclass(frozen=True)
class Recipe:
    """The best found for so much training. docs/EXPERIMENTS.md has the measurements."""

    teraflops: float
    """Training operations from which on it is the best."""
    num_layers: int
    d_model: int
    vocab_size: int
    dropout: float = 0.0


RECIPES = (
    Recipe(0.0, num_layers=2, d_model=128, vocab_size=2048),
    Recipe(20.0, num_layers=3, d_model=192, vocab_size=4096, dropout=0.1),
)
HEAD_DIM = 32
# The step whose speed is measured; near to what RECIPES hold, so that its FLOP/s are theirs.
REFERENCE = GPTConfig(vocab_size=2048, positions="rope", norm="rmsnorm", norm_affine=False, mlp="relu2", bias=False)
REFERENCE_BATCH, REFERENCE_STEPS = 24, 8


def time_allowed(config: DictConfig) -> timedelta | None:
    """How long the whole command may take. None: something else ends the run.

    Raises UserError for a budget beside another bound, and for one that is no time.
    """
    bounded = is_bounded(config.trainer)
    if config.budget == "auto":
        return None if bounded else DEFAULT_TIME
    if bounded:
        raise UserError(
            f"budget={config.budget} and a bound of the trainer (max_time, max_steps or max_epochs) are both given. "
            "Leave one out."
        )
    return parse_duration(config.budget, "budget")


def measured_speed(device: torch.device) -> float:
    """FLOP/s of a few training steps of a small model, the optimiser's time included."""
    generator_state = torch.random.get_rng_state()
    network = GPT(REFERENCE).to(device)
    optimizer = build_optimizer(network, OptimizerConfig())
    T = REFERENCE.context_length
    ids = torch.randint(REFERENCE.vocab_size, (REFERENCE_BATCH, T), device=device)

    def steps(number: int) -> float:
        start = time.perf_counter()
        for _ in range(number):
            network.loss(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        next(network.parameters()).sum().item()  # waits for the device
        return (time.perf_counter() - start) / number

    steps(2)
    seconds = min(steps(REFERENCE_STEPS // 2), steps(REFERENCE_STEPS // 2))
    torch.random.set_rng_state(generator_state)
    return REFERENCE_BATCH * step_flops(REFERENCE, T, "fused") / seconds


def recipe_for(teraflops: float) -> Recipe:
    """The row of RECIPES for so much training."""
    return [recipe for recipe in RECIPES if recipe.teraflops <= max(0.0, teraflops)][-1]


def with_recipe(config: DictConfig, seconds: float, flops_per_second: float) -> tuple[DictConfig, str]:
    """The config with the recipe for so much training, and a line that says what was picked and why.

    Args:
        seconds: for training, about.
        flops_per_second: of `measured_speed`.
    """
    recipe = recipe_for(seconds * flops_per_second / 1e12)
    train_bytes = (1 - config.data.val_fraction) * sum(file.stat().st_size for file in find_files(config.data.corpus))
    picked: dict[str, Any] = {
        "model.num_layers": recipe.num_layers,
        "model.d_model": recipe.d_model,
        "model.num_heads": recipe.d_model // HEAD_DIM,
        "model.dropout": recipe.dropout,
        "tokenizer.vocab_size": min(recipe.vocab_size, 2 * vocab_size_for(int(train_bytes))),
    }
    given = given_keys()
    if "model.d_model" in given:  # heads that divide the picked width may not divide the given one
        given.add("model.num_heads")
    picked = {key: value for key, value in picked.items() if key not in given}
    config = OmegaConf.create(config)
    for key, value in picked.items():
        OmegaConf.update(config, key, value)
    return config, (
        f"budget: about {max(0.0, seconds):.0f} s to train at {flops_per_second / 1e9:.0f} GFLOP/s, measured; picked "
        + " ".join(f"{key}={value}" for key, value in picked.items())
    )


def time_to_train(left: float, network: GPT, val_tokens: int, flops_per_second: float) -> timedelta:
    """What of the seconds left remains for training, when the last validation and the end are taken off.

    Raises UserError if that is nothing.
    """
    validation = 2 * matrix_weights(network.config) * val_tokens / flops_per_second
    seconds = left - validation - END_S
    if seconds < 1:
        raise UserError(
            f"The budget leaves {seconds:.0f} s to train: starting, validating and ending take the rest. "
            "Give a longer budget, or trainer.max_steps=100."
        )
    return timedelta(seconds=seconds)
