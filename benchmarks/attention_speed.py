"""Speed and memory of eager, SDPA and sliding window attention: forward and backward, without projections.

    python -m benchmarks.attention_speed [key=value ...]      the keys: configs/attention_speed.yaml

Uses float32 on a CPU. On CUDA it uses bfloat16, like training, and measures both implementations of sliding window
attention: blocks through SDPA, and flex attention. The number of tokens per batch is the same at every length. The
implementations alternate, so that other programs affect all of them alike. Times are medians after a warm-up. Memory
is the peak of one pass without its inputs, measured in a separate process. The last line is JSON.
"""

import json
import math
import statistics
from dataclasses import dataclass

import torch

from benchmarks.context_cost import synchronized_time
from benchmarks.memory_of import measure_memory
from benchmarks.workload import attention_pass
from configs.entry_point import entry_point
from configs.schema import AttentionSpeedConfig
from model.config import GPTConfig
from model.kernels.flex_attention import BLOCK, flex_attention_works
from sample import pick_device
from system.errors import UserError
from system.machine import machine
from system.text import pluralize

WINDOW, ROUNDS = 256, 7
SHAPE = GPTConfig(vocab_size=1, num_heads=4, d_model=128, sliding_window=WINDOW)
MEMORY_BUDGET_MB = 4096
# (faster, slower, context length, promised minimum ratio). Nothing is promised for CUDA.
CPU_RATIOS = (("sliding_window", "sdpa", 8192, 5), ("sdpa", "eager", 4096, 8))
CUDA_RATIOS = (("flex", "blocks", 8192, None), ("flex", "sdpa", 8192, None), ("sdpa", "eager", 4096, None))
PROMISED_EXPONENT = 1.1


