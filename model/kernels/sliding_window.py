"""Sliding window attention: time and memory grow linearly with the sequence length.

On CUDA it uses model/kernels/flex_attention.py where possible. Everywhere else, queries are cut into blocks:

    queries    the first `window` tokens      then blocks of `block` tokens
    keys       the same tokens, causally      the block and the `window` tokens before it

All blocks form one batch for F.scaled_dot_product_attention, with one mask for all of them.
Letters as in model/attention.py; n is the number of blocks per sequence.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels.flex_attention import can_use_flex_attention, flex_sliding_window_attention


def sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, dropout: float = 0.0) -> Tensor:
    """Causal attention in which query t attends to the keys t - window + 1 ... t.

    Args:
        q: (B, H, T, D).
        k, v: (B, G, T, D), where G divides H.
        window: number of tokens a query attends to, including its own, from 1 to T - 1.
        dropout: dropout probability of the attention weights.

    Returns:
        (B, H, T, D).
    """
    H, T, G = q.size(1), q.size(2), k.size(1)
    if window + 64 >= T:  # for so few tokens beyond the window, one masked product is faster than blocks
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, enable_gqa=G != H)
    if can_use_flex_attention(q, dropout):
        return flex_sliding_window_attention(q, k, v, window)
    return attention_in_blocks(q, k, v, window, dropout)


def attention_in_blocks(q: Tensor, k: Tensor, v: Tensor, window: int, dropout: float = 0.0) -> Tensor:
    """Sliding window attention in blocks of queries, in plain PyTorch. Arguments as above.

    The scores take about T x 1.25 window x H x D multiplications, where full causal attention takes
    T x T / 2 x H x D. Measured on CPUs only.
    """
    (B, H, T, _), G = q.shape, k.size(1)
    if B > 1 and T >= 1024:  # one sequence at a time: its blocks are a view, while a batch of several needs a copy
        sequences = zip(q.split(1), k.split(1), v.split(1), strict=True)
        return torch.cat([attention_in_blocks(*sequence, window, dropout) for sequence in sequences])
    if G != H:  # here and not below, where every key occurs in several blocks
        k, v = k.repeat_interleave(H // G, dim=1), v.repeat_interleave(H // G, dim=1)  # (B, H, T, D)
    block = max(32, window // 4)  # smaller: each key is in more blocks; larger: more scores are masked
    padding = -(T - window) % block
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, T, H, D)
    if padding:  # after the last token, so that no query attends to it
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v))  # (B, window + n block, H, D)

    start, rest = q.tensor_split([window], dim=1)  # (B, window, H, D) and (B, n block, H, D)
    start = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (start, k[:, :window], v[:, :window])), dropout_p=dropout, is_causal=True
    )  # (B, H, window, D)

    # Query i of a block is token window + i of the block's keys, and attends to tokens i + 1 ... window + i.
    mask = torch.ones(block, window + block, dtype=torch.bool, device=q.device).tril(window).triu(1)
    rest = rest.unflatten(1, (-1, block))  # (B, n, block, H, D)
    k, v = (_OverlappingBlocks.apply(x, window + block, block) for x in (k, v))  # (B, n, window + block, H, D)
    rest = F.scaled_dot_product_attention(
        *(x.flatten(0, 1).transpose(1, 2) for x in (rest, k, v)), mask, dropout
    )  # (B n, H, block, D)
    rest = rest.transpose(1, 2).unflatten(0, (B, -1)).flatten(1, 2)  # (B, n block, H, D)
    return torch.cat([start.transpose(1, 2), rest], dim=1)[:, :T].transpose(1, 2)  # (B, H, T, D)


class _OverlappingBlocks(torch.autograd.Function):
    """Tensor.unfold over the tokens: (B, T, H, D) -> (B, n, size, H, D), with block i starting at token i x step.

    Its backward pass is faster: with that of Tensor.unfold, attention takes a tenth longer.
    """

    @staticmethod
    def forward(ctx, x: Tensor, size: int, step: int) -> Tensor:
        """Returns a view of x."""
        ctx.length, ctx.step = x.size(1), step
        return x.unfold(1, size, step).movedim(-1, 2)  # (B, n, H, D, size) -> (B, n, size, H, D)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        """Sums the gradients of all blocks that a token is in, `step` tokens of every block at a time."""
        B, n, size, H, D = grad.shape
        step = ctx.step
        total = grad.new_zeros(B, ctx.length + step, H, D)  # with room for the last iteration, which may be shorter
        for start in range(0, size, step):
            part = grad[:, :, start : start + step]  # (B, n, step, H, D)
            target = total[:, start : start + n * step].unflatten(1, (n, step))  # (B, n, step, H, D)
            target[:, :, : part.size(2)] += part
        return total[:, : ctx.length], None, None
