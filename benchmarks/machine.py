"""On what a benchmark was run: a value of its JSON."""

import os
import platform
from datetime import date
from importlib import metadata
from pathlib import Path

from system.text import counted


def machine() -> str:
    """For example "AMD EPYC, 2 cores, torch 2.13.0+cpu, Python 3.11.7, Linux, 2026-11-29"."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return ", ".join(
        [
            processor,
            counted(os.cpu_count(), "core"),
            f"torch {metadata.version('torch')}",
            f"Python {platform.python_version()}",
            platform.system(),
            str(date.today()),
        ]
    )
