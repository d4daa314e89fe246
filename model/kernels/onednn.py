"""Float32 products through oneDNN, where it is the faster of PyTorch's two matrix libraries.

PyTorch multiplies float32 matrices on x86 with MKL, which leaves AVX-512 unused on AMD's processors. oneDNN, which
PyTorch carries too, uses it, to the same precision (measured by benchmarks/linear_speed.py and attention_speed.py).
"""

import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from model.kernels.dropout import dropout_factors

# Tokens from which on `onednn_attention` pays: below, preparing its many small products costs more than they take.
MIN_LENGTH = 512


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


def goes_through_onednn(x: Tensor, other: Tensor) -> bool:
    """Whether a product of these two is one that oneDNN should make: plain float32, on such a machine."""
    plain_float32 = x.dtype == other.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    on_cpu = x.device.type == "cpu" and x.numel() > 0  # oneDNN refuses an empty batch
    return on_cpu and plain_float32 and onednn_is_faster()


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


def pack(weight: Tensor) -> Tensor:
    """W (O, I) in the layout oneDNN multiplies by fastest, for `packed_product` alone."""
    rows = 64  # as many as the layout is chosen for; it is as fast for one, where one of its own would not be
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b without gradients: x (..., I), `packed` made of W (O, I) -> (..., O), float32."""
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def short_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal softmax(Q K^T / sqrt(D)) V of a text below MIN_LENGTH, differentiable once.

    Holds all weights at once and keeps them for the backward pass. While they are few that is faster than making
    them anew, as PyTorch's fused attention does, whose many small products on a CPU are slow ones.

    Args:
        q, k, v: (B, H, T, D).
        dropout: share of the weights dropped.

    Returns:
        (B, H, T, D).
    """
    B, H, _, _ = q.shape
    heads = _ShortAttention.apply(*(x.flatten(0, 1) for x in (q, k, v)), dropout)  # (B H, T, D)
    return heads.unflatten(0, (B, H))


class _ShortAttention(torch.autograd.Function):
    """What is as large as the weights is written over where it can be: new memory costs more."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        T, ctx.scale = q.size(1), q.size(2) ** -0.5
        q = q * ctx.scale
        future = q.new_full((T, T), -math.inf).triu(1)
        with prefer_onednn():
            scores = torch.baddbmm(future, q, k.mT)  # (B H, T, T)
            weights = torch.softmax(scores, -1, out=scores)
            factors = dropout_factors(weights, dropout) if dropout else None
            kept = weights * factors if dropout else weights
            ctx.save_for_backward(q, k, v, weights, kept, factors)
            return kept @ v

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, weights, kept, factors = ctx.saved_tensors
        with prefer_onednn():
            grad_v = kept.mT @ grad  # (B H, T, D)
            grads = grad @ v.mT  # of the weights, (B H, T, T)
            if factors is not None:
                grads *= factors
            torch.ops.aten._softmax_backward_data.out(grads, weights, -1, weights.dtype, grad_input=grads)
            return (grads @ k).mul_(ctx.scale), grads.mT @ q, grad_v, None  # `grads` now of the scores, `q` scaled


def onednn_attention(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """F.scaled_dot_product_attention with the products inside it by oneDNN, differentiable once.

    Args:
        q, k, v: (B, H, T, D), T at least MIN_LENGTH for this to pay.
        options: as PyTorch's function takes them.
    """
    return _Attention.apply(q, k, v, options)


class _Attention(torch.autograd.Function):
    """Keeps the graph of PyTorch's own function, since its backward pass too has to run under `prefer_onednn`."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, options: dict) -> Tensor:
        ctx.inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in (q, k, v)]
        with torch.set_grad_enabled(any(ctx.needs_input_grad)), prefer_onednn():
            ctx.output = F.scaled_dot_product_attention(*ctx.inputs, **options)  # (B, H, T, D)
        return ctx.output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [tensor for tensor in ctx.inputs if tensor.requires_grad]
        with prefer_onednn():
            found = iter(torch.autograd.grad(ctx.output, wanted, grad))
        return *(next(found) if tensor.requires_grad else None for tensor in ctx.inputs), None


@contextmanager
def prefer_onednn() -> Iterator[None]:
    """PyTorch's own products, outside nn.Linear, go to oneDNN where it is faster.

    "medium" lets it round to bfloat16, but it has no such float32 kernel without AMX, which no AMD processor has:
    tests/test_onednn.py holds the results to float32's precision.
    """
    if not onednn_is_faster():
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
