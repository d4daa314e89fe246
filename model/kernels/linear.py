"""F.linear through the faster of PyTorch's two float32 matrix libraries, or in bfloat16 under `bf16_matmul`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels import onednn
from model.kernels.bfloat16 import bf16_linear, bf16_matmul_enabled


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear in float32: x W^T + b, (..., I) -> (..., O), for weight (O, I)."""
    if not torch.compiler.is_compiling() and bf16_matmul_enabled():
        y = bf16_linear(x, weight)
        return y if bias is None else y + bias
    # oneDNN does not accept an empty batch.
    return (onednn.onednn_linear if onednn.onednn_is_faster() and x.numel() else F.linear)(x, weight, bias)
