"""The network's building blocks, as in torch.nn: plain PyTorch, or a kernel where `enabled` says so."""

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

Rope = tuple[Tensor, Tensor]  # cosines and sines of the positions' angles, (T, D/2) each


class Linear(nn.Linear):
    """nn.Linear: (..., in_features) -> (..., out_features)."""

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        y = rms_norm(x, self.eps)
        return y if self.weight is None else y * self.weight


class Dropout(nn.Dropout):
    """nn.Dropout: sets a share p of the entries to 0 in training and scales the others up (Srivastava et al. 2014)."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        if not self.training or self.p == 0:
            return x
        return x * dropout_mask(x, self.p) if enabled(x) else F.dropout(x, self.p)


class BigramEmbedding(nn.Embedding):
    """A vector for each token together with the one before it, looked up by hash.

    Gives the first block at once what an attention head would first have to learn: to look one token back.
    Rows shared by hash: Svenstrup et al. 2017, arXiv:1709.03933.
    """

    def __init__(self, rows: int, d_model: int, dropout: float = 0.0):
        super().__init__(rows, d_model)
        self.dropout = dropout

    def forward(self, ids: Tensor, prev_ids: Tensor | None = None) -> Tensor:
        """Vectors for ids (B, T). prev_ids: (B,), the tokens before the first ones; None: there are none.

        Returns:
            (B, T, C).
        """
        if prev_ids is None:
            previous = F.pad(ids[:, :-1], (1, 0), value=-1)  # (B, T)
        else:
            previous = torch.cat([prev_ids[:, None], ids[:, :-1]], dim=1)  # (B, T)
        vectors = super().forward(self.rows(ids, previous))  # (B, T, C)
        return F.dropout1d(vectors, self.dropout, self.training)  # drops whole vectors

    def rows(self, ids: Tensor, previous: Tensor) -> Tensor:
        """Which row of the table each pair of tokens has, of any shape."""
        # Odd factors, so that each of the two alone reaches every row of a table of 2^n.
        return (previous * 40_503 ^ ids * 30_011) % self.num_embeddings


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: (..., I) -> (..., O), for weight (O, I)."""
    return (fast_linear if enabled(x, weight, compiles=True) else F.linear)(x, weight, bias)


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension."""
    return fast_rms_norm(x, eps) if enabled(x) else F.rms_norm(x, x.shape[-1:], eps=eps)


def gelu(x: Tensor) -> Tensor:
    """GELU in GPT-2's tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415), of any shape."""
    return fast_gelu(x) if enabled(x) else F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (Primer, So et al. 2021, arXiv:2109.08668), of any shape."""
    return fast_squared_relu(x) if enabled(x) else F.relu(x).square()


def swiglu(x: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): silu(gate) * value, for x = [gate | value]: (..., 2I) -> (..., I)."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def precompute_rope(context_length: int, head_dim: int, base: float) -> Rope:
    """Cosines and sines of the angles of rotary positions (Su et al. 2021, arXiv:2104.09864): (context_length, D/2)."""
    frequencies = base ** -(torch.arange(0, head_dim, 2) / head_dim)  # (D/2,)
    angles = torch.outer(torch.arange(context_length), frequencies)  # (context_length, D/2)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates queries or keys x (B, T, heads, D) by their positions: rotary embeddings, arXiv:2104.09864, section 3.4.

    Entries i and i + D/2 of a head are a point (x1, x2) in a plane, which turns by position x base^(-2i/D) radians.

    Args:
        cos, sin: of these angles, (T, D/2) each; see `precompute_rope`.
    """
    if enabled(x):
        return fast_apply_rope(x, cos, sin)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (T, 1, D/2): the same for all heads
    x1, x2 = x.chunk(2, dim=-1)  # (B, T, heads, D/2) each
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1)


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0, causal: bool = False
) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V in one call, PyTorch's SDPA, which never holds all scores.

    Args:
        q: (B, H, T, D).
        k, v: (B, G, S, D), G a divisor of H.
        mask: true where a query may look; broadcasts to (B, H, T, S).

    Returns:
        The gathered values (B, H, T, D).
    """
    attend = fast_sdpa_attention if enabled(q, k, v) else F.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=q.size(1) != k.size(1))


def sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, dropout: float = 0.0) -> Tensor:
    """Causal attention in which query t sees the keys t - window + 1 ... t (Longformer, Beltagy et al. 2020,
    arXiv:2004.05150; Mistral, Jiang et al. 2023, arXiv:2310.06825). Shapes as in `sdpa_attention`, S = T.
    """
    T = q.size(2)
    if window >= T:
        return sdpa_attention(q, k, v, None, dropout, causal=True)
    if enabled(compiles=True):  # of any device and precision
        return fast_sliding_window_attention(q, k, v, window, dropout)
    band = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(1 - window)  # (T, T)
    return sdpa_attention(q, k, v, band, dropout)


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of the logits x W^T.

    Args:
        x: (N, C), what goes into the output layer.
        weight: its matrix, (V, C).
        targets: (N,) token ids.
    """
    if enabled(x, weight):
        return fused_linear_cross_entropy(x, weight, targets)
    return F.cross_entropy(linear(x, weight), targets)
