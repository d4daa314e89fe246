"""The benefit of each kernel on this machine: the time of a training step without it, relative to one with it.

    python -m benchmarks.kernels [key=value ...]      the keys: configs/kernels.yaml

Three steps on the CPU: that of the default run, in the precision that it uses here, and two of a GPT-2 with 4 layers,
4 heads and width 128 in float32, at context lengths of 64 and 1,024. Each row removes one kernel and keeps all others;
the last row removes all. Steps with and without the kernel alternate in one process, each with its own network and
optimizer. Figures are medians over all pairs of neighboring steps. 1.00 means no benefit, and `-` that the step does
not use the kernel. A kernel marked `*` is not used on this processor; its row measures it as if it were.
The last line is JSON.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.training_speed import Case, cases, our_step
from configs.entry_point import entry_point
from configs.schema import KernelsConfig
from model import kernels, layers
from model.kernels import onednn
from model.kernels.bfloat16 import BF16_MATMUL
from system.machine import machine
from system.memory import disable_malloc_trim
from system.text import pluralize

WARMUP_STEPS = 3


def plain_apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The formula of model/layers.py."""
    with all_disabled():
        return layers.apply_rope(x, cos, sin)


def plain_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Computes all logits at once; the output layer may still use a kernel."""
    return F.cross_entropy(layers.linear(x, weight), targets)


def plain_short_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """PyTorch's fused attention."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


def plain_dropout_mask(x: Tensor, p: float) -> Tensor:
    """PyTorch's dropout applied to ones."""
    return F.dropout(torch.ones_like(x), p)


# Kernel -> its replacements: (module that looks the name up, name, plain PyTorch).
SHORT_ATTENTION = "attention.py, short"
KERNELS: dict[str, list[tuple[str, str, Callable]]] = {
    "onednn.py, with attention.py": [("model.kernels.onednn", "onednn_is_faster", lambda: False)],
    "bfloat16.py": [("model.kernels.linear", "bf16_matmul_enabled", lambda: False),
                    ("model.kernels.cross_entropy", "bf16_matmul_enabled", lambda: False)],
    SHORT_ATTENTION: [("model.kernels.attention", "short_attention", plain_short_attention)],
    "attention.py, oneDNN": [("model.kernels.attention", "onednn_attention", F.scaled_dot_product_attention)],
    "cross_entropy.py": [("model.layers", "fused_linear_cross_entropy", plain_cross_entropy)],
    "norm.py": [("model.layers", "fast_rms_norm", lambda x, eps: F.rms_norm(x, x.shape[-1:], eps=eps))],
    "rope.py": [("model.layers", "fast_apply_rope", plain_apply_rope)],
    "activation.py, GELU": [("model.layers", "fast_gelu", lambda x: F.gelu(x, approximate="tanh"))],
    "activation.py, squared ReLU": [("model.layers", "fast_squared_relu", lambda x: F.relu(x).square())],
    "dropout.py": [("model.layers", "dropout_mask", plain_dropout_mask),
                   ("model.kernels.attention", "dropout_mask", plain_dropout_mask)],
}  # fmt: skip


@contextmanager
def all_disabled() -> Iterator[None]:
    """Disables all kernels."""
    kernels.set_enabled(False)
    try:
        yield
    finally:
        kernels.set_enabled(True)


def is_forced(name: str) -> bool:
    """Whether a kernel is measured although this processor does not use it."""
    return name == SHORT_ATTENTION and onednn.onednn_is_faster() and not onednn.short_attention_is_faster()


def with_kernel(name: str) -> AbstractContextManager:
    """Context in which the kernel is used, also on a processor that does not use it by itself."""
    return patch.object(onednn, "short_attention_is_faster", lambda: True) if is_forced(name) else nullcontext()


@contextmanager
def without_kernel(name: str) -> Iterator[list[int]]:
    """Replaces one kernel with plain PyTorch. Yields a list with one entry per call of the replacement."""
    calls = []

    def counted(plain: Callable) -> Callable:
        def call(*args, **options):
            calls.append(1)
            return plain(*args, **options)

        return call

    with ExitStack() as stack:
        stack.enter_context(with_kernel(name))
        for module, attribute, plain in KERNELS[name]:
            stack.enter_context(patch(f"{module}.{attribute}", counted(plain)))
        yield calls


def step_time_ratio(
    case: Case, with_: Callable[[], AbstractContextManager], without: Callable[[], AbstractContextManager], pairs: int
) -> float:
    """Median over pairs of steps: the time of a step in the context `without`, divided by that in `with_`."""
    sides = [(our_step(case), with_), (our_step(case), without)]
    ratios = []
    for pair in range(WARMUP_STEPS + pairs):
        seconds = [0.0, 0.0]
        for side in (pair % 2, 1 - pair % 2):  # each side is first in half of the pairs
            step, context = sides[side]
            with context():
                start = time.perf_counter()
                step()
                seconds[side] = time.perf_counter() - start
        if pair >= WARMUP_STEPS:
            ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


def measure(case: Case, name: str, pairs: int) -> float | None:
    """Step time without this kernel, relative to that with it; None if the step does not use it."""
    with without_kernel(name) as calls:
        our_step(case)()
    if not calls or (name == "bfloat16.py" and case.precision != BF16_MATMUL):
        return None
    return step_time_ratio(case, lambda: with_kernel(name), lambda: without_kernel(name), pairs)


def measured_cases(vocab_size: int) -> dict[str, Case]:
    """The step of the default run, in the precision that it uses here, and two steps of a GPT-2."""
    found = {case.name: case for case in cases(vocab_size)}
    gpt2 = found["gpt2 12 x 64"]
    long = replace(gpt2, config=replace(gpt2.config, context_length=1024), batch_size=1)
    return {"default": found.get("its bfloat16", found["default"]), "gpt2": gpt2, "gpt2 1,024": long}


def main(config: KernelsConfig) -> None:
    """Prints one row per kernel, and one JSON line."""
    torch.manual_seed(0)
    if config.keep_memory:
        disable_malloc_trim()
    steps = measured_cases(config.vocab_size)
    print(f"on {machine()}\n{pluralize(torch.get_num_threads(), 'thread')}; step time without the kernel, relative to "
          f"that with it; median of {config.pairs} pairs\n")  # fmt: skip
    print(f"{'model/kernels/':30}" + "".join(f"{name:>12}" for name in steps))
    results: dict[str, dict[str, float | None]] = {}
    for kernel in (*KERNELS, "all"):
        row = {}
        for name, case in steps.items():
            if kernel == "all":
                row[name] = step_time_ratio(case, nullcontext, all_disabled, config.pairs)
            else:
                row[name] = measure(case, kernel, config.pairs)
        results[kernel] = {name: value and round(value, 3) for name, value in row.items()}
        cells = ("-" if value is None else f"{value:.3f}" for value in row.values())
        print(f"{kernel + ' *' * is_forced(kernel):30}" + "".join(f"{cell:>12}" for cell in cells), flush=True)
    forced = [name for name in KERNELS if is_forced(name)]
    if forced:
        print("* not used on this processor")
    print(json.dumps({"benchmark": "kernels", "machine": machine(), "threads": torch.get_num_threads(),
                      "vocab_size": config.vocab_size, "pairs": config.pairs, "not_used_here": forced,
                      "step_time_without": results}))  # fmt: skip


if __name__ == "__main__":
    entry_point(main, "kernels")
