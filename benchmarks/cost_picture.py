"""Log-log plot of time and memory over the context length, with measured points and fitted times."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from analysis.colors import LIGHT, line_styles
from system.text import pluralize

if TYPE_CHECKING:
    from benchmarks.context_cost import Measured

STYLES = dict(zip(("eager", "sdpa", "sliding_window"), line_styles(3), strict=True))


def draw_cost(measured: Measured, path: Path) -> None:
    """Plots the time of attention and of a training step, and the memory of a step, to a PNG file."""
    figure = Figure(figsize=(11, 4.1), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    for axes, part, heading in (
        (panels[0], "attention", "attention of one layer, ms"),
        (panels[1], "step", "training step, ms"),
        (panels[2], "memory", "peak memory of a training step, MB"),
    ):
        ends = [draw_line(axes, measured, name, part) for name in STYLES if measured.readings_of(name)]
        finish(axes, heading, sorted({reading.context_length for reading in measured.readings}))
        label_ends(axes, ends)
    tokens = measured.readings[0].context_length * measured.readings[0].sequences
    c = measured.config
    figure.supxlabel(
        f"context length, at {tokens:,} tokens a batch: {pluralize(c.num_layers, 'layer')}, "
        f"{pluralize(c.num_heads, 'head')} of {c.head_dim}; {measured.device}, "
        f"{pluralize(measured.threads, 'thread')}\n"
        "forward and backward; times: medians with quartiles, and a T + b T² a sequence, fitted; "
        "memory: lines that only join the points",
        fontsize=9,
        color=LIGHT["faint"],
    )
    canvas.print_png(path)


def draw_line(axes: Axes, measured: Measured, name: str, part: str) -> tuple[float, float, str]:
    """Plots the points and the fit, if any, of one implementation. Returns the end of the line and its name."""
    readings, style = measured.readings_of(name), STYLES[name]
    color, marker, dashes = style["color"], style["marker"], style["linestyle"]
    lengths = np.array([reading.context_length for reading in readings], float)
    if part == "memory":
        y = [reading.step_peak_mb for reading in readings]
        axes.plot(lengths, y, **style, markersize=4, linewidth=1.2)
        return lengths[-1], y[-1], name
    timings = [getattr(reading, part) for reading in readings]
    y = [timing.ms for timing in timings]
    spread = [[t.ms - t.low_ms for t in timings], [t.high_ms - t.ms for t in timings]]
    axes.errorbar(lengths, y, spread, fmt=marker, color=color, markersize=4, linewidth=1)
    growth = measured.growth(name, part)
    if growth is not None:
        T = np.geomspace(measured.fitted(name)[0].context_length, lengths[-1], 100)
        sequences = np.interp(T, lengths, [r.sequences * r.context_length for r in readings]) / T
        fitted = sequences * (growth.a * T + growth.b * T**2) / 1000  # us a sequence -> ms a batch
        positive = fitted > 0  # a small negative a would leave the logarithm's range
        axes.plot(T[positive], fitted[positive], color=color, linestyle=dashes, linewidth=1.2)
    return lengths[-1], y[-1], name


def finish(axes: Axes, heading: str, lengths: list[int]) -> None:
    """Sets logarithmic axes, with ticks at as many of the measured lengths as there is room for."""
    axes.set_title(heading, fontsize=10, loc="left")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * (high / low) ** 0.42)  # room for the labels at the lines' ends
    ticks, least = [lengths[-1]], (lengths[-1] / lengths[0]) ** 0.2
    for length in reversed(lengths[:-1]):
        if ticks[-1] / length >= least:
            ticks.append(length)
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    bottom, top = axes.get_ylim()
    if top / bottom < 100:  # too few powers of ten for ticks
        steps = [m * 10.0**e for e in range(-3, 8) for m in (1, 2, 5)]
        shown = [step for step in steps if bottom <= step <= top]
        if len(shown) < 2:
            shown = [step for step in MaxNLocator(4).tick_values(bottom, top) if bottom <= step <= top]
        axes.set_yticks(shown)
        axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color=LIGHT["masked"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, color=LIGHT["line"])


def label_ends(axes: Axes, ends: list[tuple[float, float, str]]) -> None:
    """Labels each line at its end, after a short sample of it; labels that would overlap are moved apart."""
    bottom, top = np.log(axes.get_ylim())
    least = 0.05 * (top - bottom)
    below = -np.inf
    for x, y, name in sorted(ends, key=lambda end: end[1]):
        place = max(np.log(y), below + least)
        below = place
        style = STYLES[name]
        piece = {"color": style["color"], "linestyle": style["linestyle"], "linewidth": 1.2}
        axes.annotate(
            name.replace("_", " "), (x, np.exp(place)), (32, 0), textcoords="offset points",
            va="center", color=LIGHT["ink"], fontsize=9,
            arrowprops=piece | {"arrowstyle": "-", "relpos": (0, 0.5), "shrinkA": 2, "shrinkB": 8},
        )  # fmt: skip
