"""Curves over the context length in TensorBoard, after a sweep over it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.final_metrics import FINAL_METRICS

CURVES = "by_context_length"


def write_curves(sweep_dir: Path, summaries: Sequence[dict[str, Any]]) -> str:
    """Writes one curve per final metric; returns the name of TensorBoard's run.

    Args:
        summaries: summary.json of each run. If all have the same context length, nothing is written and "" returned.
    """
    by_length = {summary["context_length"]: summary for summary in summaries}
    if len(by_length) < 2:
        return ""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(sweep_dir / CURVES)) as writer:
        for length, summary in sorted(by_length.items()):
            for name in FINAL_METRICS:
                writer.add_scalar(f"{CURVES}/{name}", summary[name], length)
    return CURVES
