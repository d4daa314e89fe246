"""The report with which every run ends: what it needs to know about the run, and the file report.html."""

import logging
import re
import shlex
from pathlib import Path
from typing import Any

from analysis.recording import load_facts, save_facts
from analysis.report_html import load_run, report_page
from system.errors import UserError
from system.files import atomic_write
from system.machine import machine
from training.setup import Run

REPORT = "report.html"

logger = logging.getLogger(__name__)


def record_facts(run: Run, run_dir: Path) -> None:
    """Records the config and the size of the run. A resumed run keeps the list of settings that were changed before.

    Raises OSError.
    """
    changed, before = set(run.config.explicit_keys), _recorded(run_dir) if run.config.resumed else {}
    changed = (changed | set(before.get("changed", []))) - {"resume"}
    shape = run.network.config
    command = shlex.join(["python", "train.py", *map(_unquoted, run.config.overrides)])
    about = f"{shape.num_layers} layers, {shape.num_heads} heads, width {shape.d_model}, context {shape.context_length}"
    save_facts(
        run_dir,
        {
            "config": _plain(run.config.values()),
            "changed": sorted(changed),
            "command": before.get("command", command),
            "parameters": run.network.num_parameters(),
            "about": f"{about}. {run.data.describe()}",
            "budget": run.budget_summary,
            "prompt": suggested_prompt(run),
            "longer": _twice_as_long(run),
            "machine": machine(),
        },
    )


def write_report(run_dir: Path, summary: dict[str, Any] | None = None) -> Path | None:
    """Writes report.html, and returns its path. None: there is nothing to report, for example no validation yet.

    Args:
        summary: of a run that has not written summary.json yet.

    Raises:
        OSError: it cannot be written.
    """
    try:
        run = load_run(run_dir, summary)
    except UserError:  # no validation, or its files were removed or damaged while the run trained
        return None
    for note in run.notes:
        logger.info(note)
    with atomic_write(run_dir / REPORT, run_dir / "report.tmp") as file:
        file.write(report_page([run]).encode())
    return run_dir / REPORT


def suggested_prompt(run: Run) -> str:
    """The start of a line: of Hamlet's for the embedded text, else the first suitable one of the validation text."""
    if run.config.data.corpus in (None, "shakespeare"):
        return "To be, or not"
    _, *lines = next(run.data.corpus.val.read(1 << 16)).split("\n")  # the first line may be incomplete
    starts = (" ".join(line.split()[:4]) for line in lines)
    return next((start for start in starts if start and start.isprintable() and len(start) <= 40), "")


def _twice_as_long(run: Run) -> str:
    """The setting that resumes the run for as long again."""
    options = run.options
    for name in ("max_steps", "max_epochs"):
        if options.get(name, -1) not in (None, -1):
            return f"trainer.{name}={2 * options[name]}"
    if run.metadata["budget"]:
        return f"budget={2 * run.metadata['budget']:g}s"
    return f"trainer.max_time={2 * options['max_time'].total_seconds():g}s"


def _unquoted(override: str) -> str:
    """The override as a user types it: Hydra quotes free text."""
    key, _, value = override.partition("=")
    match = re.fullmatch(r"'(.*)'", value, re.DOTALL)
    return f"{key}={match[1]}".replace("\\'", "'") if match else override


def _recorded(run_dir: Path) -> dict[str, Any]:
    try:
        return load_facts(run_dir)
    except ValueError:
        return {}


def _plain(value: Any) -> Any:
    """Only values that JSON has."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
