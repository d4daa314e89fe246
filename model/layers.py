"""Layers and functions of the model, as in torch.nn: plain PyTorch, or a faster kernel if `enabled` for the inputs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.kernels import enabled
from model.kernels.activation import gelu as fast_gelu
from model.kernels.activation import squared_relu as fast_squared_relu
from model.kernels.attention import sdpa_attention as fast_sdpa_attention
from model.kernels.cross_entropy import fused_linear_cross_entropy
from model.kernels.dropout import dropout_mask
from model.kernels.linear import linear as fast_linear
from model.kernels.norm import rms_norm as fast_rms_norm
from model.kernels.rope import apply_rope as fast_apply_rope
from model.kernels.sliding_window import sliding_window_attention as fast_sliding_window_attention

Rope = tuple[Tensor, Tensor]  # cosines and sines of the rotation angles, (T, D/2) each


class Linear(nn.Linear):
    """nn.Linear: (..., in_features) -> (..., out_features)."""

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        y = rms_norm(x, self.eps)
        return y if self.weight is None else y * self.weight


class Dropout(nn.Dropout):
    """nn.Dropout (Srivastava et al. 2014): in training zeroes entries with probability p and scales the others up."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        if not self.training or self.p == 0:
            return x
        return x * dropout_mask(x, self.p) if enabled(x) else F.dropout(x, self.p)


class BigramEmbedding(nn.Embedding):
    """Hashed bigram embedding: a vector for each pair of a token and its predecessor.

    It gives the first block information for which an attention head would have to learn to attend to the previous
    token. Pairs are hashed into a table of fixed size (hash embeddings, Svenstrup et al. 2017, arXiv:1709.03933).
    """

    def __init__(self, table_size: int, d_model: int, dropout: float = 0.0):
        super().__init__(table_size, d_model)
        self.dropout = dropout

    def forward(self, ids: Tensor, prev_ids: Tensor | None = None) -> Tensor:
        """Returns vectors (B, T, C) for ids (B, T). prev_ids: (B,), the tokens before these. None: there are none."""
        if prev_ids is None:
            previous = F.pad(ids[:, :-1], (1, 0), value=-1)  # (B, T)
        else:
            previous = torch.cat([prev_ids[:, None], ids[:, :-1]], dim=1)  # (B, T)
        vectors = super().forward(self.hash(ids, previous))  # (B, T, C)
        return F.dropout1d(vectors, self.dropout, self.training)  # drops whole vectors

    def hash(self, ids: Tensor, previous: Tensor) -> Tensor:
        """Returns the table row of each pair of tokens, with the shape of ids."""
        # With odd factors, either token alone can select any row of a table of size 2^n.
        return (previous * 40_503 ^ ids * 30_011) % self.num_embeddings


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: (..., I) -> (..., O), for weight (O, I)."""
    return (fast_linear if enabled(x, weight, compiles=True) else F.linear)(x, weight, bias)


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension."""
    return fast_rms_norm(x, eps) if enabled(x) else F.rms_norm(x, x.shape[-1:], eps=eps)


def gelu(x: Tensor) -> Tensor:
    """GELU with the tanh approximation, as in GPT-2 (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    return fast_gelu(x) if enabled(x) else F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (Primer, So et al. 2021, arXiv:2109.08668)."""
    return fast_squared_relu(x) if enabled(x) else F.relu(x).square()


def swiglu(x: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): silu(gate) * value, for x = [gate | value]: (..., 2I) -> (..., I)."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def precompute_rope(context_length: int, head_dim: int, base: float) -> Rope:
    """Returns the cosines and sines of RoPE for all positions (Su et al. 2021, arXiv:2104.09864)."""
    frequencies = base ** -(torch.arange(0, head_dim, 2) / head_dim)  # (D/2,)
    angles = torch.outer(torch.arange(context_length), frequencies)  # (context_length, D/2)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embeddings to queries or keys (arXiv:2104.09864, section 3.4).

    Entries i and i + D/2 of a head are a point (x1, x2), which is rotated by position x base^(-2i/D) radians.

    Args:
        x: (B, T, heads, D).
        cos, sin: (T, D/2) each, from `precompute_rope`.
    """
    if enabled(x):
        return fast_apply_rope(x, cos, sin)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (T, 1, D/2), broadcast over the heads
    x1, x2 = x.chunk(2, dim=-1)  # (B, T, heads, D/2) each
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1)


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0, causal: bool = False
) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V with F.scaled_dot_product_attention.

    Args:
        q: (B, H, T, D).
        k, v: (B, G, S, D), where G divides H.
        mask: True where a query may attend to a key; broadcasts to (B, H, T, S).

    Returns:
        (B, H, T, D).
    """
    attend = fast_sdpa_attention if enabled(q, k, v) else F.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=q.size(1) != k.size(1))


def sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, dropout: float = 0.0) -> Tensor:
    """Causal attention in which query t attends to the keys t - window + 1 ... t.

    Longformer (Beltagy et al. 2020, arXiv:2004.05150); Mistral (Jiang et al. 2023, arXiv:2310.06825).
    Shapes as in `sdpa_attention`, with S = T.
    """
    T = q.size(2)
    if window >= T:
        return sdpa_attention(q, k, v, None, dropout, causal=True)
    if enabled(compiles=True):  # the kernel supports all devices and dtypes
        return fast_sliding_window_attention(q, k, v, window, dropout)
    band = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(1 - window)  # (T, T)
    return sdpa_attention(q, k, v, band, dropout)


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of the logits x W^T.

    Args:
        x: (N, C), the input of the output layer.
        weight: (V, C), its weight.
        targets: (N,) token ids.
    """
    if enabled(x, weight):
        return fused_linear_cross_entropy(x, weight, targets)
    return F.cross_entropy(linear(x, weight), targets)
