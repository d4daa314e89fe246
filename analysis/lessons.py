"""Lessons on attention: the causal mask, and what context length costs. No checkpoint is needed.

python -m analysis.lessons [lengths=[256,1024] num_layers=6 num_heads=6]
"""

from configs.entry_point import entry_point  # isort: skip -- first: Ctrl-C may come during the other imports

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis.config import LessonsConfig
from model.attention import MultiHeadAttention, eager_attention
from model.flops import score_matrix_bytes
from system.machine import machine
from system.text import pluralize

HEAD_DIM = 64
"""Width of the one head that is timed."""
MAX_SPREAD = 2.0
"""The median of repeated runs, relative to the fastest, above which a time is marked as unreliable."""


@dataclass(frozen=True)
class Timing:
    """Time of repeated runs. The fastest is the one that other programs disturbed least."""

    ms: float
    spread: float = 1.0
    """Median relative to the fastest."""

    @property
    def is_reliable(self) -> bool:
        """Whether the runs agree."""
        return self.spread <= MAX_SPREAD


def main(config: LessonsConfig) -> None:
    """Prints the three lessons."""
    print(weights_part())
    print(infinity_part())
    print(COST_TEXT.format(layers=pluralize(config.num_layers, "layer"), heads=pluralize(config.num_heads, "head")))
    cost_part(sorted(set(config.lengths)), config.num_layers, config.num_heads)


# Weights with and without the mask


def five_tokens() -> tuple[MultiHeadAttention, Tensor]:
    """One head of width 8 and five random tokens (1, 5, 8), with fixed weights."""
    torch.manual_seed(0)
    x = torch.randn(1, 5, 8)
    query, key, value = (nn.Linear(8, 8, bias=False) for _ in range(3))
    attention = MultiHeadAttention(8, 1)
    attention.in_proj.weight.data = torch.cat([query.weight, key.weight, value.weight])
    return attention, x


@torch.no_grad()
def weights_part() -> str:
    """Attention weights with and without the causal mask."""
    attention, x = five_tokens()
    _, free = attention(x, need_weights=True)  # (1, 1, 5, 5)
    _, masked = attention(x, causal=True, need_weights=True)
    free, masked = free[0, 0], masked[0, 0]
    above = masked.triu(1).sum().item()
    difference = (free[-1] - masked[-1]).abs().max().item()
    return f"""
1  ATTENTION WEIGHTS

Five tokens, one head. Rows are queries and columns are keys; each row is one token's attention
weights, which sum to 1.

Without a mask every token attends to every token:

{table(free)}

With the causal mask no token attends to later ones. Training needs that: each position learns to
predict the next token, and must not see it.

{table(masked)}

The first token attends only to itself:          a weight of {masked[0, 0]:.2f}
Weights above the diagonal, of later tokens:     they sum to {above:.2f}
The last token attends to all in both tables:    its rows differ by {difference:.2f}
"""


def table(weights: Tensor) -> str:
    """Formats weights (T, T) to two decimals."""
    T = len(weights)
    head = f"{'':12}" + "".join(f"{f'token {n + 1}':>9}" for n in range(T))
    lines = [f"    token {n + 1} " + "".join(f"{w:9.2f}" for w in row) for n, row in enumerate(weights.tolist())]
    return "\n".join([head, *lines])


# Why minus infinity


def infinity_part() -> str:
    """Softmax of three scores, with the last one masked with 0 and with minus infinity."""
    lines = []
    for scores, what in (
        ([2.0, 1.0, 0.0], "masked with 0: it keeps a weight"),
        ([2.0, 1.0, -torch.inf], "masked with -inf: exactly 0"),
    ):
        weights = ", ".join(f"{weight:.3f}" for weight in torch.tensor(scores).softmax(0))
        lines.append(
            f"    softmax of {'[' + ', '.join(f'{score:g}' for score in scores) + ']':<12} = [{weights}]   {what}"
        )
    return "\n".join(
        [
            "",
            "2  WHY THE MASK IS -INF AND NOT 0",
            "",
            "Scores become weights through exp, and exp(0) is 1: a score of 0 still counts. exp(-inf) is 0,",
            "and the other weights still sum to 1. So the mask is applied before the softmax. To mask the third:",
            "",
            *lines,
            "",
        ]
    )


