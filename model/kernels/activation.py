"""Activation functions whose backward pass takes few operators: on a CPU each operator is a pass through memory."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

MIN_NUMEL = 1 << 13  # for smaller tensors, the overhead of several operators exceeds the cost of PyTorch's slow tanh


def squared_relu(x: Tensor) -> Tensor:
    """F.relu(x).square()."""
    return _SquaredReLU.apply(x) if x.requires_grad else F.relu(x).square()


class _SquaredReLU(torch.autograd.Function):
    """Its backward pass takes two operators, where autograd takes five."""

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
    """F.gelu(x, approximate="tanh"), computed with a sigmoid.

    (1 + tanh u) / 2 is the sigmoid of 2u, and on a CPU PyTorch's sigmoid takes a ninth of the time of its tanh.
    In float32 the derivative is NaN beyond 1.7e13, which only a diverging run reaches.
    """
    if x.numel() < MIN_NUMEL:
        return F.gelu(x, approximate="tanh")
    return _GELU.apply(x) if x.requires_grad else _sigmoid_argument(x).sigmoid_().mul_(x)


_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _LINEAR


def _sigmoid_argument(x: Tensor) -> Tensor:
    """Returns 2u = _LINEAR x + _CUBIC x^3, so that gelu(x) = x sigmoid(2u)."""
    return torch.addcmul(x.new_tensor(_LINEAR), x, x, value=_CUBIC).mul_(x)


class _GELU(torch.autograd.Function):
    """y = x s with s = sigmoid(2u), so y' = s + x (2u)' s (1 - s), where x (2u)' = 3 (2u) - 2 _LINEAR x.

    The forward pass computes the derivative from its intermediate results, and saves only that.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        twice_u = _sigmoid_argument(x)
        gate = twice_u.sigmoid()
        y = x * gate
        inner = twice_u.sub_(x, alpha=2 / 3 * _LINEAR)  # x (2u)' / 3
        inner = torch.ops.aten.sigmoid_backward(inner, gate)  # x (2u)' s (1 - s) / 3
        ctx.save_for_backward(gate.add_(inner, alpha=3))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (derivative,) = ctx.saved_tensors
        return grad * derivative
