"""Results of a sweep over context lengths, as a table and as curves in TensorBoard."""

import json
from pathlib import Path
from typing import Any

from training.final_metrics import FINAL_METRICS
from training.run_dir import tensorboard_command


def compare_context_lengths(sweep_dir: Path) -> None:
    """Prints the table and writes the curves, if the runs of the sweep have different context lengths."""
    summaries = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(sweep_dir.glob("*/summary.json"))]
    by_length = {summary["context_length"]: summary for summary in summaries}
    if len(by_length) < 2:
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(sweep_dir / "by_context_length")) as writer:
        for length, summary in sorted(by_length.items()):
            for name in FINAL_METRICS:
                writer.add_scalar(f"by_context_length/{name}", summary[name], length)
    print(table(by_length))
    print(f"\nas curves, in TensorBoard's run by_context_length:    {tensorboard_command(sweep_dir)}")


def table(by_length: dict[int, dict[str, Any]]) -> str:
    """One line per context length, with the final metrics that have a heading."""
    columns = {name: metric for name, metric in FINAL_METRICS.items() if metric.heading}
    widths = {name: max(9, len(metric.heading) + 1) for name, metric in columns.items()}
    headings = " ".join(f"{metric.heading:>{widths[name]}}" for name, metric in columns.items())
    lines = ["", f"{'context':>7} {headings} {'steps':>7}"]
    for length, run in sorted(by_length.items()):
        values = " ".join(f"{run[name]:>{widths[name]},.{metric.digits}f}" for name, metric in columns.items())
        lines.append(f"{length:>7,} {values} {run['steps']:>7,}")
    return "\n".join(lines)