# Memory and time

COST_TEXT = """
3  WHAT LENGTH COSTS

Eager attention stores one score for every pair of tokens: 16 times the length takes 256 times
the memory. That is for one head of one layer; training a model of {layers} of {heads}
keeps all of them in memory. Fused attention (SDPA) never stores the matrix, and is faster.

The time is that of the forward pass of one head of width 64: the fastest of repeated runs. If only
the number of pairs mattered, the last two columns would be equal. At short lengths, the overhead of
starting each operation dominates and hides the growth. A matrix too large for the cache adds time.
"""


def cost_part(lengths: list[int], num_layers: int, num_heads: int) -> None:
    """Prints memory by formula and measured time, one line per length, and how much both grow."""
    times = f"x{num_layers * num_heads}"
    print(f"{'context':>8} {'':>15} {'score matrix, MB':>23}   {'measured, ms':>19}   {'times the last line':>19}")
    print(f"{'length':>8} {'pairs':>15} {'one head':>11} {times:>11}   {'eager':>11} {'SDPA':>7}", end="")
    print(f"   {'pairs':>9} {'time':>9}")
    previous_length, previous, timings = None, None, []
    for length in lengths:
        one, model = score_matrix_bytes(length), score_matrix_bytes(length, num_heads, num_layers)
        eager, sdpa = time_one_head(length)
        pairs = ratio(length**2, previous_length**2 if previous_length else None)
        reliable = all(timing is not None and timing.is_reliable for timing in (eager, previous))
        growth = ratio(eager.ms, previous.ms) if reliable else "-"
        print(
            f"{length:>8,} {length**2:>15,} {one / 2**20:>11,.1f} {model / 2**20:>11,.1f}   "
            f"{format_timing(eager):>11} {format_timing(sdpa):>7}   {pairs:>9} {growth:>9}",
            flush=True,
        )
        previous_length, previous = length, eager
        timings += [eager, sdpa]
    print(f"\nMeasured on {machine()}")
    notes = ["MB = 2^20 bytes, float32."]
    if None in timings:
        notes.append("A time of - was not measured: it would not fit into the free memory.")
    print(" ".join(notes))
    if any(timing and not timing.is_reliable for timing in timings):
        print(f"~ The median run took more than {MAX_SPREAD:g} times as long as the fastest: other programs use the "
              "processor.\n  Close them and repeat to get times that can be compared.")  # fmt: skip


def ratio(value: float | None, previous: float | None) -> str:
    """How many times larger a value is than the previous one."""
    return f"{value / previous:,.1f}" if value and previous else "-"


def format_timing(timing: Timing | None) -> str:
    """Milliseconds, to 10 microseconds; marked with ~ if unreliable."""
    return "-" if timing is None else f"{'' if timing.is_reliable else '~'}{timing.ms:,.2f}"


@torch.no_grad()
def time_one_head(length: int) -> tuple[Timing | None, Timing | None]:
    """Times one causal head, eager and SDPA; None for what does not fit into the free memory."""
    free = psutil.virtual_memory().available
    if 4 * length * HEAD_DIM * 4 > free:  # queries, keys, values and the output in float32
        return None, None
    q, k, v = (torch.randn(1, 1, length, HEAD_DIM) for _ in range(3))  # (B, H, T, D)
    sdpa = time_runs(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    if 3 * score_matrix_bytes(length) > free:  # scores, before and after scaling, and the mask
        return None, sdpa
    mask = torch.ones(length, length, dtype=torch.bool).tril()  # (T, T)
    return time_runs(lambda: eager_attention(q, k, v, mask)), sdpa


def time_runs(work: Callable[[], object]) -> Timing:
    """Times up to 50 runs within half a second, at least 5, after two runs to warm up."""
    for _ in range(2):
        work()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < 0.5 and len(times) < 50):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    fastest = min(times)
    return Timing(1000 * fastest, statistics.median(times) / fastest if fastest else 1.0)


if __name__ == "__main__":
    entry_point(main, "lessons")
