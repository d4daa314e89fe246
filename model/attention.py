"""Multi-head attention: PyTorch's fused SDPA for training, and eager attention, which returns its weights.

Letters in shape comments, here and in the rest of the model:
    B  batch size                    T  query tokens                   S  key tokens (T without a cache)
    C  d_model, the width            H  query heads                    G  key/value heads (divides H)
    D  head_dim = C / H
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import check_heads
from model.layers import Linear, Rope, apply_rope, rms_norm, sdpa_attention, sliding_window_attention


class MultiHeadAttention(nn.Module):
    """Multi-head self-attention or cross-attention (Vaswani et al. 2017, arXiv:1706.03762).

    One matrix, `in_proj`, projects to queries, keys and values; its rows are [H queries | G keys | G values] with D
    rows per head. With G < H, each key/value head is shared by H / G query heads (grouped-query attention,
    Ainslie et al. 2023, arXiv:2305.13245).

    Args:
        d_model: width of the inputs and of the output.
        num_heads: number of query heads; must divide d_model.
        num_kv_heads: number of key/value heads; must divide num_heads. None: num_heads.
        qkv_bias, out_bias: whether the input and output projections have biases.
        qk_norm_eps: epsilon of the RMSNorm of queries and keys. None: no normalization.
        dropout: dropout probability of the attention weights.

    Raises:
        UserError: num_heads does not divide d_model, or num_kv_heads does not divide num_heads.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        qkv_bias: bool = False,
        out_bias: bool = True,
        qk_norm_eps: float | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        check_heads(d_model, num_heads, num_kv_heads or num_heads)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_dim = d_model // num_heads
        self.qk_norm_eps = qk_norm_eps
        self.dropout = dropout
        self.in_proj = Linear(d_model, (num_heads + 2 * self.num_kv_heads) * self.head_dim, bias=qkv_bias)
        self.out_proj = Linear(d_model, d_model, bias=out_bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        window: int | None = None,
        rope: Rope | None = None,
        cache: Any = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes attention.

        Args:
            query: (B, T, C).
            key, value: (B, S, C). None: self-attention. `value` defaults to `key`.
            mask: True (or 1) where a query may attend to a key; broadcasts to (B, H, T, S).
            causal: each query attends only to its own and earlier tokens. Cannot be combined with `mask`.
            window: each query attends only to the last `window` of these tokens. Causal self-attention only.
            rope: cosines and sines from `precompute_rope`, (T, D/2) each. Self-attention only.
            cache: the layer's KV cache, which is extended: sampling.kv_cache.DynamicLayerCache.
            need_weights: use eager attention and return its weights too.

        Returns:
            (B, T, C), or with need_weights a tuple of that and the attention weights (B, H, T, S).

        Raises:
            ValueError: `mask` with `causal`, or `window` without causal self-attention.
        """
        if causal and mask is not None:
            raise ValueError("mask and causal=True cannot be combined")
        if window is not None and (window < 1 or not causal or key is not None):
            raise ValueError(f"window={window} is not supported: it needs causal self-attention and at least 1 token")
        q, k, v = self.project(query, key, value, rope)  # (B, H, T, D), (B, G, S, D), (B, G, S, D)
        if cache is not None:
            k, v = cache.update(k, v)  # now S > T unless the cache was empty
        T, S = q.size(2), k.size(2)
        mask = mask.bool() if mask is not None else None
        if causal and (need_weights or S > T):  # in the other cases the attention functions apply the causal mask
            mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
            if window is not None:
                mask = mask.triu(S - T + 1 - window)  # a band: the diagonal and window - 1 diagonals below it
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            y, weights = eager_attention(q, k, v, mask)
        elif window is not None and mask is None:
            y = sliding_window_attention(q, k, v, window, dropout)
        else:
            y = sdpa_attention(q, k, v, mask, dropout, causal and mask is None)
        y = y.transpose(1, 2).flatten(2)  # (B, H, T, D) -> (B, T, H, D) -> (B, T, C)
        y = self.out_proj(y)
        return (y, weights) if need_weights else y

    def project(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, rope: Rope | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries (B, H, T, D), keys and values (B, G, S, D), with RMSNorm and RoPE applied."""
        H, G, D = self.num_heads, self.num_kv_heads, self.head_dim
        if key is None:  # self-attention: one matrix product, and one rotation for queries and keys
            qkv = self.in_proj(query).unflatten(-1, (H + 2 * G, D))  # (B, T, H + 2G, D)
            qk, v = qkv.split([H + G, G], dim=2)
            q, k = self.norm_and_rotate(qk, rope).split([H, G], dim=2)
        else:
            value = key if value is None else value
            rows = [H * D, G * D, G * D]
            w_q, w_k, w_v = self.in_proj.weight.split(rows)
            b_q, b_k, b_v = (None, None, None) if self.in_proj.bias is None else self.in_proj.bias.split(rows)
            q = self.norm_and_rotate(F.linear(query, w_q, b_q).unflatten(-1, (H, D)), rope)  # (B, T, H, D)
            k = self.norm_and_rotate(F.linear(key, w_k, b_k).unflatten(-1, (G, D)), rope)  # (B, S, G, D)
            v = F.linear(value, w_v, b_v).unflatten(-1, (G, D))  # (B, S, G, D)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def norm_and_rotate(self, x: Tensor, rope: Rope | None) -> Tensor:
        """Applies RMSNorm and RoPE, where used, to queries or keys (B, T, heads, D)."""
        if self.qk_norm_eps is not None:
            x = rms_norm(x, self.qk_norm_eps)
        return x if rope is None else apply_rope(x, *rope)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T / sqrt(D)) V, step by step.

    Args:
        q: (B, H, T, D).
        k, v: (B, G, S, D).
        mask: True where a query may attend to a key; broadcasts to (B, H, T, S).

    Returns:
        The output (B, H, T, D) and the attention weights (B, H, T, S).
    """
    heads_per_group = q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(heads_per_group, dim=1) for x in (k, v))  # (B, H, S, D)
    scores = q @ k.mT / math.sqrt(q.size(-1))  # (B, H, T, S)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -math.inf)  # softmax gives these a weight of exactly 0
    weights = scores.softmax(dim=-1)
    return weights @ v, weights
