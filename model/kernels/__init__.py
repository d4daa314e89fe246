"""Faster implementations of the model's operators, one file per operator.

model/layers.py calls `enabled` before every use. With kernels disabled (`kernels=off` on the command line,
`TINY_GPT_KERNELS=0` in the environment, or `set_enabled(False)`), the model is plain PyTorch and gives the same results
up to rounding.
`python -m benchmarks.kernels` measures the benefit of each kernel.
"""

import os

import torch
from torch import Tensor

_enabled = os.environ.get("TINY_GPT_KERNELS", "1").lower() not in ("0", "off", "false")


def enabled(*tensors: Tensor, compiles: bool = False) -> bool:
    """Whether to use a kernel: kernels are on, and the inputs are float32 on the CPU without compile and autocast.

    Args:
        tensors: the inputs. Without any, only the switch is checked.
        compiles: whether torch.compile can trace the kernel.
    """
    if not _enabled or (torch.compiler.is_compiling() and not compiles):
        return False
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or not tensor.is_cpu:
            return False
    return not (tensors and torch.is_autocast_enabled("cpu"))


class set_enabled:  # a function, and a context manager, as torch.set_grad_enabled
    """Turns all kernels on or off, for this process; as a context manager, only within its block."""

    def __init__(self, value: bool):
        global _enabled
        self._before = _enabled
        _enabled = value

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        global _enabled
        _enabled = self._before
