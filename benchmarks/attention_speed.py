"""Three attentions side by side: written out, fused, and windowed, forward and backward, without projections.

    python -m benchmarks.attention_speed

Every length has the same number of tokens in a batch, and the three take turns, so that a disturbance of the machine
meets all. Times are medians after a warm-up; memory is the most a pass takes beside its inputs, measured in a process
of its own. The last line is JSON.
"""

import json
import math
import statistics
import time

import torch

from benchmarks.memory_of import measure_memory
from benchmarks.workload import attention_pass
from model.config import GPTConfig

LENGTHS, TOKENS, WINDOW, ROUNDS = (512, 1024, 2048, 4096, 8192), 8192, 256, 7
SHAPE = GPTConfig(vocab_size=1, num_heads=4, d_model=128, attention_window=WINDOW)
NAMES = ("written_out", "fused", "windowed")
MEMORY_BUDGET_MB = 4096
PROMISES = (("windowed", "fused", 8192, 5), ("fused", "written_out", 4096, 8))  # faster, slower, at, times at least
PROMISED_EXPONENT = 1.1


def options(name: str, length: int) -> dict:
    """What names one measurement to `attention_pass` and `measure_memory`."""
    return {"config": SHAPE, "implementation": name, "context_length": length, "sequences": TOKENS // length}


def fits(name: str, length: int) -> bool:
    """Written out, about five score matrices of four bytes a number are alive at once."""
    return name != "written_out" or 5 * 4 * SHAPE.num_heads * TOKENS * length / 2**20 <= MEMORY_BUDGET_MB


def pass_ms(length: int) -> dict[str, float]:
    """Median milliseconds of a batch, for each that fits."""
    passes = {name: attention_pass(**options(name, length), device="cpu") for name in NAMES if fits(name, length)}
    times = {name: [] for name in passes}
    for _ in range(ROUNDS + 1):
        for name, run in passes.items():
            start = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(each[1:]) for name, each in times.items()}  # the first is the warm-up


def extra_mb(name: str, length: int) -> float:
    """The peak of one pass without the four tensors it starts from: queries, keys, values and the output's gradient."""
    measured = measure_memory("attention_pass", "cpu", torch.get_num_threads(), options(name, length))
    return measured["peak"] - 4 * 4 * TOKENS * SHAPE.d_model / 2**20


def exponent(ms: dict[int, dict[str, float]], name: str) -> float:
    """The slope of the time of one sequence over its length, both as logarithms."""
    lengths = [length for length in ms if name in ms[length]]
    times = [math.log(ms[length][name] * length / TOKENS) for length in lengths]
    return statistics.linear_regression([math.log(length) for length in lengths], times).slope


def main() -> None:
    """Prints a line a length, the exponents, what is promised, and one JSON line."""
    print(f"forward and backward of {TOKENS:,} tokens, {SHAPE.num_heads} heads of {SHAPE.head_dim}, window {WINDOW}, "
          f"{torch.get_num_threads()} threads; median of {ROUNDS} in turn\n")  # fmt: skip
    print(f"{'':>8} {'milliseconds':^36}   {'MB beside the inputs':^36}")
    print(f"{'context':>8}" + 2 * (" " + " ".join(f"{name.replace('_', ' '):>11}" for name in NAMES) + "  "))
    ms, mb = {}, {}
    for length in LENGTHS:
        ms[length] = pass_ms(length)
        mb[length] = {name: extra_mb(name, length) for name in ms[length]}
        columns = (" ".join(f"{row[n]:11,.1f}" if n in row else f"{'skipped':>11}" for n in NAMES)
                   for row in (ms[length], mb[length]))  # fmt: skip
        print(f"{length:8,} " + "   ".join(columns), flush=True)
    print(f"(skipped: more than {MEMORY_BUDGET_MB:,} MB)\n")

    exponents = {name: exponent(ms, name) for name in NAMES}
    for name, power in exponents.items():
        print(f"time of one sequence, {name.replace('_', ' ')}: grows as its length to the power {power:.2f}")
    print(f"promised of windowed: at most {PROMISED_EXPONENT}")
    ratios = {}
    for fast, slow, length, promised in PROMISES:
        ratios[f"{fast}_over_{slow}_at_{length}"] = ratio = ms[length][slow] / ms[length][fast]
        print(f"at {length:,} tokens, {fast} is {ratio:.1f} times as fast as {slow.replace('_', ' ')}; "
              f"promised: at least {promised}")  # fmt: skip
    rounded = {
        key: {length: {name: round(x, 2) for name, x in row.items()} for length, row in rows.items()}
        for key, rows in (("ms", ms), ("extra_mb", mb))
    }
    print(json.dumps({"benchmark": "attention_speed", "threads": torch.get_num_threads(), "window": WINDOW, **rounded,
                      "exponents": {name: round(x, 3) for name, x in exponents.items()},
                      "speedups": {name: round(x, 2) for name, x in ratios.items()}}))  # fmt: skip


if __name__ == "__main__":
    main()
