"""The optimisers, each one torch.optim.Optimizer, and the learning-rate schedule."""

from collections import defaultdict
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from model.config import OptimizerConfig
from model.kernels.onednn import prefer_onednn


def lr_factor(progress: float, config: OptimizerConfig, progress_after: float | None = None) -> float:
    """The learning rate as a share of its peak: up over `warmup`, level, down to 0 over `cooldown`.

    Args:
        progress: share of the run that is over before the step, 0 to 1.
        progress_after: that after the step. Warm-up counts the step that it is for: so the first one learns, as the
            last one does.
    """
    up = (progress if progress_after is None else progress_after) / config.warmup if config.warmup else 1.0
    down = (1 - progress) / config.cooldown if config.cooldown else 1.0
    return max(0.0, min(1.0, up, down))


def build_optimizer(network: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """One optimiser for all weights of a GPT; decay only on matrices.

    Muon takes the matrices inside `network.blocks`. Embeddings and the output layer stay with AdamW:
    their rows are tokens, each of which has few updates of its own.
    """
    tables = [network.token_embedding, network.bigram_embedding] if config.embedding_lr is not None else []
    embeddings = {table.weight for table in tables if table is not None} - {network.lm_head.weight}
    block_matrices = {p for p in network.blocks.parameters() if p.ndim == 2} if config.name == "muon" else set()
    rest = [p for p in network.parameters() if p not in block_matrices]
    matrices = [p for p in rest if p.ndim >= 2 and p not in embeddings]
    vectors = [p for p in rest if p.ndim < 2]
    decay, adamw = {"weight_decay": config.weight_decay}, {"lr": config.lr, "muon": False, "name": "adamw"}
    groups = [
        {
            "params": [p for p in rest if p in embeddings],
            **decay,
            **adamw,
            "lr": config.embedding_lr,
            "name": "embeddings",
        },
        {"params": matrices, **decay, **adamw},
        {"params": vectors, "weight_decay": 0.0, **adamw},
        {
            "params": [p for p in network.parameters() if p in block_matrices],
            **decay,
            "lr": config.muon_lr,
            "momentum": config.muon_momentum,
            "muon": True,
            "name": "muon",
        },
    ]
    groups = [group for group in groups if group["params"]]
    # On CPU the default AdamW is a Python loop over parameters; the fused one is a single kernel.
    fused = all(p.device.type in ("cpu", "cuda", "mps") for p in network.parameters())
    return MuonAdamW(groups, betas=(config.beta1, config.beta2), fused=fused)


class MuonAdamW(torch.optim.AdamW):
    """AdamW for groups with `muon=False`, Muon for groups with `muon=True`.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the
    nearest orthogonal matrix, so that every direction learns at one speed. An update is larger for tall
    matrices, by (rows / columns)^0.5.
    """

    def __init__(self, groups: list[dict], **options):
        super().__init__(groups, **options)
        # Fused AdamW divides out a gradient scaler's factor itself; Muon does not, so the scaler has to.
        self._step_supports_amp_scaling = False

    def __setstate__(self, state: dict) -> None:
        """Takes a saved state. AdamW's own version wants a step count in every state; Muon's have none."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient. Returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group["muon"]]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group["muon"]:
                self._muon_step(group)
        return loss

    def _muon_step(self, group: dict) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        grads, averages = [p.grad for p in params], [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(averages, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, averages, group["momentum"])  # Nesterov: look one step ahead

        by_shape = defaultdict(list)
        for p, update in zip(params, updates, strict=True):
            by_shape[p.shape].append((p, update))
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        # A GPU it would let use TF32, but only beside a CPU that it is for.
        with prefer_onednn() if params[0].device.type == "cpu" else nullcontext():
            orthogonal = orthogonalise([torch.stack([update for _, update in pairs]) for pairs in by_shape.values()])
        for ((rows, columns), pairs), directions in zip(by_shape.items(), orthogonal, strict=True):
            size = group["lr"] * max(1, rows / columns) ** 0.5
            torch._foreach_add_([p for p, _ in pairs], list(directions.unbind()), alpha=-size)


# Coefficients of the odd quintic a x + b x^3 + c x^5 (Jordan et al. 2024, as above), and how often it is applied:
# three rounds instead of the usual five cost no quality here and save a tenth of a step, see docs/EXPERIMENTS.md.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ROUNDS = 3


def orthogonalise(stacks: list[Tensor]) -> list[Tensor]:
    """Moves the singular values of each matrix close to 1, by a matrix polynomial applied three times.

    A round is X <- (a I + b G + c G^2) X with G = X X^T, X lying wide. All rounds' factors are polynomials of the
    first G, so they are multiplied up at its size and meet X once, at the end.

    Args:
        stacks: (n, rows, columns) each, of any shapes and one floating type; float32 or float64 inside.

    Returns:
        The same shapes, singular values between about 0.68 and 1.21, unless they started tiny: below a thirtieth of
        the matrix's norm.
    """
    wide = [_wide(stack) for stack in stacks]  # (n, small, large) each
    found = {}
    for small in {x.size(1) for x in wide}:  # factors of one size are made in one go
        places = [i for i, x in enumerate(wide) if x.size(1) == small]
        grams = torch.cat([wide[i] @ wide[i].mT for i in places])  # (all n, small, small)
        factors = _factors(grams).split([len(wide[i]) for i in places])
        found |= {i: factor @ wide[i] for i, factor in zip(places, factors, strict=True)}
    tall = [stack.size(1) > stack.size(2) for stack in stacks]
    return [(found[i].mT if tall[i] else found[i]).to(stack.dtype) for i, stack in enumerate(stacks)]


def _wide(stack: Tensor) -> Tensor:
    """Tall matrices laid on their side, all singular values at most 1: (n, rows, columns) -> (n, small, large)."""
    x = stack if stack.dtype == torch.float64 else stack.float()
    x = x.mT if x.size(1) > x.size(2) else x
    return x / (x.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-7)


def _factors(gram: Tensor) -> Tensor:
    """What all rounds together multiply X by, from X X^T: (n, small, small) each."""
    a, b, c = _QUINTIC
    product = None
    for rounds in range(1, _ROUNDS + 1):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b G + c G^2
        factor.diagonal(dim1=1, dim2=2).add_(a)
        product = factor if product is None else factor @ product
        if rounds < _ROUNDS:
            gram = factor @ gram @ factor  # of what X is by now
    return product
