"""Starts, watches and ends the processes of a run on several devices, one per device.

When one of them ends for any reason, the others end within seconds, and one line says why.
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

_CONNECTION_LOST = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe|store->get|TCPStore", re.I)
_SECONDS_TO_END = 30.0  # for the other processes, after the first one has finished


def cluster_environment() -> ClusterEnvironment:
    """Lightning's source of ranks: the launcher that started this process, whatever other variables are set."""
    if ranks.launcher() == "srun":
        return SLURMEnvironment(auto_requeue=False)
    return TorchElasticEnvironment() if ranks.launcher() else LightningEnvironment()


def launched_devices() -> dict[str, int]:
    """Trainer options that the launcher has decided."""
    if not ranks.launcher():
        return {}
    per_machine = ranks.launched_per_machine()
    return {"devices": per_machine, "num_nodes": max(1, ranks.launched_world_size() // per_machine)}


def check_processes(trainer: Trainer, strategy: Any) -> None:
    """Raises UserError if the Trainer would start processes by itself, or wait for processes that are never started.

    Args:
        strategy: option trainer.strategy, for the message.
    """
    launcher = trainer.strategy.launcher
    supported = type(trainer.strategy) in (SingleDeviceStrategy, DDPStrategy)
    if not supported or not isinstance(launcher, (_SubprocessScriptLauncher, type(None))):
        raise UserError(
            f"trainer.strategy={strategy} is not supported. Use trainer.strategy=ddp, which runs one process per "
            "device, or leave it out."
        )
    started = ranks.launched_world_size()
    if ranks.launcher() and trainer.world_size != started:
        raise UserError(
            f"{ranks.launcher()} started {started} processes, but trainer.devices x trainer.num_nodes is "
            f"{trainer.world_size}. Leave both out, or make them equal."
        )
    if not ranks.launcher() and trainer.num_nodes > 1:
        raise UserError(
            f"trainer.num_nodes is {trainer.num_nodes}, but this process cannot start others on other machines. On "
            f"each machine use torchrun --nnodes={trainer.num_nodes} --nproc_per_node=DEVICES --rdzv-backend=c10d "
            "--rdzv-endpoint=HOST:PORT train.py ..."
        )


class ProcessLauncher(_SubprocessScriptLauncher):
    """Starts one process for each further device, with the same settings.

    The standard error of each goes into a temporary file, and is printed if the first process has no error itself.

    Args:
        overrides: the settings as Hydra overrides.
    """

    def __init__(self, environment: ClusterEnvironment, num_processes: int, run_dir: Path, overrides: tuple[str, ...]):
        super().__init__(environment, num_processes, num_nodes=1)
        self._run_dir = run_dir
        self._overrides = overrides
        self._errors: list[IO[bytes]] = []

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Starts the other processes, once per run, and calls the function."""
        if not self.procs and not self.cluster_environment.creates_processes_externally:
            self._start()
        _set_num_threads_if_needed(self.num_processes)
        return function(*args, **kwargs)

    def _start(self) -> None:
        variables = {
            "MASTER_ADDR": self.cluster_environment.main_address,
            "MASTER_PORT": str(self.cluster_environment.main_port),
            ranks.PARENT: str(os.getpid()),
            ranks.RUN_DIR: str(self._run_dir),
        }
        # Only the settings of this run: in a sweep, the command line has the values of all runs.
        command = [sys.executable, os.path.abspath(sys.argv[0]), *self._overrides, "hydra.mode=RUN"]
        for rank in range(1, self.num_processes):
            self._errors.append(tempfile.TemporaryFile())  # noqa: SIM115 -- `end` closes it
            process = subprocess.Popen(
                command,
                env=os.environ | variables | {"LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors[-1],
            )
            self.procs.append(process)

    def failed(self) -> tuple[int, int] | None:
        """Rank and exit code of a process that failed; None if there is none."""
        for rank, process in enumerate(self.procs, start=1):
            if process.poll():
                return rank, process.returncode
        return None

    def failure(self, resume_command: str) -> BaseException:
        """The exception for the process that failed: its signal, its error, or one line about its exit code."""
        rank, code = self.failed()
        if (number := -code if code < 0 else code - 128) in GracefulStop.SIGNALS:
            return StoppedBySignal(number)
        self._errors[rank - 1].seek(0)
        printed = self._errors[rank - 1].read().decode(errors="replace")
        if code == 2 and (lines := re.findall(r"^error: (.*)$", printed, re.M)):
            return UserError(lines[-1])
        if printed:  # for example a traceback
            print_note(printed.rstrip("\n"))
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        memory = ", which the system sends when memory runs out" if code == -signal.SIGKILL else ""
        return UserError(
            f"the process of rank {rank} {how}{memory}. Earlier checkpoints are complete; resume with: {resume_command}"
        )

    def end(self, seconds: float) -> None:
        """Waits for the other processes, at most this long, and kills those that still run."""
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
        """Does nothing: Lightning would forward signals before the step ends."""


class ProcessWatcher(threading.Thread):
    """Ends all processes when the main thread of the first cannot, because it waits inside torch and gets no signal.

    Args:
        others: launcher of the other processes.
        graceful_stop: knows whether a signal waits for the end of the step.
        resume_command: for the message about a process that failed.
        on_stop: called after a signal; says what is saved.
    """

    SECONDS_BETWEEN_CHECKS = 0.5
    SECONDS_TO_REACT = 5.0  # for the main thread

    def __init__(self, others: ProcessLauncher, graceful_stop: GracefulStop, resume_command: str, on_stop: Callable):
        super().__init__(daemon=True)
        self._others, self._graceful_stop = others, graceful_stop
        self._resume_command, self._on_stop = resume_command, on_stop
        self._over = threading.Event()
        self._signals = b""

    def __enter__(self) -> None:
        self._receiver, sender = self._sockets = socket.socketpair()
        for end in self._sockets:
            end.setblocking(False)
        # Python writes the number of each signal here at once, whatever the main thread does.
        self._before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        self.start()

    def __exit__(self, *args) -> None:
        self._over.set()
        signal.set_wakeup_fd(self._before)
        self.join()
        for end in self._sockets:
            end.close()

    def run(self) -> None:
        """Checks twice per second."""
        since = None
        while not self._over.wait(self.SECONDS_BETWEEN_CHECKS):
            with suppress(BlockingIOError):
                received = self._receiver.recv(100)  # also other signals with a handler, such as SIGCONT
                self._signals += bytes(number for number in received if number in GracefulStop.SIGNALS)
            at_once = len(self._signals) > (1 if self._graceful_stop.training else 0)
            if not at_once and not self._others.failed():
                continue
            since = since or time.monotonic()
            if time.monotonic() - since > self.SECONDS_TO_REACT:
                self._end_all(
                    StoppedBySignal(self._signals[-1]) if at_once else self._others.failure(self._resume_command)
                )

    def _end_all(self, reason: BaseException) -> None:
        self._others.end(0.0)
        if isinstance(reason, StoppedBySignal):
            self._on_stop()
            os._exit(128 + reason.args[0])
        print_error(str(reason))
        os._exit(2)


@contextmanager
def supervise(
    trainer: Trainer, graceful_stop: GracefulStop, resume_command: str, on_stop: Callable[[], None]
) -> Iterator[None]:
    """Context of training: when one process of the run ends, all of them do, and one of them says why.

    Calls `on_stop` if a signal stops the run.

    Raises:
        UserError, StoppedBySignal: the reason why another process ended.
    """
    try:
        with _supervise(trainer, graceful_stop, resume_command, on_stop):
            yield
    except StoppedBySignal:
        on_stop()
        raise


@contextmanager
def _supervise(
    trainer: Trainer, graceful_stop: GracefulStop, resume_command: str, on_stop: Callable[[], None]
) -> Iterator[None]:
    others = trainer.strategy.launcher
    if trainer.world_size == 1:
        yield
        return
    if not isinstance(others, ProcessLauncher):
        with _explain_lost_connection(None, resume_command):
            yield
        return
    seconds = 0.0
    try:
        with (
            ProcessWatcher(others, graceful_stop, resume_command, on_stop),
            _explain_lost_connection(others, resume_command),
        ):
            yield
        seconds = _SECONDS_TO_END
    finally:
        others.end(seconds)
        with suppress(Exception):  # the next run of a sweep creates its own group
            torch.distributed.destroy_process_group()


@contextmanager
def _explain_lost_connection(others: ProcessLauncher | None, resume_command: str) -> Iterator[None]:
    """Replaces the error of torch about a lost connection with its cause."""
    try:
        yield
    except RuntimeError as error:
        if not _CONNECTION_LOST.search(str(error)):
            raise
        if not ranks.is_first():
            sys.exit(1)
        if others is None:
            raise UserError(
                "another process of this run ended; its messages say why. Earlier checkpoints are complete; "
                f"resume with: {resume_command}"
            ) from error
        deadline = time.monotonic() + _SECONDS_TO_END
        while not others.failed():
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        raise others.failure(resume_command) from None
