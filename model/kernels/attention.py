"""Full attention on processors where oneDNN is the faster matrix library (model/kernels/onednn.py)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.kernels import onednn
from model.kernels.dropout import dropout_mask
from model.kernels.onednn import use_onednn_for_matmul

MIN_LENGTH = 512  # tokens; for shorter sequences, the overhead of oneDNN's many small products exceeds their cost


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention. For short sequences it holds all attention weights in memory."""
    if q.numel() and onednn.onednn_is_faster():  # oneDNN does not accept an empty batch
        if q.size(-2) >= MIN_LENGTH:
            options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "enable_gqa": enable_gqa}
            return onednn_attention(q, k, v, **options)
        if onednn.short_attention_is_faster() and is_causal and q.shape == k.shape and dropout_p < 1:
            return short_attention(q, k, v, dropout_p)
    return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa)


def short_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Causal softmax(Q K^T / sqrt(D)) V for sequences shorter than MIN_LENGTH, differentiable once.

    Saves the attention weights for the backward pass. For short sequences this is faster than recomputing them, as
    PyTorch's fused attention does with many small and slow products.

    Args:
        q, k, v: (B, H, T, D).
        dropout: dropout probability of the attention weights.

    Returns:
        (B, H, T, D).
    """
    B, H, _, _ = q.shape
    heads = _ShortAttention.apply(*(x.flatten(0, 1) for x in (q, k, v)), dropout)  # (B H, T, D)
    return heads.unflatten(0, (B, H))


class _ShortAttention(torch.autograd.Function):
    """Reuses tensors of the size of the weights where possible, because allocating memory costs more."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        T, ctx.scale = q.size(1), q.size(2) ** -0.5
        q = q * ctx.scale
        future = q.new_full((T, T), -math.inf).triu(1)
        with use_onednn_for_matmul():
            scores = torch.baddbmm(future, q, k.mT)  # (B H, T, T)
            weights = torch.softmax(scores, -1, out=scores)
            factors = dropout_mask(weights, dropout) if dropout else None
            kept = weights * factors if dropout else weights
            ctx.save_for_backward(q, k, v, weights, kept, factors)
            return kept @ v

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, weights, kept, factors = ctx.saved_tensors
        with use_onednn_for_matmul():
            grad_v = kept.mT @ grad  # (B H, T, D)
            grads = grad @ v.mT  # of the weights, (B H, T, T)
            if factors is not None:
                grads *= factors
            torch.ops.aten._softmax_backward_data.out(grads, weights, -1, weights.dtype, grad_input=grads)
            return (grads @ k).mul_(ctx.scale), grads.mT @ q, grad_v, None  # `grads` now of the scores, `q` scaled


def onednn_attention(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """F.scaled_dot_product_attention with its matrix products computed by oneDNN, differentiable once.

    Args:
        q, k, v: (B, H, T, D). Faster only for T >= MIN_LENGTH.
        options: the other arguments of F.scaled_dot_product_attention.
    """
    return _Attention.apply(q, k, v, options)


class _Attention(torch.autograd.Function):
    """Keeps PyTorch's own graph, so that its backward pass can also run under `use_onednn_for_matmul`."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, options: dict) -> Tensor:
        ctx.inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in (q, k, v)]
        with torch.set_grad_enabled(any(ctx.needs_input_grad)), use_onednn_for_matmul():
            ctx.output = F.scaled_dot_product_attention(*ctx.inputs, **options)  # (B, H, T, D)
        return ctx.output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor for tensor in ctx.inputs if tensor.requires_grad]
        with use_onednn_for_matmul():
            grads = iter(torch.autograd.grad(ctx.output, inputs, grad))
        return *(next(grads) if tensor.requires_grad else None for tensor in ctx.inputs), None
