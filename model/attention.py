"""Multi-head attention: the fused call that trains (SDPA), and eager attention, to be read and looked at.

Letters in shape comments, here and in the rest of the model:
    B  sequences in a batch          T  tokens that ask (queries)      S  tokens that are asked (keys)
    C  d_model, the width            H  query heads                    G  key/value heads, H or a divisor of it
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
    """Multi-head attention (Vaswani et al. 2017, arXiv:1706.03762), self or cross.

    One matrix, `in_proj`, makes queries, keys and values; its rows are [H queries | G keys | G values],
    D rows a head. With G < H each key/value head serves H / G query heads (grouped-query attention,
    Ainslie et al. 2023, arXiv:2305.13245).

    Args:
        d_model: width of the inputs and of the output.
        num_heads: query heads; must divide d_model.
        num_kv_heads: key/value heads; must divide num_heads. None: num_heads.
        qkv_bias, out_bias: biases of the input and output projections.
        qk_norm_eps: RMS-normalize every query and key, with this epsilon. None: leave them as they are.
        dropout: share of attention weights dropped in training.

    Raises:
        UserError: heads that do not divide the width, or key/value heads that do not divide the heads.
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
        """Lets every query token gather from the key tokens it may see.

        Args:
            query: (B, T, C).
            key, value: (B, S, C); leave out for self-attention. A key alone is its own value.
            mask: 1 where a query may look, 0 where not; broadcasts to (B, H, T, S).
            causal: a query sees keys up to its own token only. Not together with a mask.
            window: of these it sees the last `window`, its own among them. Causal self-attention only.
            rope: cosines and sines of `precompute_rope`, (T, D/2) each; self-attention only.
            cache: has keys and values of S - T earlier tokens, and takes these: sampling.kv_cache.DynamicLayerCache.
            need_weights: take the eager path and return its weights too.

        Returns:
            (B, T, C); with need_weights also the weights, (B, H, T, S), each row summing to 1.

        Raises:
            ValueError: both a mask and causal, or a window where attention is not causal self-attention.
        """
        if causal and mask is not None:
            raise ValueError("causal=True already is a mask; give only one of mask and causal")
        if window is not None and (window < 1 or not causal or key is not None):
            raise ValueError("a window is 1 token or more of causal self-attention: causal=True, no key, no value")
        q, k, v = self.project(query, key, value, rope)  # (B, H, T, D), (B, G, S, D) twice
        if cache is not None:
            k, v = cache.update(k, v)  # S is now more than T
        T, S = q.size(2), k.size(2)
        mask = mask.bool() if mask is not None else None
        if causal and (need_weights or S > T):  # otherwise SDPA makes the mask itself
            mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
            if window is not None:
                mask = mask.triu(S - T + 1 - window)  # a band: the diagonal and window - 1 more below it
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            heads, weights = eager_attention(q, k, v, mask)
        elif window is not None and mask is None:
            heads = sliding_window_attention(q, k, v, window, dropout)  # (B, H, T, D)
        else:
            heads = sdpa_attention(q, k, v, mask, dropout, causal and mask is None)  # (B, H, T, D)
        joined = heads.transpose(1, 2).flatten(2)  # (B, H, T, D) -> (B, T, H, D) -> (B, T, C)
        output = self.out_proj(joined)
        return (output, weights) if need_weights else output

    def project(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, rope: Rope | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D), keys and values (B, G, S, D), normalized and rotated: both paths start here."""
        H, G, D = self.num_heads, self.num_kv_heads, self.head_dim
        if key is None:  # self-attention: one matrix product, and queries and keys rotate together
            heads = self.in_proj(query).unflatten(-1, (H + 2 * G, D))  # (B, T, H + 2G, D)
            qk, v = heads.split([H + G, G], dim=2)
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
        """Queries or keys (B, T, heads, D) -> the same shape."""
        if self.qk_norm_eps is not None:
            x = rms_norm(x, self.qk_norm_eps)
        return x if rope is None else apply_rope(x, *rope)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T / sqrt(D)) V, one line a step.

    Args:
        q: (B, H, T, D).
        k, v: (B, G, S, D).
        mask: true where a query may look; broadcasts to (B, H, T, S).

    Returns:
        The gathered values (B, H, T, D) and the weights (B, H, T, S).
    """
    group = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # (B, H, S, D)
    scores = q @ k.mT / math.sqrt(q.size(-1))  # (B, H, T, S)
    if mask is not None:
        # -inf and not 0: exp(0) is 1 and would keep its share, exp(-inf) is exactly 0.
        scores = scores.masked_fill(mask == 0, -math.inf)
    weights = scores.softmax(dim=-1)
    return weights @ v, weights