@dataclass(frozen=True)
class Comparison:
    """The implementations to compare, and the device and batch to compare them on."""

    device: str
    names: tuple[str, ...]
    tokens: int
    dtype: torch.dtype

    def options(self, name: str, length: int) -> dict:
        """Arguments of `attention_pass` for one measurement."""
        batch = {"context_length": length, "sequences": self.tokens // length, "dtype": self.dtype}
        return {"config": SHAPE, "implementation": name, **batch}

    def fits(self, name: str, length: int) -> bool:
        """Whether the memory fits the budget. Eager attention holds about five score matrices at once."""
        matrix = self.dtype.itemsize * SHAPE.num_heads * self.tokens * length
        return name != "eager" or 5 * matrix / 2**20 <= MEMORY_BUDGET_MB


def comparison_on(device: str, tokens: int) -> Comparison:
    """Chooses the implementations for a device. Flex attention is left out, with a warning, where it does not work."""
    if not device.startswith("cuda"):
        return Comparison(device, ("eager", "sdpa", "sliding_window"), tokens, torch.float32)
    flex = ("flex",) if flex_attention_works(torch.device(device), torch.bfloat16, SHAPE.head_dim) else ()
    return Comparison(device, ("eager", "sdpa", "blocks", *flex), tokens, torch.bfloat16)


def pass_ms(c: Comparison, length: int) -> dict[str, float]:
    """Median milliseconds per batch of each implementation that fits."""
    torch.compiler.reset()  # compile flex attention for this length only, as in training
    passes = {
        name: attention_pass(**c.options(name, length), device=c.device) for name in c.names if c.fits(name, length)
    }
    times = {name: [] for name in passes}
    for _ in range(ROUNDS + 1):
        for name, run in passes.items():
            start = synchronized_time(c.device)
            run()
            times[name].append(1000 * (synchronized_time(c.device) - start))
    return {name: statistics.median(each[1:]) for name, each in times.items()}  # the first is the warm-up


def extra_mb(c: Comparison, name: str, length: int) -> float:
    """Peak memory of one pass, excluding the queries, keys, values and the gradient of the output."""
    measured = measure_memory("attention_pass", c.device, torch.get_num_threads(), c.options(name, length))
    if measured is None:
        raise UserError(f"the process that measured the memory of {name} at {length} died. Lower tokens_per_batch.")
    return measured["peak"] - 4 * c.dtype.itemsize * c.tokens * SHAPE.d_model / 2**20


def exponent(c: Comparison, ms: dict[int, dict[str, float]], name: str) -> float:
    """Slope of the time of one sequence over its length in a log-log plot."""
    lengths = [length for length in ms if name in ms[length]]
    times = [math.log(ms[length][name] * length / c.tokens) for length in lengths]
    return statistics.linear_regression([math.log(length) for length in lengths], times).slope


def speedups(ms: dict[int, dict[str, float]], on_cuda: bool) -> dict[str, float]:
    """Prints and returns the ratio of each pair of which both were measured."""
    found = {}
    for fast, slow, length, promised in CUDA_RATIOS if on_cuda else CPU_RATIOS:
        if {fast, slow} <= set(ms.get(length, ())):
            found[f"{fast}_over_{slow}_at_{length}"] = ratio = ms[length][slow] / ms[length][fast]
            print(f"at {length:,} tokens, {fast} is {ratio:.1f} times as fast as {slow.replace('_', ' ')}"
                  + (f"; promised: at least {promised}" if promised else ""))  # fmt: skip
    return found


def main(config: AttentionSpeedConfig) -> None:
    """Prints one line per length, exponents, ratios, and one JSON line. Raises UserError."""
    lengths, tokens = sorted(set(config.lengths)), config.tokens_per_batch
    if len(lengths) < 2 or lengths[0] <= WINDOW or any(tokens % length or length % BLOCK for length in lengths):
        raise UserError(
            f"lengths is {lengths}, but must list two or more multiples of {BLOCK} above the window of {WINDOW} "
            f"that divide tokens_per_batch, {tokens}."
        )
    c = comparison_on(pick_device(config.device), tokens)
    on_cuda, width = c.device.startswith("cuda"), 12 * len(c.names) + 2
    print(f"forward and backward of {tokens:,} tokens, {SHAPE.num_heads} heads of {SHAPE.head_dim}, window {WINDOW}; "
          f"{str(c.dtype).removeprefix('torch.')} on {c.device}, {pluralize(torch.get_num_threads(), 'thread')}; "
          f"median of {ROUNDS} in turn\n")  # fmt: skip
    print(f"{'':>8} {'milliseconds':^{width - 2}}   {'MB beside the inputs':^{width - 2}}".rstrip())
    print((f"{'context':>8}" + 2 * ("".join(f" {name.replace('_', ' '):>11}" for name in c.names) + "  ")).rstrip())
    ms, mb = {}, {}
    for length in lengths:
        ms[length] = pass_ms(c, length)
        mb[length] = {name: extra_mb(c, name, length) for name in ms[length]}
        columns = ("".join(f" {row[n]:11,.1f}" if n in row else f" {'skipped':>11}" for n in c.names)
                   for row in (ms[length], mb[length]))  # fmt: skip
        print(f"{length:8,}" + "  ".join(columns), flush=True)
    if any(set(row) < set(c.names) for row in ms.values()):
        print(f"(skipped: more than {MEMORY_BUDGET_MB:,} MB)")
    print()

    exponents = {name: exponent(c, ms, name) for name in c.names if sum(name in row for row in ms.values()) > 1}
    for name, power in exponents.items():
        print(f"time of one sequence, {name.replace('_', ' ')}: grows as its length to the power {power:.2f}")
    if not on_cuda:
        print(f"promised of sliding window: at most {PROMISED_EXPONENT}")
    ratios = speedups(ms, on_cuda)
    rounded = {
        key: {length: {name: round(x, 2) for name, x in row.items()} for length, row in rows.items()}
        for key, rows in (("ms", ms), ("extra_mb", mb))
    }
    print(json.dumps({"benchmark": "attention_speed", "machine": machine(), "device": c.device,
                      "threads": torch.get_num_threads(),
                      "window": WINDOW, **rounded,
                      "exponents": {name: round(x, 3) for name, x in exponents.items()},
                      "speedups": {name: round(x, 2) for name, x in ratios.items()}}))  # fmt: skip


if __name__ == "__main__":
    entry_point(main, "attention_speed")
