"""The two lessons this project grew out of, shown with its own attention; no checkpoint is needed.

python -m analysis.lessons [lengths=[256,1024] num_layers=6 num_heads=6]
"""

from configs.entry_point import entry_point  # isort: skip -- first: Ctrl-C may come during the other imports

import statistics
import time

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from analysis.config import LessonsConfig
from model.attention import MultiHeadAttention, eager_attention
from model.flops import score_matrix_bytes
from system.text import pluralize

HEAD_DIM = 64
"""Width of the one head that is timed."""


def main(config: LessonsConfig) -> None:
    """Prints all parts."""
    print(weights_part())
    print(infinity_part())
    print(COST_TEXT.format(layers=pluralize(config.num_layers, "layer"), heads=pluralize(config.num_heads, "head")))
    cost_part(sorted(set(config.lengths)), config.num_layers, config.num_heads)


# Weights with and without the mask


def five_tokens() -> tuple[MultiHeadAttention, Tensor]:
    """One head of width 8 and five random tokens (1, 5, 8), drawn in the lesson's order."""
    torch.manual_seed(0)
    x = torch.randn(1, 5, 8)
    query, key, value = (nn.Linear(8, 8, bias=False) for _ in range(3))
    attention = MultiHeadAttention(8, 1)
    attention.in_proj.weight.data = torch.cat([query.weight, key.weight, value.weight])
    return attention, x


@torch.no_grad()
def weights_part() -> str:
    """Both tables of weights, and what the mask changes."""
    attention, x = five_tokens()
    _, free = attention(x, need_weights=True)  # (1, 1, 5, 5)
    _, masked = attention(x, causal=True, need_weights=True)
    free, masked = free[0, 0], masked[0, 0]
    above = masked.triu(1).sum().item()
    difference = (free[-1] - masked[-1]).abs().max().item()
    return f"""
1  WHO LOOKS AT WHOM

Five tokens, one head. A row is a token that asks, a column a token it may look at; a row says
how it shares out its attention and sums to 1.

Without a mask everyone looks at everyone:

{table(free)}

With the causal mask nobody looks ahead. Training needs that: a token learns to predict the
next one, and must not read it off.

{table(masked)}

The first token has only itself to look at:        {masked[0, 0]:.2f} of its attention
Above the diagonal lies the future, all of it 0:   they sum to {above:.2f}
The last token may look at all, mask or no mask:   its rows differ by {difference:.2f}
"""


def table(weights: Tensor) -> str:
    """A row of weights a line, to two decimals."""
    T = len(weights)
    head = f"{'':12}" + "".join(f"{f'token {n + 1}':>9}" for n in range(T))
    lines = [f"    token {n + 1} " + "".join(f"{w:9.2f}" for w in row) for n, row in enumerate(weights.tolist())]
    return "\n".join([head, *lines])


# Why minus infinity


def infinity_part() -> str:
    """Softmax of three scores, with the last one as it is, set to 0, and set to minus infinity."""
    lines = []
    for scores, what in (
        ([2.0, 1.0, 0.0], "hidden by a 0: it keeps its share"),
        ([2.0, 1.0, -torch.inf], "hidden by -inf: exactly nothing"),
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
            "and the others share what it leaves. So the mask goes in before the softmax. To hide the third:",
            "",
            *lines,
            "",
        ]
    )


# Memory and time

COST_TEXT = """
3  WHAT LENGTH COSTS

Written out, attention holds a number for every pair of tokens: 16 times the length takes
256 times the memory. That is for one head of one layer; a model of {layers} of {heads}
trains with all of them in memory. Fused attention never stores the matrix, and is faster too.

The time is that of one head of 64, forward, after a warm-up. If pairs were all that counts, the
last two columns would be equal. At short lengths the overhead of starting each operation is most
of the time and hides the growth; a matrix that no longer fits into the cache adds some of its own.
"""


def cost_part(lengths: list[int], num_layers: int, num_heads: int) -> None:
    """The memory by formula and the measured time, a line a length as it is measured, and where growth shows."""
    times = f"x{num_layers * num_heads}"
    print(f"{'context':>8} {'':>15} {'score matrix, MB':>23}   {'measured, ms':>19}   {'times the last line':>19}")
    print(f"{'length':>8} {'pairs':>15} {'one head':>11} {times:>11}   {'eager':>11} {'SDPA':>7}", end="")
    print(f"   {'pairs':>9} {'time':>9}")
    last_length, last_ms, skipped = None, None, False
    for length in lengths:
        one, model = score_matrix_bytes(length), score_matrix_bytes(length, num_heads, num_layers)
        eager, sdpa = time_one_head(length)
        pairs = growth(length**2, last_length**2 if last_length else None)
        print(
            f"{length:>8,} {length**2:>15,} {one / 2**20:>11,.1f} {model / 2**20:>11,.1f}   "
            f"{format_ms(eager):>11} {format_ms(sdpa):>7}   {pairs:>9} {growth(eager, last_ms):>9}",
            flush=True,
        )
        last_length, last_ms, skipped = length, eager, skipped or eager is None
    print("\nMB = 2^20 bytes, float32.", end="")
    print(" A - was not measured: it would not fit into the free memory." if skipped else "")


def growth(value: float | None, before: float | None) -> str:
    """How many times larger."""
    return f"{value / before:,.1f}" if value and before else "-"


def format_ms(ms: float | None) -> str:
    """Milliseconds, legible from microseconds on."""
    return "-" if ms is None else f"{ms:,.2f}"


@torch.no_grad()
def time_one_head(length: int) -> tuple[float | None, float | None]:
    """Milliseconds of one causal head, eager and SDPA; None where the memory is not there."""
    there = psutil.virtual_memory().available
    if 4 * length * HEAD_DIM * 4 > there:  # float32 queries, keys, values and what comes out
        return None, None
    q, k, v = (torch.randn(1, 1, length, HEAD_DIM) for _ in range(3))  # (B, H, T, D)
    sdpa = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    if 3 * score_matrix_bytes(length) > there:  # scores, before and after scaling, and the mask
        return None, sdpa
    mask = torch.ones(length, length, dtype=torch.bool).tril()  # (T, T)
    return milliseconds(lambda: eager_attention(q, k, v, mask)), sdpa


def milliseconds(work) -> float:
    """Median of up to 50 runs within half a second, at least 3, after two runs to warm up."""
    for _ in range(2):
        work()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 0.5 and len(times) < 50):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


if __name__ == "__main__":
    entry_point(main, "lessons")
