"""The network's operators once more, faster: one file an operator, and one switch that turns all of them off.

model/layers.py asks `enabled` at every call. Off, everything is plain PyTorch and the numbers are the same, up to
rounding (tests/model/kernels/test_kernels.py): `TINY_GPT_KERNELS=0` in the environment, or `switch(False)`.
`python -m benchmarks.kernels` prints what each is worth.
"""

import os

import torch
from torch import Tensor

_on = os.environ.get("TINY_GPT_KERNELS", "1").lower() not in ("0", "off", "false")


def enabled(*tensors: Tensor, compiles: bool = False) -> bool:
    """Whether a kernel takes over for these inputs: plain float32 on a CPU, outside of torch.compile and autocast.

    Args:
        tensors: none asks for the switch alone.
        compiles: for a kernel that torch.compile can take in.
    """
    if not _on or (torch.compiler.is_compiling() and not compiles):
        return False
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or not tensor.is_cpu:
            return False
    return not (tensors and torch.is_autocast_enabled("cpu"))


def switch(on: bool) -> None:
    """Turns all kernels of this process on or off."""
    global _on
    _on = on
