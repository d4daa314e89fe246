"""Loss after a given time, from start to exit, compared with nanoGPT's laptop recipe.

    python -m benchmarks.quality [key=value ...]      the keys: configs/quality.yaml

Trains the baseline, experiment=nanogpt_cpu, then `budget=` with the baseline's time, a fifth and a seventh of it, and
each of `budgets`. Each run is a new process with an empty cache. The result is bits per byte on the whole validation
split; each line is the mean over the seeds. The last line is JSON.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from configs.entry_point import entry_point
from configs.schema import QualityConfig
from system.errors import UserError
from system.machine import machine

PROJECT = Path(__file__).resolve().parents[1]


def train(settings: list[str]) -> tuple[float, float, int]:
    """Runs train.py with an empty cache. Returns seconds from start to exit, bits per byte, and steps.

    Raises UserError with the last line of the run if it fails, for example because the budget is too short.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(PROJECT / "train.py"), *settings]
        start = time.perf_counter()
        places = [f"runs_dir={folder}/runs", f"data.cache_dir={folder}/cache"]
        finished = subprocess.run([*command, *places], capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if finished.returncode:
            raise UserError(finished.stderr.strip().rpartition("\n")[2].removeprefix("error: "))
        (summary,) = Path(folder).glob("runs/*/summary.json")
        values = json.loads(summary.read_text())
        return seconds, values["val_bits_per_byte"], values["steps"]


def measure(name: str, settings: list[str], seeds: int, text: list[str], yardstick: float | None = None) -> dict:
    """Trains once per seed. Prints the means as one line and returns them."""
    try:
        runs = [train([*settings, *text, f"seed={seed}"]) for seed in range(seeds)]
    except UserError as error:
        print(f"{name:24} refused: {error}", flush=True)
        return {"run": name, "refused": str(error)}
    seconds, bits, steps = (statistics.mean(values) for values in zip(*runs, strict=True))
    error = statistics.stdev(run[1] for run in runs) / seeds**0.5 if seeds > 1 else None
    shown_error = "" if error is None else f"±{error:.4f}"
    ratio = "" if yardstick is None else f"{bits / yardstick:12.3f}"
    print(f"{name:24} {seconds:8.1f} {steps:8.0f} {bits:10.4f} {shown_error:7} {ratio}", flush=True)
    return {
        "run": name,
        "seconds": seconds,
        "steps": steps,
        "bits_per_byte": bits,
        "standard_error": error,
        "seeds": seeds,
    }


def main(config: QualityConfig) -> None:
    """Prints the table and one JSON line. Raises UserError if the baseline cannot be trained."""
    if config.seeds < 1:
        raise UserError(f"seeds is {config.seeds}, but must be at least 1.")
    text = [] if config.corpus is None else [f"data.corpus={config.corpus}"]
    print(f"{'run':24} {'seconds':>8} {'steps':>8} {'bits/byte':>10} {'':7} {'x yardstick':>12}")
    rows = [measure("experiment=nanogpt_cpu", ["experiment=nanogpt_cpu"], config.seeds, text)]
    if "refused" in rows[0]:
        raise UserError(rows[0]["refused"])
    allowed, reached = rows[0]["seconds"], rows[0]["bits_per_byte"]
    parts = [f"{math.floor(10 * allowed / share) / 10}s" for share in (1, 5, 7)]
    for budget in (*parts, *config.budgets):
        rows.append(measure(f"budget={budget}", [f"budget={budget}"], config.seeds, text, reached))
    print(json.dumps({"benchmark": "quality", "machine": machine(), "rows": rows}))


if __name__ == "__main__":
    entry_point(main, "quality")
