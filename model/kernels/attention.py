"""Attention over all pairs, for processors where oneDNN is the faster matrix library (model/kernels/onednn.py)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.kernels import onednn
from model.kernels.dropout import dropout_mask
from model.kernels.onednn import prefer_onednn

# Tokens from which on `onednn_attention` pays: below, preparing its many small products costs more than they take.
MIN_LENGTH = 512


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention; a short text's weights are held, all at once."""
    if q.numel() and onednn.onednn_is_faster():  # oneDNN refuses an empty batch
        if q.size(-2) >= MIN_LENGTH:
            options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "enable_gqa": enable_gqa}
            return onednn_attention(q, k, v, **options)
        if is_causal and q.shape == k.shape and dropout_p < 1:
            return short_attention(q, k, v, dropout_p)
    return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa)


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
            factors = dropout_mask(weights, dropout) if dropout else None
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
