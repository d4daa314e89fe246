"""Matrix products through the faster of PyTorch's two float32 libraries, or in bfloat16 if training wants that."""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels import onednn
from model.kernels.bfloat16 import bf16_linear, is_bf16_matmul


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear: x W^T + b, (..., I) -> (..., O), for weight (O, I), all of them float32."""
    if not torch.compiler.is_compiling() and is_bf16_matmul():
        y = bf16_linear(x, weight)
        return y if bias is None else y + bias
    # oneDNN refuses an empty batch.
    return (onednn.onednn_linear if onednn.onednn_is_faster() and x.numel() else F.linear)(x, weight, bias)
