"""Optimizers by name. Their learning rates follow training/lr_scheduler.py.

To add an optimizer, write one function here and one file in configs/optimizer/ (docs/extending.md). This module does
not import torch, which takes seconds, so that a wrong name is answered at once; its functions import what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from training.config import OptimizerConfig

Build = Callable[["nn.Module", "OptimizerConfig"], "torch.optim.Optimizer"]


@dataclass(frozen=True)
class RegisteredOptimizer:
    """An optimizer as the rest of a run sees it."""

    build: Build
    learning_rates: tuple[str, ...]
    """Which fields of OptimizerConfig are its learning rates; the error for a diverging loss names them."""
    scaled_by_budget: bool
    """Whether the recipes of training/budget.py, which were measured with Muon, scale its learning rates."""


OPTIMIZERS: dict[str, RegisteredOptimizer] = {}  # by the value of optimizer.name


def optimizer(
    learning_rates: tuple[str, ...] = ("lr", "embedding_lr"), scaled_by_budget: bool = False
) -> Callable[[Build], Build]:
    """Decorator: registers a function (network, config) -> torch.optim.Optimizer under its name.

    The function sets peak learning rates, and gives each parameter group a "name" for its learning-rate curve. For the
    arguments see RegisteredOptimizer.
    """

    def register(build: Build) -> Build:
        OPTIMIZERS[build.__name__] = RegisteredOptimizer(build, learning_rates, scaled_by_budget)
        return build

    return register


def build_optimizer(network: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Builds the optimizer of this config for all weights of a GPT, at its peak learning rates."""
    return OPTIMIZERS[config.name].build(network, config)


@optimizer()
def adamw(network: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) for all weights."""
    return _muon_adamw(network, param_groups(network, config, "adamw"), config)


@optimizer(learning_rates=("lr", "embedding_lr", "muon_lr"), scaled_by_budget=True)
def muon(network: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Muon (training/muon.py) for the matrices inside blocks, AdamW for the rest.

    AdamW also updates the embeddings and the output layer: their rows belong to tokens, most of which are rare.
    """
    matrices = [p for p in network.blocks.parameters() if p.ndim == 2]
    group = {
        "params": matrices,
        "lr": config.muon_lr,
        "momentum": config.muon_momentum,
        "weight_decay": config.weight_decay,
        "muon": True,
        "name": "muon",
    }
    return _muon_adamw(network, [*param_groups(network, config, "adamw", without=matrices), group], config)


def _muon_adamw(network: nn.Module, groups: list[dict], config: OptimizerConfig) -> torch.optim.Optimizer:
    from training.muon import MuonAdamW

    # On a CPU, the default AdamW is a Python loop over the parameters; the fused one is a single kernel.
    fused = all(p.device.type in ("cpu", "cuda", "mps") for p in network.parameters())
    return MuonAdamW(groups, betas=(config.beta1, config.beta2), fused=fused)


def param_groups(network: nn.Module, config: OptimizerConfig, name: str, without: Iterable[Tensor] = ()) -> list[dict]:
    """Parameter groups of a GPT: weight decay on matrices only, and a separate learning rate for embeddings.

    Args:
        name: name of the groups, except for "embeddings", which exists if `config.embedding_lr` is set.
        without: weights to leave out, because another group has them.
    """
    tables = [network.token_embedding, network.bigram_embedding] if config.embedding_lr is not None else []
    embeddings = {table.weight for table in tables if table is not None} - {network.lm_head.weight}
    without = set(without)
    params = [p for p in network.parameters() if p not in without]
    matrices = [p for p in params if p.ndim >= 2 and p not in embeddings]
    vectors = [p for p in params if p.ndim < 2]
    embeddings = [p for p in params if p in embeddings]
    groups = [
        {"params": embeddings, "lr": config.embedding_lr, "weight_decay": config.weight_decay, "name": "embeddings"},
        {"params": matrices, "lr": config.lr, "weight_decay": config.weight_decay, "name": name},
        {"params": vectors, "lr": config.lr, "weight_decay": 0.0, "name": name},
    ]
    return [group for group in groups if group["params"]]
