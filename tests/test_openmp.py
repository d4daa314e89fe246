"""Two programs share the cores: how OpenMP waits is decided before torch is imported, unless the user has."""

import subprocess
import sys
from pathlib import Path

import pytest

from system.openmp import SPIN_COUNT

PROJECT = Path(__file__).resolve().parents[1]
CODE = """
import os, sys

class AtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, AtTorch())
import {module}
import torch
"""


def spins(module: str, clean_environment: dict[str, str], **env: str) -> str:
    """GOMP_SPINCOUNT at the moment at which torch is imported."""
    unset = {name: value for name, value in clean_environment.items() if "OMP_" not in name}
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(module=module)],
        cwd=PROJECT,
        env=unset | env,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["train", "sample", "analysis.inspect_attention", "analysis.lessons", "benchmarks"])
def test_every_program_says_how_long_threads_spin_before_torch_is_there(clean_environment, module):
    assert spins(module, clean_environment) == str(SPIN_COUNT)


def test_what_the_user_has_set_stays(clean_environment):
    assert spins("train", clean_environment, GOMP_SPINCOUNT="7") == "7"
    assert spins("train", clean_environment, OMP_WAIT_POLICY="ACTIVE") == "None"
