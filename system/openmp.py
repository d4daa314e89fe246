"""How long OpenMP's threads, between two parallel regions, wait in a busy loop before they sleep.

Imported before torch, whose libgomp reads the environment once, when it is loaded. By itself it spins for 300,000
rounds, some 5 to 15 ms: with two programs on the same cores, the waiting threads of one keep the working threads of the
other from their core. `python -m benchmarks.two_runs` measures what a shorter wait costs one run and gains two.
"""

import os

SPIN_COUNT = 10_000
"""Rounds of libgomp's busy loop: longer than the gaps between the operators of a default step."""


def share_cores() -> None:
    """Sets the default of this process and of those it starts. What the user has set stays as it is."""
    if "OMP_WAIT_POLICY" not in os.environ:  # libgomp derives the rounds from it
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


share_cores()
