"""Speed of the default network's float32 matrix products in oneDNN, compared with PyTorch's own (MKL).

    python -m benchmarks.linear_speed

Forward and backward for the shape of each linear layer. Both alternate; times are medians after a warm-up. The last
line is JSON.
"""

import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.arguments import check_no_arguments
from configs.entry_point import entry_point
from model.kernels.onednn import has_onednn, onednn_is_faster, onednn_linear
from system.errors import UserError
from system.machine import machine

TOKENS = 24 * 64  # a batch of the default run
SHAPES = {"attention in": (128, 384), "attention out": (128, 128), "mlp up": (128, 512), "mlp down": (512, 128)}
WARMUP, ROUNDS = 10, 100


def step_ms(product, x: Tensor, weight: Tensor, grad: Tensor) -> float:
    """Milliseconds of one forward product and its two backward products."""
    start = time.perf_counter()
    torch.autograd.grad(product(x, weight), (x, weight), grad)
    return 1000 * (time.perf_counter() - start)


def main(arguments: list[str]) -> None:
    """Prints one line per shape, and one JSON line. Raises UserError without oneDNN."""
    check_no_arguments(arguments)
    if not has_onednn():
        raise UserError(
            "This PyTorch has no oneDNN to compare with: model/kernels/linear.py uses PyTorch's own product."
        )
    print(f"{'layer':14} {'PyTorch, ms':>12} {'oneDNN, ms':>11} {'GFLOP/s':>16} {'ratio':>7}")
    totals = [0.0, 0.0]
    for name, (inputs, outputs) in SHAPES.items():
        x = torch.randn(TOKENS, inputs, requires_grad=True)
        weight = torch.randn(outputs, inputs, requires_grad=True)
        grad = torch.randn(TOKENS, outputs)
        times = [(step_ms(F.linear, x, weight, grad), step_ms(onednn_linear, x, weight, grad)) for _ in range(ROUNDS)]
        theirs, ours = (statistics.median(side) for side in zip(*times[WARMUP:], strict=True))
        totals = [totals[0] + theirs, totals[1] + ours]
        speeds = [3 * 2 * TOKENS * inputs * outputs / ms / 1e6 for ms in (theirs, ours)]
        print(f"{name:14} {theirs:12.2f} {ours:11.2f} {speeds[0]:8.0f}{speeds[1]:8.0f} {theirs / ours:7.2f}")
    chosen = "oneDNN" if onednn_is_faster() else "PyTorch's own"
    print(f"model/kernels/linear.py uses {chosen} on this machine")
    print(json.dumps({"benchmark": "linear_speed", "machine": machine(),
                      "torch_ms": round(totals[0], 3), "onednn_ms": round(totals[1], 3),
                      "ratio": round(totals[0] / totals[1], 3)}))  # fmt: skip


if __name__ == "__main__":
    entry_point(main)
