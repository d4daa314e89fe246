"""The report of a run, or a comparison of several, as one HTML file without requests to the network.

Fills colors and data into the template analysis/report_html.html. The data are the files that the run has recorded
(analysis/recording.py) and its summary.json.
"""

import base64
import json
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.attention_html import embeddable
from analysis.colors import DARK, LIGHT, SCALE
from analysis.recording import HEAD_SCORES, ValidationRecord, load_curve, load_facts, load_validations
from system.errors import UserError
from system.files import relative
from system.process import python_command, script_command
from system.text import pluralize

TEMPLATE = Path(__file__).with_suffix(".html")
MAX_VALIDATIONS = 60  # on the slider
MAX_MAP_BYTES = 3_000_000  # of all attention maps together; base64 adds a third
MAX_CURVE_POINTS = 800
MIN_TOKENS = 16  # that maps are shortened to before validations are left out
MAX_TEXT = 4000  # characters of a sample
NOT_COMPARED = ("runs_dir", "resume", "data.cache_dir")  # settings without an effect on results
_SUMMARY = ("val_bits_per_byte", "val_nats_per_token", "seconds", "steps", "tokens", "best_step", "parameters",
            "step_ms", "tokens_per_second", "peak_memory_mb")  # fmt: skip


@dataclass(frozen=True)
class RecordedRun:
    """All that a report shows of a run."""

    run_dir: Path
    facts: dict[str, Any]
    validations: list[ValidationRecord]
    curve: list[dict[str, float | None]]
    summary: dict[str, float]
    """Entries of summary.json; empty if the run is not finished."""
    notes: list[str]
    """Lines about damaged files."""


def load_run(run_dir: Path, summary: dict[str, Any] | None = None) -> RecordedRun:
    """Reads what a run has recorded.

    Args:
        summary: of a run that has not written summary.json yet.

    Raises:
        UserError: the directory has no recording, or no validation that can be read.
    """
    try:
        facts = load_facts(run_dir)
    except ValueError:
        raise UserError(
            f"{run_dir} has no recording/run.json that can be read, so there is nothing to report. Give the directory "
            "of a run that was trained with this version."
        ) from None
    validations, notes = load_validations(run_dir)
    if not validations:
        raise UserError(f"{run_dir} has no recorded validation that can be read. A report needs at least one.")
    curve, curve_notes = load_curve(run_dir)
    if summary is None:
        summary, summary_notes = _load_summary(run_dir)
        notes += summary_notes
    numbers = {name: summary[name] for name in _SUMMARY if _is_number(summary.get(name))}
    return RecordedRun(run_dir, facts, validations, curve, numbers, notes + curve_notes)


def report_page(runs: Sequence[RecordedRun]) -> str:
    """Returns the HTML: the report of one run, or the comparison of several."""
    single = len(runs) == 1
    data = {
        "runs": [_single_run(run) if single else _compared_run(run) for run in runs],
        "scores": HEAD_SCORES,
        "colors": SCALE.tolist(),
        "differing": [] if single else _differing_keys(runs),
    }
    page = TEMPLATE.read_text(encoding="utf-8")
    for place, colors in (("{{light}}", LIGHT), ("{{dark}}", DARK)):
        page = page.replace(place, " ".join(f"--{name}: {color};" for name, color in colors.items()))
    return page.replace("{{data}}", embeddable(data))


def commands(run: RecordedRun) -> list[list[str]]:
    """What to do next: pairs of a description and a shell command that works in the current directory."""
    run_dir, prompt = shlex.quote(str(relative(run.run_dir))), shlex.quote(run.facts["prompt"] or "The")
    train, sample, python = script_command("train.py"), script_command("sample.py"), python_command()
    inspect = f"{python} -m analysis.inspect_attention checkpoint={run_dir} prompt={prompt} html=attention.html"
    longer = f" {run.facts['longer']}" if run.summary else ""
    found = [
        ["Train longer" if run.summary else "Resume the run", f"{train} resume={run_dir}{longer}"],
        ["Generate text", f"{sample} checkpoint={run_dir} prompt={prompt}"],
        ["Attention of any text", inspect],
    ]
    if "tensorboard" in (run.facts["config"].get("logger") or {}):
        where = shlex.quote(str(relative(run.run_dir.parent)))
        board = f"{python} -m tensorboard.main --logdir {where} --samples_per_plugin images=100"
        found.append(["All runs in TensorBoard", board])
    found.append(["This page again", f"{python} -m analysis.report {run_dir}"])
    return found


def _single_run(run: RecordedRun) -> dict[str, Any]:
    """The data of a report. Large ones are shortened, and `notes` says how."""
    notes = list(run.notes)
    shown = evenly_spaced(run.validations, MAX_VALIDATIONS)
    if len(shown) < len(run.validations):
        notes.append(f"The slider shows {len(shown)} of {len(run.validations):,} validations, evenly spaced.")
    shown, tokens_cut = _shorten_maps(shown)
    notes += tokens_cut
    return _compared_run(run) | {
        "about": run.facts["about"],
        "budget": run.facts["budget"],
        "machine": run.facts["machine"],
        "command": run.facts["command"],
        "changed": run.facts["changed"],
        "commands": commands(run),
        "validations": [_validation(record) for record in shown],
        "notes": notes,
    }


