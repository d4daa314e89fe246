"""This process: what started it, and when."""

import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import psutil

from system.files import relative
from system.running_clock import running_seconds


def this_python() -> str:
    """What starts the Python running now."""
    return "python" if shutil.which("python") == sys.executable else shlex.quote(str(relative(Path(sys.executable))))


_job_starts: list[float] = []


def command_start() -> float:
    """When this run began, as running_seconds() would have read: for the first of a process, when the process did."""
    age = 0.0 if _job_starts else max(0.0, process_age())
    _job_starts.append(running_seconds() - age)
    return _job_starts[-1]


def process_age() -> float:
    """Seconds since this process began."""
    stat = Path("/proc/self/stat")
    if stat.exists() and hasattr(time, "CLOCK_BOOTTIME"):  # to a hundredth; psutil knows the boot to a second only
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # field 22, starttime, see proc(5)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - psutil.Process().create_time()
