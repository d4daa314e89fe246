"""nn.Linear, through the faster of PyTorch's two float32 matrix libraries.

PyTorch multiplies float32 matrices on x86 with MKL, which leaves AVX-512 unused on AMD's processors. oneDNN, which
PyTorch carries too, uses it: about twice as fast there (benchmarks/linear_speed.py), to the same precision.
"""

import platform
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def has_onednn() -> bool:
    """Whether this PyTorch carries oneDNN's product."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def onednn_is_faster() -> bool:
    """Whether this machine is one where oneDNN multiplies float32 faster: an AMD processor with AVX-512.

    A fact of the machine and not a measurement, so that every run on it rounds alike.
    """
    cpuinfo = Path("/proc/cpuinfo")
    vendor = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else platform.processor()
    return "AuthenticAMD" in vendor and has_onednn() and torch.backends.cpu.get_cpu_capability() == "AVX512"


class Linear(nn.Linear):
    """nn.Linear: (..., in_features) -> (..., out_features)."""

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        plain_float32 = x.dtype == self.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        on_cpu = x.device.type == "cpu" and x.numel() > 0  # oneDNN refuses an empty batch
        if on_cpu and plain_float32 and onednn_is_faster() and not torch.compiler.is_compiling():
            y = onednn_product(x, self.weight)
            return y if self.bias is None else y + self.bias
        return F.linear(x, self.weight, self.bias)


def onednn_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T by oneDNN, differentiable: x (..., I), W (O, I) -> (..., O), float32."""
    return _OneDNNProduct.apply(x, weight)


class _OneDNNProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = _product(grad, weight.t()) if ctx.needs_input_grad[0] else None  # (..., I)
        # All tokens of the batch, flattened to one dimension N, are summed over: (O, N) (N, I) -> (O, I)
        grad_weight = _product(grad.flatten(0, -2).t(), x.flatten(0, -2).t()) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a (..., K) times b^T, with b (M, K) -> (..., M)."""
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
