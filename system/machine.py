"""The machine that timings were measured on."""

import os
import platform
from datetime import date
from importlib import metadata
from pathlib import Path

from system.text import pluralize


def machine() -> str:
    """Describes processor, versions and date, for example
    "AMD EPYC (family 25, model 17), 2 cores, torch 2.13.0+cpu, Python 3.11.7, Linux, 2026-11-29".
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    facts: dict[str, str] = {}
    for name, _, value in (line.partition(":") for line in lines):
        facts.setdefault(name.strip(), value.strip())  # those of the first core
    processor = facts.get("model name") or platform.processor() or platform.machine()
    if {"cpu family", "model"} <= facts.keys():  # the name alone may leave the generation open
        processor += f" (family {facts['cpu family']}, model {facts['model']})"
    return ", ".join(
        [
            processor,
            pluralize(os.cpu_count(), "core"),
            f"torch {metadata.version('torch')}",
            f"Python {platform.python_version()}",
            platform.system(),
            str(date.today()),
        ]
    )
