"""Sliding window attention on CUDA with PyTorch's FlexAttention, a compiled kernel that skips fully masked blocks.

Its speed on a GPU has not been measured yet. `python -m benchmarks.attention_speed device=cuda` compares it with
blocks through SDPA and with full attention.
"""

import logging
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

logger = logging.getLogger(__name__)
BLOCK = 128  # tokens; the kernel computes or skips BLOCK x BLOCK scores at a time


def can_use_flex_attention(q: Tensor, dropout: float) -> bool:
    """Whether to use FlexAttention for queries (B, H, T, D): on CUDA, without dropout, if the kernel compiles.

    T must be a multiple of BLOCK: token-by-token decoding would need a mask, and perhaps a kernel, for every length.
    """
    if not q.is_cuda or dropout or q.size(2) % BLOCK:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else q.dtype
    return torch.compiler.is_compiling() or flex_attention_works(q.device, dtype, q.size(3))


@cache
def flex_attention_works(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Tries a small example, forward and backward. Warns once if it fails, for example without Triton or a compiler."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            q = torch.randn(1, 1, 2 * BLOCK, head_dim, dtype=dtype, device=device, requires_grad=True)
            flex_sliding_window_attention(q, q, q, BLOCK).sum().backward()
    except Exception as error:  # noqa: BLE001 -- the compiler may raise anything
        reason = type(error).__name__
        logger.warning(
            f"warning: FlexAttention does not work here ({reason}); sliding window attention uses blocks instead."
        )
        return False
    return True


def flex_sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Sliding window attention without dropout, for T a multiple of BLOCK.

    On a CPU it runs in eager mode and without gradients, for tests.

    Args:
        q: (B, H, T, D).
        k, v: (B, G, T, D), where G divides H.

    Returns:
        (B, H, T, D).
    """
    kind, T = q.device.type, q.size(2)
    if torch.is_autocast_enabled(kind):  # FlexAttention does not cast its inputs, unlike SDPA
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    compiling = torch.compiler.is_compiling()  # then this function is traced as part of the network
    block_mask = (sliding_window_block_mask if compiling else cached_block_mask)(T, window, q.device)
    attend = compiled_flex_attention() if q.is_cuda and not compiling else flex_attention
    return attend(q, k, v, block_mask=block_mask, enable_gqa=q.size(1) != k.size(1))


@cache
def compiled_flex_attention():
    """Returns the kernel, which is compiled at its first call."""
    return torch.compile(flex_attention)


def sliding_window_block_mask(length: int, window: int, device: torch.device) -> BlockMask:
    """Returns the BlockMask of sliding window attention.

    `create_block_mask` gives the same, but builds a length x length mask on the way.
    """
    with torch.inference_mode(False):  # a cached mask may be created in validation and used in training
        index = torch.arange(length // BLOCK, device=device)
        distance = index[:, None] - index  # from key block to query block, in blocks, (n, n)
        needed = (distance >= 0) & (BLOCK * distance - (BLOCK - 1) < window)  # by their closest query and key
        full = (distance > 0) & (BLOCK * distance + (BLOCK - 1) < window)  # by their most distant query and key
        kv_blocks = []
        for selected in (needed & ~full, full):
            selected_first = selected.int().argsort(dim=-1, descending=True, stable=True)  # (n, n)
            kv_blocks += [selected.sum(-1, dtype=torch.int32)[None, None], selected_first.int()[None, None]]

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (kv_idx <= q_idx) & (q_idx - kv_idx < window)

        return BlockMask.from_kv_blocks(*kv_blocks, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(length, length))


cached_block_mask = lru_cache(maxsize=16)(sliding_window_block_mask)
