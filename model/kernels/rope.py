"""Rotary positions in three operators, where the formula on halves of a head takes eight and more in the backward."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (B, T, heads, D) by angles whose cosines and sines are (T, D/2)."""
    return _RoPE.apply(x, *widen(cos.unsqueeze(-2), sin.unsqueeze(-2)))


def widen(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables (..., D/2) for `rotate`, (..., D): each half has the same angles, and the sine's first is negative."""
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., D) by widened tables: x cos + x' sin, x' being x with its halves exchanged."""
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, dims=-1), sin)


class _RoPE(torch.autograd.Function):
    """The gradient of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, -sin), None, None
