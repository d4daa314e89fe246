"""Attentions side by side: eager, SDPA, and sliding window, forward and backward, without projections.

    python -m benchmarks.attention_speed [key=value ...]      the keys: configs/attention_speed.yaml

On a CPU in float32. On CUDA in bfloat16, as training there, and sliding window attention in both of its algorithms: in
blocks through SDPA, and through flex attention. Every length has the same number of tokens in a batch, and all take
turns, so that a disturbance of the machine meets all. Times are medians after a warm-up; memory is the most a pass
takes beside its inputs, measured in a process of its own. The last line is JSON.
"""

import json
import math
import statistics
from dataclasses import dataclass

import torch

from benchmarks.context_cost import now
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
# Which is faster than which, at which length, and by how many times at least: only of a CPU something is promised.
CPU_RATIOS = (("sliding_window", "sdpa", 8192, 5), ("sdpa", "eager", 4096, 8))
CUDA_RATIOS = (("flex", "blocks", 8192, None), ("flex", "sdpa", 8192, None), ("sdpa", "eager", 4096, None))
PROMISED_EXPONENT = 1.1


@dataclass(frozen=True)
class Comparison:
    """What is compared, on what."""

    device: str
    names: tuple[str, ...]
    tokens: int
    dtype: torch.dtype

    def options(self, name: str, length: int) -> dict:
        """What names one measurement to `attention_pass` and `measure_memory`."""
        batch = {"context_length": length, "sequences": self.tokens // length, "dtype": self.dtype}
        return {"config": SHAPE, "implementation": name, **batch}

    def fits(self, name: str, length: int) -> bool:
        """Written out, about five score matrices are alive at once."""
        matrix = self.dtype.itemsize * SHAPE.num_heads * self.tokens * length
        return name != "eager" or 5 * matrix / 2**20 <= MEMORY_BUDGET_MB


def comparison_on(device: str, tokens: int) -> Comparison:
    """On CUDA sliding window attention is there twice; flex attention only where it works, which a warning tells."""
    if not device.startswith("cuda"):
        return Comparison(device, ("eager", "sdpa", "sliding_window"), tokens, torch.float32)
    flex = ("flex",) if flex_attention_works(torch.device(device), torch.bfloat16, SHAPE.head_dim) else ()
    return Comparison(device, ("eager", "sdpa", "blocks", *flex), tokens, torch.bfloat16)


def pass_ms(c: Comparison, length: int) -> dict[str, float]:
    """Median milliseconds of a batch, for each that fits."""
    torch.compiler.reset()  # so that flex attention's kernel is made for this length, as in a run that has but one
    passes = {
        name: attention_pass(**c.options(name, length), device=c.device) for name in c.names if c.fits(name, length)
    }
    times = {name: [] for name in passes}
    for _ in range(ROUNDS + 1):
        for name, run in passes.items():
            start = now(c.device)
            run()
            times[name].append(1000 * (now(c.device) - start))
    return {name: statistics.median(each[1:]) for name, each in times.items()}  # the first is the warm-up


def extra_mb(c: Comparison, name: str, length: int) -> float:
    """The peak of one pass without the four tensors it starts from: queries, keys, values and the output's gradient."""
    measured = measure_memory("attention_pass", c.device, torch.get_num_threads(), c.options(name, length))
    if measured is None:
        raise UserError(f"the process that measured the memory of {name} at {length} died. Lower tokens_per_batch.")
    return measured["peak"] - 4 * c.dtype.itemsize * c.tokens * SHAPE.d_model / 2**20


def exponent(c: Comparison, ms: dict[int, dict[str, float]], name: str) -> float:
    """The slope of the time of one sequence over its length, both as logarithms."""
    lengths = [length for length in ms if name in ms[length]]
    times = [math.log(ms[length][name] * length / c.tokens) for length in lengths]
    return statistics.linear_regression([math.log(length) for length in lengths], times).slope


def speedups(ms: dict[int, dict[str, float]], on_cuda: bool) -> dict[str, float]:
    """How many times as fast; prints each, where both were measured."""
    found = {}
    for fast, slow, length, promised in CUDA_RATIOS if on_cuda else CPU_RATIOS:
        if {fast, slow} <= set(ms.get(length, ())):
            found[f"{fast}_over_{slow}_at_{length}"] = ratio = ms[length][slow] / ms[length][fast]
            print(f"at {length:,} tokens, {fast} is {ratio:.1f} times as fast as {slow.replace('_', ' ')}"
                  + (f"; promised: at least {promised}" if promised else ""))  # fmt: skip
    return found


def main(config: AttentionSpeedConfig) -> None:
    """Prints a line a length, the exponents, what is promised, and one JSON line. Raises UserError."""
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
