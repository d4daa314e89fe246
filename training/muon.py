"""Muon for matrices and AdamW for the rest, as one torch.optim.Optimizer."""

from collections import defaultdict
from contextlib import nullcontext

import torch
from torch import Tensor

from model.kernels.onednn import use_onednn_for_matmul


class MuonAdamW(torch.optim.AdamW):
    """AdamW for groups with `muon=False`, Muon for groups with `muon=True`.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces the momentum of a matrix with the nearest
    orthogonal matrix, so that all directions are learned at the same speed. Updates of tall matrices are scaled by
    (rows / columns)^0.5.
    """

    def __init__(self, groups: list[dict], **options):
        super().__init__([{"muon": False, **group} for group in groups], **options)
        # Fused AdamW unscales gradients itself; Muon does not, so the gradient scaler has to.
        self._step_supports_amp_scaling = False

    def __setstate__(self, state: dict) -> None:
        """Restores a state. AdamW's version expects a step count for every weight, which Muon does not keep."""
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure=None):
        """Updates every parameter that has a gradient. Returns what the closure returns."""
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
        updates = torch._foreach_lerp(grads, averages, group["momentum"])  # Nesterov momentum

        by_shape = defaultdict(list)
        for p, update in zip(params, updates, strict=True):
            by_shape[p.shape].append((p, update))
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        # Not on a GPU, where it could switch on TF32.
        with use_onednn_for_matmul() if params[0].device.type == "cpu" else nullcontext():
            orthogonal = newton_schulz([torch.stack([update for _, update in pairs]) for pairs in by_shape.values()])
        for ((rows, columns), pairs), directions in zip(by_shape.items(), orthogonal, strict=True):
            size = group["lr"] * max(1, rows / columns) ** 0.5
            torch._foreach_add_([p for p, _ in pairs], list(directions.unbind()), alpha=-size)


# Coefficients of the quintic a x + b x^3 + c x^5 (Jordan et al. 2024), and how often it is applied: three times
# instead of the usual five costs no quality here and saves a tenth of a step (docs/EXPERIMENTS.md).
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 3


def newton_schulz(stacks: list[Tensor]) -> list[Tensor]:
    """Newton-Schulz iteration: orthogonalizes matrices, by moving their singular values close to 1.

    One step is X <- (a I + b G + c G^2) X with G = X X^T, where X has no more rows than columns. The factors of all
    steps are polynomials in the first G, so they are multiplied with each other first and with X once, at the end.

    Args:
        stacks: matrices (n, rows, columns), of any shapes and one floating-point type; computed in float32, or in
            float64 if that is their type.

    Returns:
        Matrices of the same shapes with singular values between about 0.68 and 1.21, except for those that were
        below a thirtieth of the matrix's norm.
    """
    wide = [_wide(stack) for stack in stacks]  # (n, small, large) each
    orthogonal = {}
    for small in {x.size(1) for x in wide}:  # one batched product for all matrices of this size
        indices = [i for i, x in enumerate(wide) if x.size(1) == small]
        grams = torch.cat([wide[i] @ wide[i].mT for i in indices])  # (all n, small, small)
        factors = _factors(grams).split([len(wide[i]) for i in indices])
        orthogonal |= {i: factor @ wide[i] for i, factor in zip(indices, factors, strict=True)}
    tall = [stack.size(1) > stack.size(2) for stack in stacks]
    return [(orthogonal[i].mT if tall[i] else orthogonal[i]).to(stack.dtype) for i, stack in enumerate(stacks)]


def _wide(stack: Tensor) -> Tensor:
    """Transposes tall matrices and scales all singular values to at most 1: (n, rows, columns) -> (n, small, large)."""
    x = stack if stack.dtype == torch.float64 else stack.float()
    x = x.mT if x.size(1) > x.size(2) else x
    return x / (x.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-7)


def _factors(gram: Tensor) -> Tensor:
    """The product of the factors of all steps, from G = X X^T: (n, small, small)."""
    a, b, c = NS_COEFFICIENTS
    product = None
    for step in range(1, NS_STEPS + 1):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b G + c G^2
        factor.diagonal(dim1=1, dim2=2).add_(a)
        product = factor if product is None else factor @ product
        if step < NS_STEPS:
            gram = factor @ gram @ factor  # G of the X after this step
    return product
