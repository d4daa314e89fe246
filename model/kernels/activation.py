"""The MLP's activations, with derivatives of few operators: on a CPU each is one more way through memory."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# For fewer numbers than this, starting several operators takes longer than PyTorch's slow tanh.
FEW = 1 << 13


def squared_relu(x: Tensor) -> Tensor:
    """F.relu(x).square(), of any shape."""
    return _SquaredReLU.apply(x) if x.requires_grad else F.relu(x).square()


class _SquaredReLU(torch.autograd.Function):
    """Two operators back, where autograd would take five."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (grad * positive).mul_(2)


def gelu(x: Tensor) -> Tensor:
    """F.gelu(x, approximate="tanh"), of any shape.

    On a CPU PyTorch's tanh takes nine times as long as its sigmoid, and (1 + tanh u) / 2 is the sigmoid of 2u.
    In float32 the derivative is NaN beyond 1.7e13, where only a diverging run gets to.
    """
    if x.numel() < FEW:
        return F.gelu(x, approximate="tanh")
    return _GELU.apply(x) if x.requires_grad else _twice_u(x).sigmoid_().mul_(x)


_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR


def _twice_u(x: Tensor) -> Tensor:
    """2u = _LINEAR x + _CUBIC x^3."""
    return torch.addcmul(x.new_tensor(_LINEAR), x, x, value=_CUBIC).mul_(x)


class _GELU(torch.autograd.Function):
    """y = x s with s = sigmoid(2u), so y' = s + x (2u)' s (1 - s), where x (2u)' = 3 (2u) - 2 _LINEAR x.

    The derivative is made at once, while all it takes is at hand, and alone is kept.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        twice_u = _twice_u(x)
        gate = twice_u.sigmoid()
        y = x * gate
        third = twice_u.sub_(x, alpha=2 / 3 * _LINEAR)  # of x (2u)'
        bend = torch.ops.aten.sigmoid_backward(third, gate)  # times s (1 - s)
        ctx.save_for_backward(gate.add_(bend, alpha=3))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return grad * slope
