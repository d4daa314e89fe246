"""Startup time: from `python train.py` to the end of the first optimizer step, with cached tokens.

    python -m benchmarks.startup [key=value ...]      the keys: configs/train.yaml

Compares it with `import torch, lightning`, the minimum for any program that uses Lightning, from the start of the
process. Neither time includes the exit of the process. Both run in new processes and alternate, after one round to fill
the cache. train.py runs unchanged; a PyTorch hook reports the end of the first step. The last line is JSON.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from configs.compose import compose
from configs.entry_point import entry_point
from system.errors import UserError
from system.machine import machine

ROUNDS = 5
PROMISED_RATIO = 1.6
PROJECT = Path(__file__).resolve().parents[1]
# Prefix of both programs: `over` sends the time to the parent process and exits.
OVER = """
import os, runpy, sys, time

def over(*_):
    os.write(int(os.environ["OVER_TO"]), repr(time.time()).encode())
    os._exit(0)

"""
IMPORTS = OVER + "import torch, lightning; over()"
TRAIN = (
    OVER
    + """
from torch.optim.optimizer import register_optimizer_step_post_hook

register_optimizer_step_post_hook(over)
sys.path.insert(0, os.getcwd())
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""
)


def seconds_until_over(code: str, arguments: list[str]) -> float:
    """Seconds from the start of a Python process until it calls `over`. Raises UserError if it never does."""
    ours, theirs = os.pipe()
    start = time.time()
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=PROJECT,
        env=os.environ | {"OVER_TO": str(theirs)},
        pass_fds=[theirs],
        capture_output=True,
        text=True,
    )
    os.close(theirs)
    with os.fdopen(ours) as answer:
        end = answer.read()
    if not end:
        raise UserError((process.stderr or process.stdout).strip().rpartition("\n")[2].removeprefix("error: "))
    return float(end) - start


def main(arguments: list[str]) -> None:
    """Prints one line per round, the median ratio, and one JSON line."""
    compose("train", arguments)  # raises for invalid settings
    rounds = []
    print(f"{'round':>5} {'imports, s':>11} {'first step, s':>14} {'ratio':>7}")
    for number in range(ROUNDS + 1):
        with tempfile.TemporaryDirectory() as runs_dir:
            imports = seconds_until_over(IMPORTS, [])
            first_step = seconds_until_over(TRAIN, [f"runs_dir={runs_dir}", *arguments])
        if number:  # round 0 fills the caches
            rounds.append((imports, first_step))
            print(f"{number:5} {imports:11.2f} {first_step:14.2f} {first_step / imports:7.2f}", flush=True)
    ratio = statistics.median(first_step / imports for imports, first_step in rounds)
    imports_s, first_step_s = (statistics.median(side) for side in zip(*rounds, strict=True))
    print(
        f"the first step is over after {first_step_s:.2f} s, {ratio:.2f} times as long as importing torch and "
        f"lightning takes (medians of {ROUNDS} rounds); promised: at most {PROMISED_RATIO}"
    )
    print(json.dumps({"benchmark": "startup", "machine": machine(), "imports_s": round(imports_s, 3),
                      "first_step_s": round(first_step_s, 3), "ratio": round(ratio, 3)}))  # fmt: skip


if __name__ == "__main__":
    entry_point(main)
