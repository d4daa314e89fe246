"""Which process of a run this is. With several devices each has one; the first (rank 0) speaks and writes for all.

The first one starts the others itself (training/processes.py), or a launcher starts all: torchrun, or SLURM's srun.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from system.errors import UserError

# What the first process tells those that it starts: its id, and the run's directory.
PARENT, RUN_DIR = "TINY_GPT_PARENT", "TINY_GPT_RUN_DIR"
# The variables with which each launcher tells a process its place: rank, rank on this machine, number of processes.
_LAUNCHERS = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    "srun": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"),
}
# Lightning and torch.distributed read these, also where something else has set them.
READ_BY_LIBRARIES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
READ_BY_LIBRARIES += (
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "JSM_NAMESPACE_RANK",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)
_kept: list[Any] = []  # the store lives as long as the process


def is_child_process() -> bool:
    """Whether the first process of the run started this one. Raises UserError where that process is gone."""
    if PARENT not in os.environ:
        return False
    if parent_is_gone():
        raise UserError(f"{PARENT} is set: train.py sets it for processes that it starts itself. Unset it.")
    return True


def parent_is_gone() -> bool:
    """Whether the process that started this one has ended, or never was: somebody else set the variable."""
    given = os.environ[PARENT]
    if os.name == "posix":
        return given != str(os.getppid())
    return not (given.isdigit() and psutil.pid_exists(int(given)))  # a virtual environment has one in between


def exit_with_parent() -> None:
    """Ends this process, silently, within a second of the one that started it: nobody waits for its result."""
    if is_child_process():
        threading.Thread(target=_wait_for_its_end, daemon=True).start()


def _wait_for_its_end() -> None:
    while not parent_is_gone():
        time.sleep(1.0)
    os._exit(1)


def launcher() -> str | None:
    """What started all processes of the run, this one among them, if there are several and it was not us."""
    for name, variables in _LAUNCHERS.items():
        if all(os.environ.get(variable, "").isdigit() for variable in variables):
            return name
    return None


def rank() -> int:
    """The number of this process among those of its run, from 0."""
    if is_child_process():
        return int(os.environ["LOCAL_RANK"])
    return _number(0) if launcher() else 0


def is_first() -> bool:
    """Whether this process speaks and writes for its run: it is the only one, or that of rank 0."""
    return rank() == 0


def is_duplicate_error() -> bool:
    """Whether an error of this process is that of the first one, which says it: a launcher started both, and what they
    did before training is the same."""
    torch = sys.modules.get("torch")
    return bool(launcher()) and not is_first() and not (torch and torch.distributed.is_initialized())


def launched_world_size() -> int:
    """How many processes the launcher started; 1 without one."""
    return _number(2) if launcher() else 1


def launched_per_machine() -> int:
    """How many of them run on this machine."""
    return _number(3) if launcher() else 1


def _number(place: int) -> int:
    return int(os.environ[_LAUNCHERS[launcher()][place]])


def ignore_stray_variables() -> None:
    """Takes variables away that would make Lightning wait for processes that nobody has started."""
    if not (launcher() or is_child_process()):
        for name in READ_BY_LIBRARIES:
            os.environ.pop(name, None)


def publish_run_dir(run_dir: Path) -> None:
    """Tells the processes that a launcher started where the run is. They wait for it in `published_run_dir`."""
    if launcher():
        _store().set(RUN_DIR, str(run_dir))


def published_run_dir() -> Path | None:
    """The directory that the first process chose; None in the first process."""
    if is_first():
        return None
    if is_child_process():
        return Path(os.environ[RUN_DIR])
    while not _store().check([RUN_DIR]):  # not its wait(), in which no signal would be answered
        time.sleep(0.1)
    return Path(_store().get(RUN_DIR).decode())


def _store() -> Any:
    """Key-value store of all processes of a launcher: that of torch.distributed, at MASTER_ADDR and MASTER_PORT."""
    if not _kept:
        from torch.distributed import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        from training.processes import cluster_environment

        environment = cluster_environment()
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        store, *_ = next(rendezvous("env://", rank(), launched_world_size()))
        _kept.append(PrefixStore("tiny-gpt", store))
    return _kept[0]
