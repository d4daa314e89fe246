"""Cost of context: time and memory of attention and of a training step at increasing context lengths.

    python -m benchmarks.context_cost [key=value ...]      the keys: configs/context_cost.yaml

Compares eager attention (the T x T matrix in memory), SDPA (PyTorch's fused attention, which never stores it) and
sliding window attention (limited to the last `model.sliding_window` tokens). The number of tokens per batch is the same
at every length. Times are medians after a warm-up, with quartiles, of forward and backward pass; those of a step
include the optimizer. Memory is the peak of a new process. The last line is JSON.
"""

import json
import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil
import torch

from benchmarks.growth import Growth, fit_growth, where_equal
from benchmarks.memory_of import measure_memory
from benchmarks.workload import attention_pass, training_step
from configs.entry_point import entry_point
from configs.schema import ContextCostConfig
from model import kernels
from model.config import GPTConfig
from model.flops import (
    IMPLEMENTATIONS,
    attention_flops,
    crossover_length,
    saved_activation_bytes,
    score_matrix_bytes,
    train_step_flops,
)
from model.layers import Linear
from sample import pick_device
from system.errors import UserError
from system.files import check_suffix
from system.machine import machine
from system.memory import disable_malloc_trim
from system.text import pluralize
from training.config import OptimizerConfig

SECONDS_A_TIMING = 0.8
"""Workloads are repeated for this many seconds, but LEAST_RUNS to MOST_RUNS times."""
LEAST_RUNS, MOST_RUNS = 3, 30


@dataclass(frozen=True)
class Timing:
    """Median, lower and upper quartile in milliseconds."""

    ms: float
    low_ms: float
    high_ms: float
    runs: int


@dataclass(frozen=True)
class Reading:
    """Measurements of one implementation at one context length. `attention` is one layer, `step` the whole model."""

    implementation: str
    context_length: int
    sequences: int
    attention: Timing
    step: Timing
    attention_peak_mb: float
    kept_mb: float
    """Memory that the attention of one layer keeps for the backward pass."""
    step_peak_mb: float
    attention_gflops: float
    step_gflops: float
    """Operations per batch by formula, in units of 1e9."""


@dataclass
class Measured:
    """All measurements of the command."""

    config: GPTConfig
    device: str
    threads: int
    matmul_gflops_per_second: float
    readings: list[Reading] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def implementations(self) -> tuple[str, ...]:
        """The implementations to measure; sliding window only if the config has a window."""
        return IMPLEMENTATIONS if self.config.sliding_window else IMPLEMENTATIONS[:2]

    def readings_of(self, implementation: str) -> list[Reading]:
        """Readings of one implementation, in order of length."""
        return [reading for reading in self.readings if reading.implementation == implementation]

    def fitted(self, implementation: str) -> list[Reading]:
        """Readings for the fit; a window that is not shorter than the context is excluded."""
        shortest = self.config.sliding_window + 1 if implementation == "sliding_window" else 0
        return [reading for reading in self.readings_of(implementation) if reading.context_length >= shortest]

    def rest_ms(self, reading: Reading) -> float:
        """Time of a step without attention. Kept above 0, because it is the difference of two measurements."""
        return max(reading.step.ms - self.config.num_layers * reading.attention.ms, 1e-3)

    def growth(self, implementation: str, part: str) -> Growth | None:
        """Fits microseconds per sequence over the context length; part is "attention" or "step"."""
        readings = self.fitted(implementation)
        times = [1000 * getattr(reading, part).ms / reading.sequences for reading in readings]
        return fit_growth([reading.context_length for reading in readings], times)

    def crossing(self, implementation: str) -> float | None:
        """Length at which attention takes as long as the rest of the step; None if not between two readings."""
        readings = self.readings_of(implementation)
        return where_equal(
            [reading.context_length for reading in readings],
            [self.config.num_layers * reading.attention.ms for reading in readings],
            [self.rest_ms(reading) for reading in readings],
        )


