"""Causal attention to the last few tokens: time and memory grow linearly with the length of the text.

On CUDA, where it can, it goes through model/kernels/flex_attention.py. Everywhere else:

    queries    first `window`      then blocks of `block` tokens
    keys       their causal past   the block itself and the `window` tokens before it

Every block is one more sequence in a batch for PyTorch's fused attention, under one mask that all blocks share.
Letters as in model/attention.py, and n: blocks a sequence.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels.flex_attention import flex_sliding_window_attention, takes_flex_attention


def sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, dropout: float = 0.0) -> Tensor:
    """Lets query t gather from the keys t - window + 1 ... t.

    Args:
        q: (B, H, T, D).
        k, v: (B, G, T, D), G a divisor of H.
        window: tokens a query looks at, itself included, from 1 to T - 1.
        dropout: share of attention weights dropped.

    Returns:
        (B, H, T, D).
    """
    H, T, G = q.size(1), q.size(2), k.size(1)
    if window + 64 >= T:  # too short for blocks to pay: the whole matrix under a mask
        seen = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        return F.scaled_dot_product_attention(q, k, v, seen, dropout, enable_gqa=G != H)
    if takes_flex_attention(q, dropout):
        return flex_sliding_window_attention(q, k, v, window)
    return attention_in_blocks(q, k, v, window, dropout)


def attention_in_blocks(q: Tensor, k: Tensor, v: Tensor, window: int, dropout: float = 0.0) -> Tensor:
    """The same for a window below T: blocks of queries against the tokens before them, in plain PyTorch.

    Takes about T x 1.25 window x H x D multiplications for the scores, where full causal attention takes
    T x T / 2 x H x D. Measured on CPUs only.
    """
    (B, H, T, _), G = q.shape, k.size(1)
    if B > 1 and T >= 1024:  # blocks of one sequence are views; those of several make one batch only when copied
        sequences = zip(q.split(1), k.split(1), v.split(1), strict=True)
        return torch.cat([attention_in_blocks(*one, window, dropout) for one in sequences])
    if G != H:  # before the blocks are made: there every key stands in several blocks
        k, v = k.repeat_interleave(H // G, dim=1), v.repeat_interleave(H // G, dim=1)  # (B, H, T, D)
    block = max(32, window // 4)  # smaller: each key in more blocks; larger: more scores made only to be masked
    padding = -(T - window) % block
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, T, H, D)
    if padding:  # tokens after the last one, which no query sees
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v))  # (B, window + n block, H, D)

    start, rest = q.tensor_split([window], dim=1)  # (B, window, H, D) and (B, n block, H, D)
    start = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (start, k[:, :window], v[:, :window])), dropout_p=dropout, is_causal=True
    )  # (B, H, window, D)

    # Query r of a block is token window + r of its span, and sees the tokens r + 1 ... window + r.
    seen = torch.ones(block, window + block, dtype=torch.bool, device=q.device).tril(window).triu(1)
    rest = rest.unflatten(1, (-1, block))  # (B, n, block, H, D)
    k, v = (Spans.apply(x, block, window + block) for x in (k, v))  # (B, n, window + block, H, D)
    rest = F.scaled_dot_product_attention(
        *(x.flatten(0, 1).transpose(1, 2) for x in (rest, k, v)), seen, dropout
    )  # (B n, H, block, D)
    rest = rest.transpose(1, 2).unflatten(0, (B, -1)).flatten(1, 2)  # (B, n block, H, D)
    return torch.cat([start.transpose(1, 2), rest], dim=1)[:, :T].transpose(1, 2)  # (B, H, T, D)


class Spans(torch.autograd.Function):
    """Overlapping spans of tokens: (B, T, H, D) -> (B, n, span, H, D), the i-th from token i x step on.

    What Tensor.unfold does, and a view of x as there; with unfold's backward all of attention takes a tenth longer.
    """

    @staticmethod
    def forward(ctx, x: Tensor, step: int, span: int) -> Tensor:
        """A view of x."""
        ctx.length, ctx.step = x.size(1), step
        return x.unfold(1, span, step).movedim(-1, 2)  # (B, n, H, D, span) -> (B, n, span, H, D)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Adds up what a token gets from each span it is in; the i-th steps of all spans lie side by side."""
        B, n, span, H, D = gradient.shape
        step = ctx.step
        total = gradient.new_zeros(B, ctx.length + step, H, D)  # room for a last step that `span` cuts short
        for begin in range(0, span, step):
            part = gradient[:, :, begin : begin + step]  # (B, n, step, H, D)
            place = total[:, begin : begin + n * step].unflatten(1, (n, step))  # (B, n, step, H, D)
            place[:, :, : part.size(2)] += part
        return total[:, : ctx.length], None, None
