"""RMSNorm with a derivative in a few operators: PyTorch's own takes each step of the formula back on its own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        y = rms_norm(x, self.eps)
        return y if self.weight is None else y * self.weight


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension: F.rms_norm, with its backward pass twice as fast on a CPU."""
    in_full = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    if not in_full or torch.compiler.is_compiling():
        return F.rms_norm(x, x.shape[-1:], eps=eps)
    return _RMSNorm.apply(x, eps) if torch.is_grad_enabled() else x * _scale(x, eps)


def _scale(x: Tensor, eps: float) -> Tensor:
    mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.size(-1))  # (..., 1)
    return mean_square.add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> Tensor:
        scale = _scale(x, eps)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        along = (grad * y).mean(-1, keepdim=True)  # (..., 1): the share of the gradient that only changed the length
        return torch.addcmul(grad, y, along, value=-1).mul_(scale), None
