"""What a step frees is there for the next one."""

import os
import subprocess
import sys

import pytest

COUNT = """
import resource, sys, torch
from system.memory import disable_malloc_trim
if sys.argv[1] == "kept":
    disable_malloc_trim()
def step():
    tensors = [torch.ones(400_000 * (1 + i % 3)) for i in range(20)]  # 1.6 to 4.8 MB each
    return tensors[0][0]
for _ in range(10):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a matter of glibc")
def test_pages_are_made_once_and_not_in_every_step():
    def faults(how: str) -> int:
        command = [sys.executable, "-c", COUNT, how]
        # glibc's rule as it starts out; left alone it adapts, to one process more than to another.
        rule = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
        counted = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | rule)
        return int(counted.stdout)

    kept, returned = faults("kept"), faults("returned")
    if returned < 10_000:
        pytest.skip("this system's allocator is not glibc's")
    assert kept < returned / 20