def main(config: ContextCostConfig) -> None:
    """Measures, prints, draws and logs. Raises UserError."""
    for name in ("tokens_per_batch", "seconds"):
        if getattr(config, name) < 1:
            raise UserError(f"{name} is {getattr(config, name)}, but must be at least 1.")
    lengths = sorted(set(config.lengths))
    if not lengths or lengths[0] < 16:
        raise UserError(f"lengths is {config.lengths}, but must list context lengths of at least 16.")
    check_suffix("png", config.png, ".png")
    if config.png is not None and not Path(config.png).absolute().parent.is_dir():  # before minutes of measuring
        raise UserError(f"png is {config.png}, but there is no such directory. Give another file.")
    network_config = replace(config.model, window_pattern="S")  # sliding window: every layer is
    optimizer_config = config.optimizer
    device = pick_device(config.device)
    torch.manual_seed(config.seed)
    kernels.set_enabled(config.kernels)
    disable_malloc_trim()  # as train.py does

    c, threads = network_config, torch.get_num_threads()
    measured = Measured(c, device, threads, matmul_gflops_per_second(device))
    print(
        f"{pluralize(c.num_layers, 'layer')}, {pluralize(c.num_heads, 'head')} of {c.head_dim}, width {c.d_model}, "
        f"vocabulary {c.vocab_size:,}; "
        f"{config.tokens_per_batch:,} tokens a batch\n"
        f"on {device}, {pluralize(threads, 'thread')}; a large float32 matrix product runs at "
        f"{measured.matmul_gflops_per_second:,.0f} GFLOP/s\n"
    )
    measure(measured, optimizer_config, lengths, config)
    if not measured.readings:
        raise UserError("nothing fitted into the budget. Raise seconds or memory_mb, or lower tokens_per_batch.")
    print("\n" + conclusions(measured))
    if config.png is not None:
        from benchmarks.cost_picture import draw_cost

        draw_cost(measured, Path(config.png))
        print(f"picture: {config.png}")
    if config.logdir is not None:
        log_scalars(measured, Path(config.logdir))
        print(f"TensorBoard, the x axis is the context length: tensorboard --logdir {config.logdir}")
    print(json.dumps(json.loads(json.dumps(as_json(measured)), parse_float=lambda x: float(f"{float(x):.4g}"))))


