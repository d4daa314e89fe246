"""The metrics that a run ends with, by name.

summary.json, the scalars `final/`, the table of hyperparameters, and the table and curves of a sweep all show the
metrics of FINAL_METRICS. To add a metric, add one line there (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # at run time, the names are needed without importing torch
    from checkpoint.checkpoint import Checkpoint
    from training.callbacks.metrics_logger import MetricsLogger


class FinalMetric(NamedTuple):
    """How to compute a metric, and its column in the table of a sweep."""

    compute: Callable[[Checkpoint, MetricsLogger], float]
    """Arguments: the best checkpoint, and what was measured during training."""
    heading: str = ""
    """Heading of its column; empty: no column."""
    digits: int = 3
    """Digits after the decimal point in the table."""


FINAL_METRICS = {
    "val_nats_per_token": FinalMetric(lambda best, training: best.validation["nats_per_token"]),
    "step_ms": FinalMetric(lambda best, training: round(training.step_ms, 3), "step, ms", 1),
    "tokens_per_second": FinalMetric(lambda best, training: round(training.tokens_per_second, 1), "tokens/s", 0),
    "peak_memory_mb": FinalMetric(lambda best, training: round(training.peak_memory_mb, 1), "peak, MB", 0),
    "val_bits_per_byte": FinalMetric(lambda best, training: best.validation["bits_per_byte"], "bits per byte"),
}

OBJECTIVE = "val_bits_per_byte"
"""The metric that sweeps compare runs by: the lowest is the best."""


def compute_final_metrics(best: Checkpoint, training: MetricsLogger) -> dict[str, float]:
    """The values of FINAL_METRICS for a run with this best checkpoint."""
    return {name: metric.compute(best, training) for name, metric in FINAL_METRICS.items()}
