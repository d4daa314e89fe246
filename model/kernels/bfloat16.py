"""Training's matrix products in bfloat16 on processors with units for it; everything between them stays float32.

Such units (AVX512-BF16, AMX) multiply in half of float32's time or less and sum up in float32; only what goes in
and what comes out is rounded, to 8 bits of precision. torch.autocast would round so too, but leaves the operators
between the products in bfloat16, where they are slow: with it a step takes longer than in float32
(docs/EXPERIMENTS.md).
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

BF16_MATMUL = "bf16-matmul"  # a value of trainer.precision that Lightning does not have
_wanted = ContextVar("matrix products in bfloat16", default=False)


@cache
def has_bf16_units() -> bool:
    """Whether this processor multiplies bfloat16 faster than float32. A fact of the machine, and no measurement."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text(errors="replace").split() if cpuinfo.exists() else []
    return torch.backends.mkldnn.is_available() and ("avx512_bf16" in flags or "amx_bf16" in flags)


@contextmanager
def bf16_matmul() -> Iterator[None]:
    """The kernels' matrix products, and later on those of their gradients, are made in bfloat16."""
    before = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(before)


def matmul_precision(precision: str) -> AbstractContextManager[None]:
    """What a forward pass in training runs under at this `trainer.precision`, where one trains without Lightning."""
    return bf16_matmul() if precision == BF16_MATMUL else nullcontext()


def is_bf16_matmul() -> bool:
    """Whether `bf16_matmul` is on. torch.compile cannot look into the variable."""
    return _wanted.get()


def bf16_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, differentiable once: x (..., I), W (O, I) -> (..., O), all of them float32."""
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
            # All tokens of the batch, laid into one dimension N, are summed over: (O, N) (N, I) -> (O, I)
            grad_weight = (grad.reshape(-1, grad.size(-1)).t() @ x.reshape(-1, x.size(-1))).float()
        return grad_x, grad_weight
