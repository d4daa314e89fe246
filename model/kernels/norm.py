"""RMSNorm whose backward pass takes few operators: PyTorch differentiates each operation of the formula separately."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """F.rms_norm over the last dimension."""
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
        parallel = (grad * y).mean(-1, keepdim=True)  # (..., 1): the component along y, which normalization removes
        return torch.addcmul(grad, y, parallel, value=-1).mul_(scale), None
