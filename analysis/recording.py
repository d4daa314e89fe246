"""What a run records for its report: files in its directory, written while it trains.

    recording/run.json               facts about the run: its config, its size, the text
    recording/curve.jsonl            one line per logging interval: training loss, time and memory of a step
    recording/step-00001234.npz      one file per validation: attention maps, scores, losses, a sample of text

Files may come from another person: they are read without pickle, their sizes are bounded, and all values are checked.
"""

import io
import json
import math
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.colors import color_rows
from system.checks import COUNT, SECONDS, Bounded, check
from system.files import atomic_write

FOLDER = "recording"
MAX_BYTES = 64 << 20  # of one file, unpacked
MAX_TEXT = 1 << 16  # characters
MAX_NESTED = 300  # lists and dictionaries in run.json
WRONG_VALUES = (ValueError, KeyError, TypeError, RecursionError)
HEAD_SCORES = ("entropy", "distance", "previous", "first", "induction", "duplicate")

_FINITE = Bounded(float, -1e30, 1e30)
_FACTS_OF_VALIDATION = {
    "step": COUNT,
    "tokens": COUNT,
    "seconds": SECONDS,
    "nats_per_token": _FINITE,
    "bits_per_byte": _FINITE,
    "text": str | None,
    "labels": [str],
    "sample_tokens": COUNT,
}
_CURVE_ROW = {
    "step": COUNT,
    "loss": _FINITE,
    "tokens": COUNT,
    "memory_mb": (_FINITE, type(None)),
    "step_ms": (_FINITE, type(None)),
}
_FACTS_OF_RUN = {
    "config": {str: object},
    "changed": [str],
    "command": str,
    "parameters": COUNT,
    "about": str,
    "budget": str,
    "prompt": str,
    "longer": str,
    "machine": str,
}


@dataclass(frozen=True)
class ValidationRecord:
    """One validation. L layers, H heads, T tokens of the passage. Arrays are None where nothing was measured."""

    step: int
    tokens: int
    """Trained on so far."""
    seconds: float
    """Since the run started."""
    nats_per_token: float
    bits_per_byte: float
    text: str | None = None
    """What the network wrote."""
    labels: tuple[str, ...] = ()
    """T labels of the tokens of the passage."""
    attention: np.ndarray | None = None
    """(L, H, T (T + 1) / 2) uint8: rows of analysis.colors.SCALE, the lower triangle of each map, row by row."""
    scores: np.ndarray | None = None
    """(6, L, H) float32, in the order of HEAD_SCORES."""
    ablation_heads: np.ndarray | None = None
    """(L, H) float32: increase of the loss without the head, in nats per token."""
    ablation_mlps: np.ndarray | None = None
    """(L,) float32: increase of the loss without the MLP."""
    lens: np.ndarray | None = None
    """(L + 1,) float32: loss of the next token after the embedding and after each layer (the logit lens)."""
    sample_tokens: int = 0
    """Number of tokens that the ablations and the lens are means over."""

    ARRAYS = ("attention", "scores", "ablation_heads", "ablation_mlps", "lens")


def pack_maps(maps: np.ndarray) -> np.ndarray:
    """Attention maps (L, H, T, T) as one byte per weight, the lower triangle row by row: (L, H, T (T + 1) / 2)."""
    query, key = np.tril_indices(maps.shape[-1])
    return color_rows(maps[:, :, query, key])


# Writing


def save_validation(run_dir: Path, record: ValidationRecord) -> None:
    """Writes the file of one validation atomically. Raises OSError."""
    facts = {name: getattr(record, name) for name in _FACTS_OF_VALIDATION}
    arrays = {name: getattr(record, name) for name in record.ARRAYS if getattr(record, name) is not None}
    content = io.BytesIO()
    np.savez(content, facts=np.frombuffer(json.dumps(facts).encode(), np.uint8), **arrays)
    path = validation_file(run_dir, record.step)
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path, path.with_name("step.tmp")) as file:
        file.write(content.getvalue())


def append_to_curve(run_dir: Path, row: Mapping[str, float | None]) -> None:
    """Appends the values of a logging interval. Raises OSError."""
    plain = {name: value if value is None or math.isfinite(value) else None for name, value in row.items()}
    path = run_dir / FOLDER / "curve.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(plain) + "\n")


def save_facts(run_dir: Path, facts: Mapping[str, Any]) -> None:
    """Writes run.json atomically. Raises OSError."""
    path = run_dir / FOLDER / "run.json"
    path.parent.mkdir(exist_ok=True)
    with atomic_write(path, path.with_name("run.tmp")) as file:
        file.write((json.dumps(facts, indent=1) + "\n").encode())