def measure(
    measured: Measured, optimizer_config: OptimizerConfig, lengths: list[int], config: ContextCostConfig
) -> None:
    """Adds and prints the readings, shortest context first, and prints what was skipped and why."""
    began, limit_mb = time.perf_counter(), config.memory_mb or 0.75 * free_memory_mb(measured.device)
    spent_on_last: dict[str, float] = {}
    stopped: set[str] = set()
    print(HEADER)
    for length in lengths:
        for name in reversed(measured.implementations):  # the slow one last
            if name in stopped:
                continue
            before = time.perf_counter()
            sequences = max(1, config.tokens_per_batch // length)
            last = measured.readings_of(name)[-1] if measured.readings_of(name) else None
            needed_mb = expected_mb(measured.config, name, length, sequences, last)
            # An upper bound: attention grows with the pairs per batch, the rest of a step less.
            grown = (length / last.context_length) ** 2 * sequences / last.sequences if last else 1.0
            needed_s = grown * spent_on_last.get(name, 0.0)
            left_s = config.seconds - (before - began)
            reading = None
            if needed_mb > limit_mb:
                why = f"needs about {needed_mb:,.0f} MB, the limit is {limit_mb:,.0f} MB (memory_mb)"
            elif needed_s > left_s or left_s < 0:
                why = f"needs about {needed_s:,.0f} s, {max(0, left_s):,.0f} of {config.seconds:,.0f} s left (seconds)"
            else:
                reading = measure_reading(measured, optimizer_config, name, length, sequences)
                why = "the process that measured its memory was killed"
            if reading is None:
                stopped.add(name)
                longer = " and longer" if length < lengths[-1] else ""
                measured.skipped.append(f"{title(name)} at {length:,}{longer}: {why}")
                print(f"skipped: {measured.skipped[-1]}", flush=True)
                continue
            measured.readings.append(reading)
            spent_on_last[name] = time.perf_counter() - before
            print(format_row(measured, reading), flush=True)


def measure_reading(
    measured: Measured, optimizer_config: OptimizerConfig, name: str, length: int, sequences: int
) -> Reading | None:
    """Measures one implementation at one length. Returns None if the process that measures memory died."""
    c, device = measured.config, measured.device
    options = {
        "config": c,
        "implementation": name,
        "context_length": length,
        "sequences": sequences,
    }
    step_options = options | {"optimizer_config": optimizer_config}
    memory = measure_memory("attention_pass", device, measured.threads, options)
    step_memory = measure_memory("training_step", device, measured.threads, step_options) if memory else None
    if step_memory is None:
        return None
    return Reading(
        name,
        length,
        sequences,
        time_of(attention_pass(**options, device=device), device),
        time_of(training_step(**step_options, device=device), device),
        memory["peak"],
        memory["kept"],
        step_memory["peak"],
        3 * sequences * attention_flops(c, length, name) / c.num_layers / 1e9,
        sequences * train_step_flops(c, length, name) / 1e9,
    )


def time_of(work, device: str) -> Timing:
    """Times repeated runs after one to warm up."""
    times: list[float] = []
    while len(times) <= LEAST_RUNS or (sum(times[1:]) < SECONDS_A_TIMING and len(times) <= MOST_RUNS):
        start = synchronized_time(device)
        work()
        times.append(synchronized_time(device) - start)
    low, middle, high = statistics.quantiles((1000 * t for t in times[1:]), n=4, method="inclusive")
    return Timing(middle, low, high, len(times) - 1)


def synchronized_time(device: str) -> float:
    """Current time in seconds, after the device has finished all queued work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def matmul_gflops_per_second(device: str) -> float:
    """Speed of a large linear layer in float32, as the upper limit to compare with."""
    size = 2048 if device == "cpu" else 8192
    x, layer = torch.randn(size, size, device=device), Linear(size, size, bias=False, device=device)
    with torch.no_grad():
        return 2 * size**3 / (time_of(lambda: layer(x), device).low_ms / 1000) / 1e9


def free_memory_mb(device: str) -> float:
    """Free memory of the device."""
    return (torch.cuda.mem_get_info()[0] if device.startswith("cuda") else psutil.virtual_memory().available) / 2**20


def expected_mb(config: GPTConfig, name: str, length: int, sequences: int, last: Reading | None) -> float:
    """Predicts the memory of a training step from that at the last length: only eager score matrices grow.

    A step holds the attention weights of every layer, and at its peak two gradients of the same size in one layer.
    """
    if name != "eager":
        return last.step_peak_mb if last else 0.0
    grown = score_matrix_bytes(length, config.num_heads, sequences=sequences)
    if last is not None:
        grown -= score_matrix_bytes(last.context_length, config.num_heads, sequences=last.sequences)
    return (last.step_peak_mb if last else 0.0) + (config.num_layers + 2) * grown / 2**20


def title(name: str) -> str:
    """Name of an implementation in tables and pictures."""
    return name.replace("_", " ")


HEADER = (
    f"{'context':>7}  {'attention':<14}  {'one layer, ms':>21}  {'training step, ms':>21}  {'peak, MB':>8}  "
    f"{'GFLOP':>6}  {'speed':>5}\n"
    f"{'':>7}  {'':<14}  {'median (quartiles)':>21}  {'median (quartiles)':>21}  {'step':>8}  {'step':>6}  {'share':>5}"
)


def format_row(measured: Measured, reading: Reading) -> str:
    """Formats a reading as a line below HEADER. The last column is relative to the speed of a large matrix product."""
    share = reading.step_gflops / (reading.step.ms / 1000) / measured.matmul_gflops_per_second
    return (
        f"{reading.context_length:>7,}  {title(reading.implementation):<14}  {format_timing(reading.attention):>21}  "
        f"{format_timing(reading.step):>21}  {reading.step_peak_mb:>8,.0f}  {reading.step_gflops:>6,.0f}  {share:>5.0%}"
    )


def format_timing(timing: Timing) -> str:
    """Formats median and quartiles."""
    digits = 1 if timing.ms < 100 else 0
    return f"{timing.ms:,.{digits}f} ({timing.low_ms:,.{digits}f} - {timing.high_ms:,.{digits}f})"


def conclusions(measured: Measured) -> str:
    """Describes how time and memory grow, and where attention takes longer than the rest of a step."""
    names = [name for name in measured.implementations if measured.readings_of(name)]
    lines = ["Time of one sequence, fitted: a T + b T^2, and T^p over the longest lengths (± standard error)"]
    for part, what in (("attention", "one layer's attention"), ("step", "training step")):
        for name in names:
            g = measured.growth(name, part)
            if g is not None:
                lines.append(
                    f"  {what + ', ' + title(name):<37}  a = {with_error(g.a, g.a_error, 7, 3)} us   "
                    f"b = {with_error(1000 * g.b, g.b_error and 1000 * g.b_error, 7, 3)} ns   "
                    f"p = {with_error(g.exponent, g.exponent_error, 4, 2)} from {g.exponent_from:,}"
                )
    lines += ["", "Attention of all layers takes as long as the rest of the step at a context of"]
    for name in names:
        readings, by_flops = measured.readings_of(name), crossover_length(measured.config, name)
        crossing = measured.crossing(name)
        if crossing is not None:
            found = f"{crossing:,.0f}"
        elif measured.config.num_layers * readings[0].attention.ms >= measured.rest_ms(readings[0]):
            found = f"less than {readings[0].context_length:,}"
        else:
            found = f"more than {readings[-1].context_length:,}"
        predicted = "never" if by_flops is None else f"{by_flops:,.0f}"
        lines.append(f"  {title(name):<14}  measured: {found:<16}  by operations alone: {predicted}")
    eager = measured.readings_of("eager")
    if eager:
        lines += [
            "",
            "One layer's score matrix, eager, MB: by formula, and measured (what it keeps less the rest)",
        ]
        for reading in eager:
            lines.append(
                f"  {reading.context_length:>7,}  {formula_mb(measured, reading):>9,.1f}  "
                f"{matrix_mb(measured, reading):>9,.1f}"
            )
    return "\n".join(lines) + "\n"


def with_error(value: float, error: float | None, width: int, digits: int) -> str:
    """Formats a coefficient and its standard error, if any."""
    return f"{value:{width}.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def formula_mb(measured: Measured, reading: Reading) -> float:
    """Size of the score matrix by formula."""
    return score_matrix_bytes(reading.context_length, measured.config.num_heads, sequences=reading.sequences) / 2**20


def matrix_mb(measured: Measured, reading: Reading) -> float:
    """Measured size of the score matrix: memory kept by eager attention, minus the other tensors that it keeps."""
    kept = saved_activation_bytes(measured.config, reading.context_length, reading.sequences)
    return reading.kept_mb - (kept / 2**20 - formula_mb(measured, reading))


def log_scalars(measured: Measured, logdir: Path) -> None:
    """Writes one TensorBoard run per implementation; the step is the context length."""
    from torch.utils.tensorboard import SummaryWriter

    for name in measured.implementations:
        with SummaryWriter(str(logdir / name)) as writer:
            for reading in measured.readings_of(name):
                for tag, value in (
                    ("attention_ms", reading.attention.ms),
                    ("step_ms", reading.step.ms),
                    ("attention_peak_mb", reading.attention_peak_mb),
                    ("step_peak_mb", reading.step_peak_mb),
                    ("step_gflops", reading.step_gflops),
                ):
                    writer.add_scalar(f"cost_by_context_length/{tag}", value, reading.context_length)


def as_json(measured: Measured) -> dict:
    """All measurements as plain values."""
    names = [name for name in measured.implementations if measured.readings_of(name)]
    return {
        "benchmark": "context_cost",
        "machine": machine(),
        "device": measured.device,
        "threads": measured.threads,
        "torch": torch.__version__,
        "matmul_gflops_per_second": measured.matmul_gflops_per_second,
        "model": asdict(measured.config),
        "readings": [asdict(reading) for reading in measured.readings],
        "fits": {
            name: {
                part: asdict(growth)
                for part in ("attention", "step")
                if (growth := measured.growth(name, part)) is not None
            }
            for name in names
        },
        "crossings": {
            name: {
                "measured": measured.crossing(name),
                "by_flops": crossover_length(measured.config, name),
            }
            for name in names
        },
        "score_matrix_mb": {
            reading.context_length: {"formula": formula_mb(measured, reading), "measured": matrix_mb(measured, reading)}
            for reading in measured.readings_of("eager")
        },
        "skipped": measured.skipped,
    }


if __name__ == "__main__":
    entry_point(main, "context_cost")
