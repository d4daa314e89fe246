"""The metrics that a run ends with, by name.

One dictionary for all places that show them: summary.json, TensorBoard's scalars `final/` and its table of
hyperparameters, and the curves and the table that compare the runs of a sweep. To add one: one line in FINAL_METRICS
(docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # names are needed without torch
    from checkpoint.checkpoint import Checkpoint
    from training.callbacks import MetricsLogger


class FinalMetric(NamedTuple):
    """How a metric is computed, and its column in the table of a sweep."""

    compute: Callable[[Checkpoint, MetricsLogger], float]
    """From the best checkpoint and from what was counted during training."""
    heading: str = ""
    """Of its column. Empty: it has none."""
    digits: int = 3
    """After the decimal point, in the table."""


FINAL_METRICS = {
    "val_nats_per_token": FinalMetric(lambda best, training: best.validation["nats_per_token"]),
    "step_ms": FinalMetric(lambda best, training: round(training.step_ms, 3), "step, ms", 1),
    "tokens_per_second": FinalMetric(lambda best, training: round(training.tokens_per_second, 1), "tokens/s", 0),
    "peak_memory_mb": FinalMetric(lambda best, training: round(training.peak_memory_mb, 1), "peak, MB", 0),
    "val_bits_per_byte": FinalMetric(lambda best, training: best.validation["bits_per_byte"], "bits per byte"),
}


def compute_final_metrics(best: Checkpoint, training: MetricsLogger) -> dict[str, float]:
    """All of FINAL_METRICS, of a run whose best checkpoint this is."""
    return {name: metric.compute(best, training) for name, metric in FINAL_METRICS.items()}
