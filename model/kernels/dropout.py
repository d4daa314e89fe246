"""Dropout masks from fewer random numbers: one 64-bit number for eight entries, where PyTorch draws one per entry."""

import torch
from torch import Tensor


def dropout_mask(x: Tensor, p: float) -> Tensor:
    """Returns random factors for x: 0 with probability p, else 1 / (1 - p). p is rounded to a multiple of 1/256."""
    threshold = min(max(1, round(256 * p)), 255)  # a byte below it drops the entry
    bits = torch.empty((x.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None)
    random_bytes = bits.view(torch.uint8)[: x.numel()].view(x.shape)
    # Arithmetic instead of a comparison, which is slow for bytes in PyTorch.
    return random_bytes.to(x.dtype).sub_(threshold - 1).clamp_(0, 1).mul_(256 / (256 - threshold))
