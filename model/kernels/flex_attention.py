"""Sliding window attention on CUDA: PyTorch's flex attention, a compiled kernel that skips blocks no query looks into.

How fast it is on a GPU has not been measured; `python -m benchmarks.attention_speed device=cuda` does, beside blocks
through SDPA and full attention.
"""

import logging
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

logger = logging.getLogger(__name__)
BLOCK = 128  # tokens a side of what the kernel computes or skips as a whole


def takes_flex_attention(q: Tensor, dropout: float) -> bool:
    """Whether sliding window attention of these queries (B, H, T, D) goes this way: on CUDA, where the kernel compiles.

    Whole blocks only: a text that grows token by token would need a mask, maybe a kernel, for every length.
    """
    if not q.is_cuda or dropout or q.size(2) % BLOCK:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else q.dtype
    return torch.compiler.is_compiling() or flex_works(q.device, dtype, q.size(3))


@cache
def flex_works(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Tries a small example, forward and backward; one warning where it fails, as without Triton or a compiler."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            q = torch.randn(1, 1, 2 * BLOCK, head_dim, dtype=dtype, device=device, requires_grad=True)
            flex_sliding_window_attention(q, q, q, BLOCK).sum().backward()
    except Exception as error:  # noqa: BLE001 -- the compiler may raise anything
        reason = type(error).__name__
        logger.warning(f"warning: flex attention does not work here ({reason}); windows go through blocks instead.")
        return False
    return True


def flex_sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Sliding window attention as in model/kernels/sliding_window.py, without dropout, T a multiple of BLOCK.

    On a CPU it runs eagerly and without a gradient, for tests.

    Args:
        q: (B, H, T, D).
        k, v: (B, G, T, D), G a divisor of H.

    Returns:
        (B, H, T, D).
    """
    kind, T = q.device.type, q.size(2)
    if torch.is_autocast_enabled(kind):  # SDPA sees to it itself
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    compiling = torch.compiler.is_compiling()  # the whole network: all this becomes a part of it
    blocks = (band_blocks if compiling else kept_band_blocks)(T, window, q.device)
    attend = compiled_flex_attention() if q.is_cuda and not compiling else flex_attention
    return attend(q, k, v, block_mask=blocks, enable_gqa=q.size(1) != k.size(1))


@cache
def compiled_flex_attention():
    """The kernel; compiled at its first call."""
    return torch.compile(flex_attention)


def band_blocks(length: int, window: int, device: torch.device) -> BlockMask:
    """Which blocks of keys a block of queries looks into, and whether whole or under the mask; never length x length
    numbers, which `create_block_mask` makes on the way to the same."""
    with torch.inference_mode(False):  # kept, it may be made in a validation and used in training
        places = torch.arange(length // BLOCK, device=device)
        apart = places[:, None] - places  # blocks from keys to queries, (n, n)
        seen = (apart >= 0) & (BLOCK * apart - (BLOCK - 1) < window)  # the nearest query and key of two blocks
        whole = (apart > 0) & (BLOCK * apart + (BLOCK - 1) < window)  # and the farthest
        lists = []
        for which in (seen & ~whole, whole):
            chosen_first = which.int().argsort(dim=-1, descending=True, stable=True)  # (n, n)
            lists += [which.sum(-1, dtype=torch.int32)[None, None], chosen_first.int()[None, None]]

        def mask(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query - key < window)

        return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=mask, seq_lengths=(length, length))


kept_band_blocks = lru_cache(maxsize=16)(band_blocks)
