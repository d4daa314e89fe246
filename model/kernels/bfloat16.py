"""Matrix products in bfloat16 on CPUs that support it, for training. All other operators stay in float32.

These instructions (AVX512-BF16, AMX) take half the time of float32 or less and accumulate in float32; only inputs and
outputs are rounded, to 8 bits of precision. torch.autocast rounds in the same places, but also runs the operators
between the products in bfloat16, where they are slow: a step then takes longer than in float32 (docs/EXPERIMENTS.md).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

BF16_MATMUL = "bf16-matmul"  # value of trainer.precision; not one of Lightning's
_enabled = ContextVar("bf16_matmul", default=False)


@cache
def has_bf16_units() -> bool:
    """Whether this processor has bfloat16 matrix instructions. Read from /proc/cpuinfo, not measured."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text(errors="replace").split() if cpuinfo.exists() else []
    return torch.backends.mkldnn.is_available() and ("avx512_bf16" in flags or "amx_bf16" in flags)


@contextmanager
def bf16_matmul() -> Iterator[None]:
    """Context in which the kernels compute matrix products in bfloat16, and later those of their gradients."""
    token = _enabled.set(True)
    try:
        yield
    finally:
        _enabled.reset(token)


def matmul_precision(precision: str) -> AbstractContextManager[None]:
    """Context for the forward pass at this value of `trainer.precision`, for training without Lightning."""
    return bf16_matmul() if precision == BF16_MATMUL else nullcontext()


def bf16_matmul_enabled() -> bool:
    """Whether the `bf16_matmul` context is active. torch.compile cannot trace this call."""
    return _enabled.get()


def bf16_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T computed in bfloat16, differentiable once: x (..., I), W (O, I) -> (..., O), all float32."""
    return _Linear.apply(x, weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight).float()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.bfloat16()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).float()  # (..., I)
        if ctx.needs_input_grad[1]:
            # Flattens all tokens of the batch into one dimension N: (O, N) @ (N, I) -> (O, I)
            grad_weight = (grad.reshape(-1, grad.size(-1)).t() @ x.reshape(-1, x.size(-1))).float()
        return grad_x, grad_weight
