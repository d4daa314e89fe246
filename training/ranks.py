"""The rank of this process in its run. There is one process per device; only the first (rank 0) prints and writes.

The first process starts the others (training/processes.py), or torchrun or SLURM's srun starts all of them.
"""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from system.errors import UserError

# Environment variables that the first process sets for those it starts: its process id, and the run directory.
PARENT, RUN_DIR = "TINY_GPT_PARENT", "TINY_GPT_RUN_DIR"
# Variables that each launcher sets: rank, rank on this machine, number of processes, processes per machine, ...
_LAUNCHERS = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    "srun": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"),
}
# Lightning and torch.distributed read these, even if they were set for another program.
READ_BY_LIBRARIES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
READ_BY_LIBRARIES += (
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "JSM_NAMESPACE_RANK",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)
_stores: list[Any] = []  # has the store after its first use; it has to live as long as the process


def is_child_process() -> bool:
    """Whether the first process of the run started this one. Raises UserError if that process has ended."""
    if PARENT not in os.environ:
        return False
    if parent_is_gone():
        raise UserError(f"{PARENT} is set: train.py sets it for processes that it starts itself. Unset it.")
    return True


def parent_is_gone() -> bool:
    """Whether the process that started this one has ended, or something else has set the variable."""
    given = os.environ[PARENT]
    if os.name == "posix":
        return given != str(os.getppid())
    return not (
        given.isdigit() and psutil.pid_exists(int(given))
    )  # with a virtual environment, another process is in between


def exit_with_parent() -> None:
    """Ends this process silently within a second after the process that started it."""
    if is_child_process():
        threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    while not parent_is_gone():
        time.sleep(1.0)
    os._exit(1)


def launcher() -> str | None:
    """Name of the launcher that started all processes of the run; None if train.py starts them."""
    for name, variables in _LAUNCHERS.items():
        if all(os.environ.get(variable, "").isdigit() for variable in variables):
            return name
    return None


def rank() -> int:
    """Rank of this process in its run, from 0."""
    if is_child_process():
        return int(os.environ["LOCAL_RANK"])
    return _launcher_variable(0) if launcher() else 0


def is_first() -> bool:
    """Whether this process prints and writes for its run, because it has rank 0."""
    return rank() == 0


def is_duplicate_error() -> bool:
    """Whether the first process reports the same error: a launcher started both, and they do the same until training
    starts."""
    torch = sys.modules.get("torch")
    return bool(launcher()) and not is_first() and not (torch and torch.distributed.is_initialized())


def launched_world_size() -> int:
    """Number of processes that the launcher started; 1 without a launcher."""
    return _launcher_variable(2) if launcher() else 1


def launched_per_machine() -> int:
    """Number of processes that the launcher started on this machine; 1 without a launcher."""
    return _launcher_variable(3) if launcher() else 1


def _launcher_variable(place: int) -> int:
    return int(os.environ[_LAUNCHERS[launcher()][place]])


def ignore_stray_variables() -> None:
    """Removes variables that would make Lightning wait for processes that were never started."""
    if not (launcher() or is_child_process()):
        for name in READ_BY_LIBRARIES:
            os.environ.pop(name, None)


def publish_run_dir(run_dir: Path) -> None:
    """Sends the run directory to the other processes of a launcher, which wait for it in `published_run_dir`."""
    if launcher():
        _store().set(RUN_DIR, str(run_dir))


def published_run_dir() -> Path | None:
    """The run directory that the first process has chosen; None in the first process."""
    if is_first():
        return None
    if is_child_process():
        return Path(os.environ[RUN_DIR])
    while not _store().check([RUN_DIR]):  # not wait(), which would block signals
        time.sleep(0.1)
    return Path(_store().get(RUN_DIR).decode())


def _store() -> Any:
    """Key-value store of torch.distributed, at MASTER_ADDR and MASTER_PORT, for all processes of a launcher."""
    if not _stores:
        from torch.distributed import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        from training.processes import cluster_environment

        environment = cluster_environment()
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        store, *_ = next(rendezvous("env://", rank(), launched_world_size()))
        _stores.append(PrefixStore("tiny-gpt", store))
    return _stores[0]