def _compared_run(run: RecordedRun) -> dict[str, Any]:
    """What a comparison shows, which is part of a report, too."""
    best = min(run.validations, key=lambda record: record.nats_per_token)
    from_validation = {
        "val_bits_per_byte": best.bits_per_byte,
        "val_nats_per_token": best.nats_per_token,
        "best_step": best.step,
        "seconds": run.validations[-1].seconds,
        "steps": run.validations[-1].step,
        "tokens": run.validations[-1].tokens,
        "parameters": run.facts["parameters"],
    }
    speeds = [row["step_ms"] for row in run.curve if row["step_ms"] is not None]
    if speeds:
        from_validation["step_ms"] = float(np.median(speeds))
    losses = [[record.step, record.nats_per_token, record.bits_per_byte] for record in run.validations]
    return {
        "name": run.run_dir.name,
        "finished": bool(run.summary),
        "result": from_validation | run.summary,
        "config": flatten(run.facts["config"]),
        "curve": curve_points(run.curve),
        "losses": losses,  # step, nats per token, bits per byte
        "notes": list(run.notes),
    }


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> plain value, of nested dictionaries."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
    return flat


def _differing_keys(runs: Sequence[RecordedRun]) -> list[str]:
    """Keys of the config whose values are not the same in all runs."""
    configs = [flatten(run.facts["config"]) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    keys = [key for key in keys if key not in NOT_COMPARED]
    return [key for key in keys if len({json.dumps(config.get(key)) for config in configs}) > 1]


def curve_points(rows: list[dict[str, float | None]]) -> dict[str, list[float | None]]:
    """Columns of the training curve, at most MAX_CURVE_POINTS points; each is the mean over neighboring rows."""
    size = max(1, math.ceil(len(rows) / MAX_CURVE_POINTS))
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    columns: dict[str, list[float | None]] = {"step": [group[-1]["step"] for group in groups]}
    for name in ("loss", "step_ms", "memory_mb"):
        columns[name] = [_mean(row[name] for row in group) for group in groups]
    return columns


def evenly_spaced(items: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` of the items, evenly spaced, with the first and the last."""
    if len(items) <= limit:
        return list(items)
    places = np.linspace(0, len(items) - 1, limit).round().astype(int)
    return [items[place] for place in dict.fromkeys(places.tolist())]


def _shorten_maps(records: list[ValidationRecord]) -> tuple[list[ValidationRecord], list[str]]:
    """Leaves out tokens at the end of the passage, then validations, until the maps fit; and says so."""
    with_maps = [record for record in records if record.attention is not None]
    if not with_maps:
        return records, []
    L, H = with_maps[-1].attention.shape[:2]
    whole = T = len(with_maps[-1].labels)
    while len(with_maps) * L * H * T * (T + 1) // 2 > MAX_MAP_BYTES and T > MIN_TOKENS:
        T -= 1
    notes = []
    if whole > T:
        notes.append(f"The maps show the first {T} of {pluralize(whole, 'recorded token')}.")
    count = max(1, MAX_MAP_BYTES // (L * H * T * (T + 1) // 2))
    if count < len(with_maps):
        keep = {record.step for record in evenly_spaced(with_maps, count)} if count > 1 else {with_maps[-1].step}
        records = [record for record in records if record.step in keep]
        notes.append(f"The slider shows {len(records)} validations: the page would be too large with more maps.")
    return [shorten(record, T) for record in records], notes


def shorten(record: ValidationRecord, T: int) -> ValidationRecord:
    """The record with the maps of only the first T tokens."""
    if record.attention is None or len(record.labels) <= T:
        return record
    return replace(record, labels=record.labels[:T], attention=record.attention[..., : T * (T + 1) // 2])


def _validation(record: ValidationRecord) -> dict[str, Any]:
    """One position of the slider."""
    maps = record.attention
    return {
        "step": record.step,
        "tokens": record.tokens,
        "seconds": record.seconds,
        "nats_per_token": record.nats_per_token,
        "bits_per_byte": record.bits_per_byte,
        "text": None if record.text is None else record.text[:MAX_TEXT],
        "labels": list(record.labels),
        "shape": None if maps is None else list(maps.shape[:2]),
        "attention": None if maps is None else base64.b64encode(maps.tobytes()).decode(),
        "sample_tokens": record.sample_tokens,
        **{name: _plain(getattr(record, name)) for name in ("scores", "ablation_heads", "ablation_mlps", "lens")},
    }


def _plain(array: np.ndarray | None) -> list | None:
    """Nested lists of numbers with five digits after the point."""
    return None if array is None else np.round(array.astype(np.float64), 5).tolist()


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return round(sum(numbers) / len(numbers), 5) if numbers else None


def _load_summary(run_dir: Path) -> tuple[dict[str, Any], list[str]]:
    path = run_dir / "summary.json"
    if not path.is_file():
        return {}, []
    try:
        if path.stat().st_size > 1 << 20:
            raise ValueError("too large")
        summary = json.loads(path.read_text(encoding="utf-8"))
        return (summary, []) if isinstance(summary, dict) else ({}, ["summary.json is damaged and was left out."])
    except (OSError, ValueError, RecursionError):
        return {}, ["summary.json is damaged and was left out."]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15  # also leaves out NaN
