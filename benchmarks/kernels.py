"""What each kernel is worth on this machine: a training step without it, over a step with all of them.

    python -m benchmarks.kernels [key=value ...]      the keys: configs/kernels.yaml

Two steps on the CPU: the default run's, at the precision that it takes here, and one of a GPT-2 of 4 layers, 4 heads
and width 128 in float32. One kernel is removed at a time, all others stay; the last row removes all. With and without
take turns, step by step, in one process, each with a network and an optimizer of its own; a figure is the median over
all pairs of neighboring steps. 1.00 is worth nothing. A `-` stands where the step does not use that kernel.
The last line is JSON.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.machine import machine
from benchmarks.training_speed import Case, cases, our_step
from configs.entry_point import entry_point
from configs.schema import KernelsConfig
from model import kernels, layers
from model.kernels.bfloat16 import BF16_MATMUL
from system.memory import disable_malloc_trim
from system.text import pluralize

WARMUP_STEPS = 3


def plain_apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As model/layers.py has it without the kernel."""
    with switched_off():
        return layers.apply_rope(x, cos, sin)


def plain_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The logits as a whole; their product may still be a kernel's."""
    return F.cross_entropy(layers.linear(x, weight), targets)


def plain_mask(x: Tensor, p: float) -> Tensor:
    """PyTorch's dropout of ones."""
    return F.dropout(torch.ones_like(x), p)


# Each kernel, and what takes its place: (where it is looked up, its name there, plain PyTorch).
KERNELS: dict[str, list[tuple[str, str, object]]] = {
    "onednn.py": [("model.kernels.onednn", "onednn_is_faster", lambda: False)],
    "bfloat16.py": [("model.kernels.linear", "bf16_matmul_enabled", lambda: False),
                    ("model.kernels.cross_entropy", "bf16_matmul_enabled", lambda: False)],
    "attention.py": [("model.layers", "fast_sdpa_attention", F.scaled_dot_product_attention)],
    "cross_entropy.py": [("model.layers", "fused_linear_cross_entropy", plain_cross_entropy)],
    "norm.py": [("model.layers", "fast_rms_norm", lambda x, eps: F.rms_norm(x, x.shape[-1:], eps=eps))],
    "rope.py": [("model.layers", "fast_apply_rope", plain_apply_rope)],
    "activation.py, GELU": [("model.layers", "fast_gelu", lambda x: F.gelu(x, approximate="tanh"))],
    "activation.py, squared ReLU": [("model.layers", "fast_squared_relu", lambda x: F.relu(x).square())],
    "dropout.py": [("model.layers", "dropout_mask", plain_mask),
                   ("model.kernels.attention", "dropout_mask", plain_mask)],
}  # fmt: skip


@contextmanager
def switched_off() -> Iterator[None]:
    """All kernels off."""
    kernels.set_enabled(False)
    try:
        yield
    finally:
        kernels.set_enabled(True)


@contextmanager
def without(name: str) -> Iterator[list[int]]:
    """One kernel replaced by plain PyTorch. Yields a list that gets an entry for every call of the replacement."""
    calls = []

    def counted_call(plain: Callable) -> Callable:
        def call(*args, **options):
            calls.append(1)
            return plain(*args, **options)

        return call

    with ExitStack() as stack:
        for module, attribute, plain in KERNELS[name]:
            stack.enter_context(patch(f"{module}.{attribute}", counted_call(plain)))
        yield calls


def ratios(case: Case, removed: Callable[[], object], pairs: int) -> list[float]:
    """How many times as long a step takes where `removed` is around it: of each of so many pairs of steps."""
    sides = [(our_step(case), nullcontext), (our_step(case), removed)]
    found = []
    for pair in range(WARMUP_STEPS + pairs):
        seconds = [0.0, 0.0]
        for side in (pair % 2, 1 - pair % 2):  # either goes first as often as the other
            step, context = sides[side]
            with context():
                start = time.perf_counter()
                step()
                seconds[side] = time.perf_counter() - start
        if pair >= WARMUP_STEPS:
            found.append(seconds[1] / seconds[0])
    return found


def worth(case: Case, name: str, pairs: int) -> float | None:
    """The median of `ratios` without this kernel; None where the step does not use it."""
    with without(name) as calls:
        our_step(case)()
    if not calls or (name == "bfloat16.py" and case.precision != BF16_MATMUL):
        return None
    return statistics.median(ratios(case, lambda: without(name), pairs))


def measured_cases(vocab_size: int) -> dict[str, Case]:
    """The default step, in the precision it takes here, and a GPT-2 step."""
    found = {case.name: case for case in cases(vocab_size)}
    return {"default": found.get("its bfloat16", found["default"]), "gpt2": found["gpt2 12 x 64"]}


def main(config: KernelsConfig) -> None:
    """Prints a row for each kernel, and one JSON line."""
    torch.manual_seed(0)
    if config.keep_memory:
        disable_malloc_trim()
    steps = measured_cases(config.vocab_size)
    on = machine()
    print(f"on {on}\n{pluralize(torch.get_num_threads(), 'thread')}; a step without the kernel, over one with all; "
          f"median of {config.pairs} pairs\n")  # fmt: skip
    print(f"{'model/kernels/':30}" + "".join(f"{name:>10}" for name in steps))
    results: dict[str, dict[str, float | None]] = {}
    for kernel in (*KERNELS, "all"):
        row = {}
        for name, case in steps.items():
            all_off = kernel == "all"
            ratio = statistics.median(ratios(case, switched_off, config.pairs)) if all_off else None
            row[name] = ratio if all_off else worth(case, kernel, config.pairs)
        results[kernel] = {name: value and round(value, 3) for name, value in row.items()}
        shown = (f"{'-' if value is None else f'{value:.3f}':>10}" for value in row.values())
        print(f"{kernel:30}" + "".join(shown), flush=True)
    print(json.dumps({"benchmark": "kernels", "machine": on, "threads": torch.get_num_threads(),
                      "vocab_size": config.vocab_size, "pairs": config.pairs,
                      "step_time_without": results}))  # fmt: skip


if __name__ == "__main__":
    entry_point(main, "kernels")
