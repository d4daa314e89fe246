"""Float32 matrix products through oneDNN, on processors where it is the faster of PyTorch's two matrix libraries.

On x86, PyTorch multiplies float32 matrices with MKL, which does not use AVX-512 on AMD processors. oneDNN, which is
part of PyTorch too, does, with the same precision (measured by benchmarks/linear_speed.py and attention_speed.py).
"""

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from model.kernels import enabled


def has_onednn() -> bool:
    """Whether this build of PyTorch has oneDNN's linear operator."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_is_faster() -> bool:
    """Whether to use oneDNN: on AMD processors with AVX-512, which are Zen 4 and later.

    Decided by the processor's family and not by a measurement, so that every run on a machine rounds in the same way.
    """
    return _AMD_FAMILY >= ZEN_4


def short_attention_is_faster() -> bool:
    """Whether to use oneDNN for attention over short sequences: on Zen 5, where AVX-512 has its full width."""
    return onednn_is_faster() and _AMD_FAMILY >= ZEN_5


ZEN_4, ZEN_5 = 25, 26  # families; 25 is also Zen 3, which has no AVX-512


def amd_family(cpuinfo: str) -> int:
    """Family of an AMD processor, from /proc/cpuinfo or the name that Windows gives it; 0 for all others."""
    family = re.search(r"family\s*:?\s*(\d+)", cpuinfo, re.IGNORECASE)
    return int(family[1]) if family and "AuthenticAMD" in cpuinfo else 0


def _amd_family_with_avx512() -> int:
    if not has_onednn() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return 0
    cpuinfo = Path("/proc/cpuinfo")
    return amd_family(cpuinfo.read_text(errors="replace") if cpuinfo.exists() else platform.processor())


_AMD_FAMILY = _amd_family_with_avx512()  # at import, because torch.compile cannot trace reading a file


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, differentiable once: x (..., I), W (O, I) -> (..., O), float32."""
    if torch.compiler.is_compiling():
        y = _compiled_product(x, weight)
        return y if bias is None else y + bias
    return _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_linear_no_grad(x, weight, bias)

    @staticmethod
    @once_differentiable  # a second derivative would silently omit the oneDNN product
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = onednn_linear_no_grad(grad, weight.t()) if ctx.needs_input_grad[0] else None  # (..., I)
        grad_weight = _weight_gradient(grad, x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad.reshape(-1, grad.size(-1)).sum(0) if ctx.needs_input_grad[2] else None


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """(..., O) and (..., I) -> (O, I). Not with `onednn_linear_no_grad`, which would first transpose and copy both."""
    with use_onednn_for_matmul():
        # Flattens all tokens of the batch into one dimension N: (O, N) @ (N, I) -> (O, I)
        return grad.reshape(-1, grad.size(-1)).t() @ x.reshape(-1, x.size(-1))


# Custom operators for torch.compile, which would replace the products by MKL's if it could trace them.
@library.custom_op("tiny_gpt::onednn_product", mutates_args=())
def _compiled_product(x: Tensor, weight: Tensor) -> Tensor:
    return onednn_linear_no_grad(x, weight)


@library.custom_op("tiny_gpt::onednn_gradients", mutates_args=())
def _compiled_gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return onednn_linear_no_grad(grad, weight.t()), _weight_gradient(grad, x)


_compiled_product.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], len(weight)))
_compiled_gradients.register_fake(lambda grad, x, weight: (x.new_empty(x.shape), weight.new_empty(weight.shape)))
_compiled_product.register_autograd(
    lambda ctx, grad: _compiled_gradients(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def onednn_linear_no_grad(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, not differentiable: x (..., I), weight (O, I), bias (O,) -> (..., O)."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@contextmanager
def use_onednn_for_matmul() -> Iterator[None]:
    """Context in which torch.matmul uses oneDNN, on processors where it is faster.

    The setting "medium" permits rounding to bfloat16. oneDNN does that only with AMX, which no AMD processor has, so
    results keep float32 precision (checked by tests/model/kernels/test_onednn.py).
    """
    if not (enabled() and onednn_is_faster()):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