def rewind(run_dir: Path, step: int) -> None:
    """Removes what was recorded after this step, before a run is resumed from it."""
    for path in (run_dir / FOLDER).glob("step-*.npz"):
        if _step_of(path) > step:
            path.unlink()
    path = run_dir / FOLDER / "curve.jsonl"
    if path.is_file():
        rows, _ = load_curve(run_dir)
        with atomic_write(path, path.with_name("curve.tmp")) as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step).encode())


# Reading


def load_validations(run_dir: Path) -> tuple[list[ValidationRecord], list[str]]:
    """The validations in the order of their steps, and a line for each file that is damaged."""
    records, notes = [], []
    for path in sorted((run_dir / FOLDER).glob("step-*.npz"), key=_step_of):
        try:
            records.append(_load_validation(path))
        except (OSError, EOFError, zipfile.BadZipFile, NotImplementedError, *WRONG_VALUES):
            notes.append(f"{FOLDER}/{path.name} is damaged and was left out.")
    return records, notes


def load_curve(run_dir: Path) -> tuple[list[dict[str, float | None]], list[str]]:
    """The rows of the training curve in the order of their steps, and a line if some are damaged."""
    path, rows, damaged = run_dir / FOLDER / "curve.jsonl", {}, 0
    if not path.is_file():
        return [], []
    if path.stat().st_size > MAX_BYTES:
        return [], [f"{FOLDER}/{path.name} is larger than {MAX_BYTES >> 20} MB and was left out."]
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            check(row, _CURVE_ROW, "row")
            rows[row["step"]] = {name: row[name] for name in _CURVE_ROW}
        except (ValueError, RecursionError):
            damaged += 1
    lines = "a line" if damaged == 1 else f"{damaged:,} lines"
    notes = [f"{FOLDER}/{path.name} has {lines} that cannot be read."] if damaged else []
    return [rows[step] for step in sorted(rows)], notes


def load_facts(run_dir: Path) -> dict[str, Any]:
    """The facts about the run. Raises ValueError if the file is missing or damaged."""
    try:
        path = run_dir / FOLDER / "run.json"
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("it is too large")
        text = path.read_text(encoding="utf-8")
        if text.count("{") + text.count("[") > MAX_NESTED:
            raise ValueError("it has too many nested values")
        facts = json.loads(text)
        check(facts, _FACTS_OF_RUN, "run")
        return facts
    except (OSError, RecursionError) as error:
        raise ValueError(str(error)) from error


def validation_file(run_dir: Path, step: int) -> Path:
    """The file of the validation at this step."""
    return run_dir / FOLDER / f"step-{step:08d}.npz"


def _step_of(path: Path) -> int:
    match = re.fullmatch(r"step-(\d{8,15})\.npz", path.name)
    return int(match[1]) if match else -1


def _load_validation(path: Path) -> ValidationRecord:
    """Raises ValueError and others if the file is not what `save_validation` writes."""
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > MAX_BYTES:
            raise ValueError("too large")
        for entry in archive.infolist():
            _check_size(archive, entry)
    with np.load(path, allow_pickle=False) as archive:
        found = {name: archive[name] for name in archive.files}
    facts = json.loads(found.pop("facts").tobytes().decode())
    check(facts, _FACTS_OF_VALIDATION, "facts")
    if facts["step"] != _step_of(path):
        raise ValueError("another step")
    if len(facts["text"] or "") > MAX_TEXT or any(len(label) > MAX_TEXT for label in facts["labels"]):
        raise ValueError("too long a text")
    record = ValidationRecord(**(facts | {"labels": tuple(facts["labels"])}), **found)  # other names: TypeError
    _check_shapes(record)
    return record


def _check_size(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Raises ValueError if an array is larger than its data: NumPy would allocate it first."""
    with archive.open(entry) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("another version of the format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if math.prod(shape) * dtype.itemsize > entry.file_size:
        raise ValueError("an array is larger than its data")


def _check_shapes(record: ValidationRecord) -> None:
    """Raises ValueError if the arrays do not fit each other."""
    T = len(record.labels)
    if record.attention is None:
        if any(getattr(record, name) is not None for name in record.ARRAYS):
            raise ValueError("scores without maps")
        return
    L, H = record.attention.shape[:2]
    shapes = {
        "attention": (L, H, T * (T + 1) // 2),
        "scores": (len(HEAD_SCORES), L, H),
        "ablation_heads": (L, H),
        "ablation_mlps": (L,),
        "lens": (L + 1,),
    }
    for name, shape in shapes.items():
        array = getattr(record, name)
        kind = np.uint8 if name == "attention" else np.float32
        if array is not None and (array.shape != shape or array.dtype != kind or not np.isfinite(array).all()):
            raise ValueError(f"{name} is not {shape}")
