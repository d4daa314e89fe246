"""Several processes of one run, one a device: started, watched, and ended together.

Where one of them ends, however it does, the others do too: within seconds, and with one line that says why.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from system.errors import UserError
from system.streams import print_error, print_note
from training import ranks
from training.callbacks.graceful_stop import GracefulStop, StoppedBySignal

_LOST = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe|store->get|TCPStore", re.I)
_SECONDS_TO_END = 30.0  # that the others get after the first one is done


def cluster_environment() -> ClusterEnvironment:
    """Where a process learns its place: from what started it, whatever other variables may say."""
    if ranks.launcher() == "srun":
        return SLURMEnvironment(auto_requeue=False)
    return TorchElasticEnvironment() if ranks.launcher() else LightningEnvironment()


def launched_devices() -> dict[str, int]:
    """The Trainer's options that a launcher has decided already."""
    if not ranks.launcher():
        return {}
    per_machine = ranks.launched_per_machine()
    return {"devices": per_machine, "num_nodes": max(1, ranks.launched_world_size() // per_machine)}


def check_processes(trainer: Trainer, strategy: Any) -> None:
    """Raises UserError where the Trainer would start processes in a way of its own, or wait for some nobody starts.

    Args:
        strategy: the option, to be named.
    """
    launcher = trainer.strategy.launcher
    supported = type(trainer.strategy) in (SingleDeviceStrategy, DDPStrategy)
    if not supported or not isinstance(launcher, (_SubprocessScriptLauncher, type(None))):
        raise UserError(
            f"trainer.strategy={strategy} is not supported. Use trainer.strategy=ddp, which trains one process a "
            "device, or leave it out."
        )
    started = ranks.launched_world_size()
    if ranks.launcher() and trainer.world_size != started:
        raise UserError(
            f"{ranks.launcher()} started {started} processes, but trainer.devices x trainer.num_nodes is "
            f"{trainer.world_size}. Leave both out, or let them agree."
        )
    if not ranks.launcher() and trainer.num_nodes > 1:
        raise UserError(
            f"trainer.num_nodes is {trainer.num_nodes}, but this process cannot start others on other machines. On "
            f"each machine use torchrun --nnodes={trainer.num_nodes} --nproc_per_node=DEVICES --rdzv-backend=c10d "
            "--rdzv-endpoint=HOST:PORT train.py ..."
        )


class Processes(_SubprocessScriptLauncher):
    """Starts a process for each further device, with the settings of this one.

    Their errors go into a file each, and are shown where the first process has none of its own.

    Args:
        overrides: the settings, as Hydra takes them.
    """

    def __init__(self, environment: ClusterEnvironment, num_processes: int, run_dir: Path, overrides: tuple[str, ...]):
        super().__init__(environment, num_processes, num_nodes=1)
        self._run_dir = run_dir
        self._overrides = overrides
        self._errors: list[IO[bytes]] = []

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Calls the function, after the other processes were started; once a run."""
        if not self.procs and not self.cluster_environment.creates_processes_externally:
            self._start()
        _set_num_threads_if_needed(self.num_processes)
        return function(*args, **kwargs)

    def _start(self) -> None:
        place = {
            "MASTER_ADDR": self.cluster_environment.main_address,
            "MASTER_PORT": str(self.cluster_environment.main_port),
            ranks.PARENT: str(os.getpid()),
            ranks.RUN_DIR: str(self._run_dir),
        }
        # The settings of this run alone: in a sweep the command line has those of others too.
        command = [sys.executable, os.path.abspath(sys.argv[0]), *self._overrides, "hydra.mode=RUN"]
        for rank in range(1, self.num_processes):
            self._errors.append(tempfile.TemporaryFile())  # noqa: SIM115 -- closed in `end`
            process = subprocess.Popen(
                command,
                env=os.environ | place | {"LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors[-1],
            )
            self.procs.append(process)

    def failed(self) -> tuple[int, int] | None:
        """Rank and exit code of a process that did not end well; None: there is none."""
        for rank, process in enumerate(self.procs, start=1):
            if process.poll():
                return rank, process.returncode
        return None

    def why(self, resume_command: str) -> BaseException:
        """What the end of another process means for this one: the signal it got, its error, or one line about it."""
        rank, code = self.failed()
        if (number := -code if code < 0 else code - 128) in GracefulStop.SIGNALS:
            return StoppedBySignal(number)
        self._errors[rank - 1].seek(0)
        printed = self._errors[rank - 1].read().decode(errors="replace")
        if code == 2 and (lines := re.findall(r"^error: (.*)$", printed, re.M)):
            return UserError(lines[-1])
        if printed:  # a traceback: somebody has to see it
            print_note(printed.rstrip("\n"))
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        memory = ", which the system sends where memory is used up" if code == -signal.SIGKILL else ""
        return UserError(
            f"the process of rank {rank} {how}{memory}. Earlier checkpoints are complete; resume with: {resume_command}"
        )

    def end(self, seconds: float) -> None:
        """Waits for the others, at most so long, and ends them."""
        deadline = time.monotonic() + seconds
        for process in self.procs:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self.procs:
            process.kill()
            process.wait()
        for file in self._errors:
            file.close()
        self.procs, self._errors = [], []

    def kill(self, signum: int) -> None:
        """Lightning would pass signals on, before the step is over."""


class Watch(threading.Thread):
    """Ends all processes where the main thread of the first cannot: waiting inside of torch, it hears of no signal.

    Args:
        others: the processes that this one starts.
        graceful_stop: knows whether a signal waits for the step's end.
        resume_command: for the line about a process that failed.
        stopped: says what is saved, where it was a signal.
    """

    SECONDS_BETWEEN_LOOKS = 0.5
    SECONDS_TO_ANSWER = 5.0  # that the main thread has

    def __init__(self, others: Processes, graceful_stop: GracefulStop, resume_command: str, stopped: Callable):
        super().__init__(daemon=True)
        self._others, self._graceful_stop = others, graceful_stop
        self._resume_command, self._stopped = resume_command, stopped
        self._over = threading.Event()
        self._signals = b""

    def __enter__(self) -> None:
        self._told, teller = self._sockets = socket.socketpair()
        for end in self._sockets:
            end.setblocking(False)
        # Python writes each signal's number here at once, whatever the main thread does.
        self._before = signal.set_wakeup_fd(teller.fileno(), warn_on_full_buffer=False)
        self.start()

    def __exit__(self, *args) -> None:
        self._over.set()
        signal.set_wakeup_fd(self._before)
        self.join()
        for end in self._sockets:
            end.close()

    def run(self) -> None:
        """Looks from time to time."""
        since = None
        while not self._over.wait(self.SECONDS_BETWEEN_LOOKS):
            with suppress(BlockingIOError):
                received = self._told.recv(100)  # also of others that have a handler, such as SIGCONT
                self._signals += bytes(number for number in received if number in GracefulStop.SIGNALS)
            at_once = len(self._signals) > (1 if self._graceful_stop.training else 0)
            if not at_once and not self._others.failed():
                continue
            since = since or time.monotonic()
            if time.monotonic() - since > self.SECONDS_TO_ANSWER:
                self._end_all(StoppedBySignal(self._signals[-1]) if at_once else self._others.why(self._resume_command))

    def _end_all(self, reason: BaseException) -> None:
        self._others.end(0.0)
        if isinstance(reason, StoppedBySignal):
            self._stopped()
            os._exit(128 + reason.args[0])
        print_error(str(reason))
        os._exit(2)


@contextmanager
def supervise(
    trainer: Trainer, graceful_stop: GracefulStop, resume_command: str, stopped: Callable[[], None]
) -> Iterator[None]:
    """Around training: all processes of the run end where one does, and one of them says why.

    Raises:
        UserError, StoppedBySignal: what another process ended by.
    """
    others = trainer.strategy.launcher
    if trainer.world_size == 1:
        yield
        return
    if not isinstance(others, Processes):
        with _end_explained(None, resume_command):
            yield
        return
    seconds = 0.0
    try:
        with Watch(others, graceful_stop, resume_command, stopped), _end_explained(others, resume_command):
            yield
        seconds = _SECONDS_TO_END
    finally:
        others.end(seconds)
        with suppress(Exception):  # the next run of a sweep has a group of its own
            torch.distributed.destroy_process_group()


@contextmanager
def _end_explained(others: Processes | None, resume_command: str) -> Iterator[None]:
    """Raises in place of torch's complaint about a lost connection what is behind it."""
    try:
        yield
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        if not ranks.is_first():
            sys.exit(1)
        if others is None:
            raise UserError(
                "another process of this run ended; its own lines say why. Earlier checkpoints are complete; "
                f"resume with: {resume_command}"
            ) from error
        deadline = time.monotonic() + _SECONDS_TO_END
        while not others.failed():
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        raise others.why(resume_command) from None
