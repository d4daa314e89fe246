"""Float32 products through oneDNN, where it is the faster of PyTorch's two matrix libraries.

PyTorch multiplies float32 matrices on x86 with MKL, which leaves AVX-512 unused on AMD's processors. oneDNN, which
PyTorch carries too, uses it, to the same precision (measured by benchmarks/linear_speed.py and attention_speed.py).
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from model.kernels import enabled


def has_onednn() -> bool:
    """Whether this PyTorch carries oneDNN's product."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_is_faster() -> bool:
    """Whether this machine is one where oneDNN multiplies float32 faster: an AMD processor with AVX-512.

    A fact of the machine and not a measurement, so that every run on it rounds alike.
    """
    return _IS_FASTER


def _is_amd_with_avx512() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    vendor = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else platform.processor()
    return "AuthenticAMD" in vendor and torch.backends.cpu.get_cpu_capability() == "AVX512"


_IS_FASTER = has_onednn() and _is_amd_with_avx512()  # found out here, since torch.compile cannot look into files


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
        return raw_onednn_product(x, weight, bias)

    @staticmethod
    @once_differentiable  # a second time would leave the raw product out, without a word
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = raw_onednn_product(grad, weight.t()) if ctx.needs_input_grad[0] else None  # (..., I)
        grad_weight = _weight_gradient(grad, x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad.reshape(-1, grad.size(-1)).sum(0) if ctx.needs_input_grad[2] else None


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """(..., O) and (..., I) -> (O, I). The raw product would first copy both, which lie the wrong way for it."""
    with prefer_onednn():
        # All tokens of the batch, laid into one dimension N, are summed over: (O, N) (N, I) -> (O, I)
        return grad.reshape(-1, grad.size(-1)).t() @ x.reshape(-1, x.size(-1))


# The same for torch.compile, which sends products to MKL unless it is told to leave them alone.
@library.custom_op("tiny_gpt::onednn_product", mutates_args=())
def _compiled_product(x: Tensor, weight: Tensor) -> Tensor:
    return raw_onednn_product(x, weight)


@library.custom_op("tiny_gpt::onednn_gradients", mutates_args=())
def _compiled_gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return raw_onednn_product(grad, weight.t()), _weight_gradient(grad, x)


_compiled_product.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], len(weight)))
_compiled_gradients.register_fake(lambda grad, x, weight: (x.new_empty(x.shape), weight.new_empty(weight.shape)))
_compiled_product.register_autograd(
    lambda ctx, grad: _compiled_gradients(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def raw_onednn_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a (..., K) times b^T, with b (M, K), plus bias (M,) -> (..., M). Not differentiable."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


@contextmanager
def prefer_onednn() -> Iterator[None]:
    """PyTorch's own products, outside nn.Linear, go to oneDNN where it is faster.

    "medium" lets it round to bfloat16, but it has no such float32 kernel without AMX, which no AMD processor has:
    tests/model/kernels/test_onednn.py holds the results to float32's precision.
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
