"""How and when this process was started."""

import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import psutil

from system.files import relative
from system.running_clock import running_seconds


def python_command() -> str:
    """The shell command for the running Python interpreter, for commands that messages suggest."""
    return "python" if shutil.which("python") == sys.executable else shlex.quote(str(relative(Path(sys.executable))))


def script_path(name: str) -> str:
    """A script of this project as a shell word, for commands that messages suggest: they work from this directory."""
    return shlex.quote(str(relative(Path(__file__).resolve().parents[1] / name)))


def script_command(name: str) -> str:
    """The shell command that runs a script of this project, such as "train.py"; it works from this directory."""
    return f"{python_command()} {script_path(name)}"


_job_starts: list[float] = []


def command_start() -> float:
    """Start time of this run, as a value of running_seconds(). The first run of a process starts with the process."""
    age = 0.0 if _job_starts else max(0.0, process_age())
    _job_starts.append(running_seconds() - age)
    return _job_starts[-1]


def process_age() -> float:
    """Seconds since this process was started."""
    stat = Path("/proc/self/stat")
    if stat.exists() and hasattr(time, "CLOCK_BOOTTIME"):  # precise to 10 ms; psutil rounds the boot time to seconds
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # field 22, starttime, see proc(5)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - psutil.Process().create_time()
