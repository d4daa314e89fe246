"""Rotary position embeddings in three operators. The formula with two halves takes eight, and more in its backward."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (B, T, heads, D), with cos and sin (T, D/2)."""
    return _RoPE.apply(x, *expand_rope_tables(cos.unsqueeze(-2), sin.unsqueeze(-2)))


def expand_rope_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the tables for `rotate`: (..., D/2) -> (..., D), [cos, cos] and [-sin, sin]."""
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + x' sin, where x' is x (..., D) with its halves swapped. cos and sin are from `expand_rope_tables`."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, dims=-1), sin)


class _RoPE(torch.autograd.Function):
    """The gradient of a rotation is the inverse rotation."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, -sin), None, None
