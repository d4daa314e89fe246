"""The directory of a sweep: what was asked for, one directory per run, and the results as a table."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from system.errors import UserError
from system.files import atomic_write, relative
from training.final_metrics import FINAL_METRICS, OBJECTIVE
from training.run_dir import SWEEP_FILE, tensorboard_command
from training.sweep_curves import write_curves

MAX_RECORD_BYTES = 1 << 16


@dataclass(frozen=True)
class JobResult:
    """How one run of a sweep ended. float(result) is the objective, which the Optuna sweeper minimizes."""

    settings: tuple[str, ...]
    """The settings that differ between the runs, such as "model.num_heads=4"."""
    run_dir: Path | None = None
    """None: the run was never started."""
    error: str = ""
    """Why it failed; empty if it did not."""
    stopped: bool = False
    """Whether a signal stopped it."""

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json of a finished run; empty for others."""
        path = self.run_dir / "summary.json" if self.run_dir else None
        return json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}

    @property
    def status(self) -> str:
        return f"failed: {self.error}" if self.error else "stopped" if self.stopped else "finished"

    def __float__(self) -> float:
        if not self.summary:
            raise ValueError(self.status)
        return float(self.summary[OBJECTIVE])


def save_record(sweep_dir: Path, arguments: Sequence[str], finished: bool) -> None:
    """Writes what `resume` needs to know: the command line, and whether every run has had its turn."""
    with atomic_write(sweep_dir / SWEEP_FILE) as file:
        file.write((json.dumps({"arguments": list(arguments), "finished": finished}, indent=2) + "\n").encode())


def recorded_arguments(sweep_dir: Path) -> list[str]:
    """The command line of a sweep. Raises UserError if its record is damaged."""
    path = sweep_dir / SWEEP_FILE
    try:
        if path.stat().st_size > MAX_RECORD_BYTES:
            raise ValueError(f"it has more than {MAX_RECORD_BYTES:,} bytes")
        arguments = json.loads(path.read_text(encoding="utf-8"))["arguments"]
        if not (isinstance(arguments, list) and all(isinstance(argument, str) for argument in arguments)):
            raise ValueError("its arguments are not a list of texts")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not the record of a sweep ({str(error)[:200]}). Start the sweep again.") from error
    return arguments


def report(sweep_dir: Path, results: Sequence[JobResult]) -> None:
    """Prints the table of the runs, and writes it to results.csv; and curves, if the context length was swept."""
    if not any(result.summary for result in results):
        return
    path = sweep_dir / "results.csv"
    with atomic_write(path) as file:
        file.write(as_csv(results).encode())
    curves = write_curves(sweep_dir, [result.summary for result in results if result.summary])
    print(table(results))
    print(f"\nas a file:     {relative(path)}")
    print(f"as curves:     {tensorboard_command(sweep_dir)}" + (f"  (run {curves})" if curves else ""))


def swept_columns(results: Sequence[JobResult]) -> dict[str, list[str]]:
    """Swept key -> its value in each run; keys with the same value in all runs are left out."""
    rows = [
        dict(setting.lstrip("+").split("=", 1) for setting in result.settings if "=" in setting) for result in results
    ]
    columns = {key: [row.get(key, "").strip("'\"") for row in rows] for row in rows for key in row}
    return {key: values for key, values in columns.items() if len(set(values)) > 1 or len(rows) == 1}


def as_csv(results: Sequence[JobResult]) -> str:
    """All final metrics of all runs, in the order of the sweep."""
    columns, best = swept_columns(results), best_of(results)
    numbers = [*FINAL_METRICS, "parameters", "steps", "tokens", "seconds"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, *numbers, "best", "status", "run"])
    for index, result in enumerate(results):
        summary = result.summary
        writer.writerow(
            [values[index] for values in columns.values()]
            + [summary.get(name, "") for name in numbers]
            + [int(result is best), result.status, result.run_dir.name if summary else ""]
        )
    return text.getvalue()


def table(results: Sequence[JobResult]) -> str:
    """One line per run in the order of the sweep, with the final metrics that have a heading; the best is marked."""
    best = best_of(results)
    columns = {key: (key, [_shortened(value) for value in values]) for key, values in swept_columns(results).items()}
    summaries = [result.summary for result in results]
    for name, metric in FINAL_METRICS.items():
        if metric.heading:
            columns[name] = metric.heading, [_number(run.get(name), metric.digits) for run in summaries]
    for name, digits in (("parameters", 0), ("steps", 0), ("seconds", 1)):
        columns[name] = name, [_number(run.get(name), digits) for run in summaries]
    widths = [max(len(heading), *map(len, values)) for heading, values in columns.values()]
    rows = [[heading, *values] for heading, values in columns.values()]
    marks = ["", *("best" if result is best else _mark(result) for result in results)]
    lines = [""]
    for *cells, mark in zip(*rows, marks, strict=True):
        line = "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        lines.append(f"{line}  {mark}".rstrip())
    return "\n".join(lines)


def _mark(result: JobResult) -> str:
    return "" if result.summary else result.status.partition(":")[0]


def best_of(results: Sequence[JobResult]) -> JobResult | None:
    """The finished run with the lowest objective, if there are several."""
    finished = [result for result in results if result.summary]
    return min(finished, key=float) if len(finished) > 1 else None


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _shortened(value: str) -> str:
    """Numbers from a sampler have 17 digits."""
    try:
        return f"{float(value):.4g}" if len(value) > 8 else value
    except ValueError:
        return value if len(value) <= 30 else f"…{value[-29:]}"
