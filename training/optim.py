"""Optimizers by name, and the learning-rate schedule that all of them follow.

To add an optimizer: one function here, one file in configs/optimizer/ (docs/extending.md). Its name is checked before
torch is imported, which takes seconds; so functions here import what they need themselves.
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
    """What the rest of a run needs to know of an optimizer."""

    build: Build
    learning_rates: tuple[str, ...]
    """Its keys of OptimizerConfig that are learning rates: what to lower when a loss diverges."""
    scaled_by_budget: bool
    """Whether the recipes of training/budget.py scale them: those were measured with this optimizer."""


OPTIMIZERS: dict[str, RegisteredOptimizer] = {}  # by the value of optimizer.name


def optimizer(
    learning_rates: tuple[str, ...] = ("lr", "embedding_lr"), scaled_by_budget: bool = False
) -> Callable[[Build], Build]:
    """Registers a function (network, config) -> torch.optim.Optimizer by its name. The arguments: RegisteredOptimizer.

    The optimizer starts at its peak learning rates; each of its groups has a "name", for the curve `lr/NAME`.
    """

    def register(build: Build) -> Build:
        OPTIMIZERS[build.__name__] = RegisteredOptimizer(build, learning_rates, scaled_by_budget)
        return build

    return register


def build_optimizer(network: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of this config for all weights of a GPT, at its peak learning rates."""
    return OPTIMIZERS[config.name].build(network, config)


@optimizer()
def adamw(network: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) for all weights."""
    return _muon_adamw(network, param_groups(network, config, "adamw"), config)


@optimizer(learning_rates=("lr", "embedding_lr", "muon_lr"), scaled_by_budget=True)
def muon(network: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Muon (training/muon.py) for the matrices inside blocks, AdamW for the rest.

    Embeddings and the output layer stay with AdamW: their rows are tokens, each of which has few updates of its own.
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

    # On CPU the default AdamW is a Python loop over parameters; the fused one is a single kernel.
    fused = all(p.device.type in ("cpu", "cuda", "mps") for p in network.parameters())
    return MuonAdamW(groups, betas=(config.beta1, config.beta2), fused=fused)


def param_groups(network: nn.Module, config: OptimizerConfig, name: str, without: Iterable[Tensor] = ()) -> list[dict]:
    """A GPT's weights as the groups that torch.optim takes: decay only on matrices, a rate of their own for embeddings.

    Args:
        name: of the groups; that of embeddings with a rate of their own is "embeddings".
        without: weights that are in another group.
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


def warmup_stable_decay(progress: float, config: OptimizerConfig, progress_after: float | None = None) -> float:
    """The learning rate as a share of its peak: up over `warmup_fraction`, level, down to 0 over `cooldown_fraction`.

    Args:
        progress: share of the run that is over before the step, 0 to 1.
        progress_after: that after the step. Warm-up counts the step that it is for: so the first one learns, as the
            last one does.
    """
    up = (
        (progress if progress_after is None else progress_after) / config.warmup_fraction
        if config.warmup_fraction
        else 1.0
    )
    down = (1 - progress) / config.cooldown_fraction if config.cooldown_fraction else 1.0
    return max(0.0, min(1.0, up, down))
