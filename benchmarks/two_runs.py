"""Two concurrent runs on the same cores: the effect of how long OpenMP threads spin while they wait.

    python -m benchmarks.two_runs [SPIN_COUNT ...]      (default: 10000)

Each process trains the default network for SECONDS with PyTorch's default number of threads. One run and two concurrent
runs alternate, with libgomp's default wait ("default"), without spinning (OMP_WAIT_POLICY=PASSIVE), and with each given
GOMP_SPINCOUNT. Figures are relative to the speed of one run with the default wait in the same round; medians over
ROUNDS. The last line is JSON.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from configs.entry_point import entry_point
from system.errors import UserError
from system.machine import machine

SECONDS, ROUNDS = 6.0, 5
PROJECT = Path(__file__).resolve().parents[1]
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def train_default_steps() -> None:
    """Runs in the measured process: prints "ready", waits for a line, trains, prints optimizer steps per second."""
    import torch

    from model.gpt import GPT
    from model.kernels.bfloat16 import matmul_precision
    from system.memory import disable_malloc_trim
    from training.budget import REFERENCE, REFERENCE_BATCH
    from training.config import OptimizerConfig
    from training.optim import build_optimizer
    from training.trainer import best_precision

    disable_malloc_trim()
    device = torch.device("cpu")
    network = GPT(REFERENCE)
    optimizer = build_optimizer(network, OptimizerConfig())
    ids = torch.randint(REFERENCE.vocab_size, (REFERENCE_BATCH, REFERENCE.context_length))  # (B, T)
    steps, start = -5, 0.0  # the first ones allocate
    while steps <= 0 or time.perf_counter() - start < SECONDS:
        if steps == 0:
            print("ready", flush=True)
            sys.stdin.readline()
            start = time.perf_counter()
        with matmul_precision(best_precision(device)):
            loss = network.loss(ids, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    print(steps / (time.perf_counter() - start))


def speeds(number: int, wait: dict[str, str]) -> list[float]:
    """Steps per second of each of `number` processes that train concurrently.

    Args:
        wait: environment variables that set how threads wait.
    """
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | wait
    code = "from benchmarks.two_runs import train_default_steps; train_default_steps()"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT, env=environment, text=True,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(number)
    ]  # fmt: skip
    for process in processes:
        if process.stdout.readline() != "ready\n":
            raise UserError("A process could not train. Free memory, or end other programs.")
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    return [float(process.communicate()[0]) for process in processes]


def main(arguments: list[str]) -> None:
    """Prints one line per wait policy, and one JSON line. Raises UserError for invalid spin counts."""
    counts = arguments or ["10000"]
    if not all(count.isdecimal() for count in counts):
        raise UserError(f"spin counts are {' '.join(counts)!r}, but must be whole numbers, such as 10000.")
    ways = {"default": {"GOMP_SPINCOUNT": "300000"}, "passive": {"OMP_WAIT_POLICY": "PASSIVE"}}
    ways |= {f"spin {count}": {"GOMP_SPINCOUNT": str(count)} for count in counts}
    shares: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        measured = {name: (sum(speeds(1, wait)), sum(speeds(2, wait))) for name, wait in ways.items()}
        alone = measured["default"][0]
        for name, (one, two) in measured.items():
            shares[name].append((one / alone, two / alone))
        print(f"round {number + 1} of {ROUNDS}: one run alone takes {1000 / alone:.1f} ms a step", flush=True)
    print(f"{'wait':>14} {'one alone':>10} {'two together':>13}")
    medians = {
        name: [round(statistics.median(side), 4) for side in zip(*rounds, strict=True)]
        for name, rounds in shares.items()
    }
    for name, (one, two) in medians.items():
        print(f"{name:>14} {one:10.1%} {two:13.1%}")
    print(json.dumps({"benchmark": "two_runs", "machine": machine(), "shares_of_one_alone": medians}))


if __name__ == "__main__":
    entry_point(main)
