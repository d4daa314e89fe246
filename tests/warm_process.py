"""A separate process that starts in a tenth of a second: a fork of one that has imported PyTorch and Lightning.

It has its own signals, exit code, working directory and streams, as `subprocess.Popen` would give it. What happens
before and during imports, and what environment variables do to Python itself, needs a fresh interpreter.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from multiprocessing import reduction
from pathlib import Path

# Imported once, by the process that the others are forked from.
IMPORTS = ("lightning.pytorch", "hydra", "torch.utils.tensorboard", "tiktoken", "rustbpe", "safetensors.torch", "train")
IMPORTS += ("sample", "training.setup", "training.summary", "sampling.text", "analysis.attention_plot", "configs.cli")


class _Descriptor:
    """A file descriptor that is pickled by being passed on."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def __reduce__(self):
        return _received, (reduction.DupFd(self._descriptor),)


def _received(duplicate) -> int:
    return duplicate.detach()


class WarmProcess(subprocess.Popen):
    """subprocess.Popen([sys.executable, script, *arguments], ...) with three pipes."""

    def __init__(
        self, script: Path, arguments: tuple[str, ...], env: dict[str, str], cwd: Path, start_new_session: bool = False
    ):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTS))
        ends = [os.pipe() for _ in range(3)]
        (stdin, theirs_in), (theirs_out, stdout), (theirs_err, stderr) = ends
        theirs = [_Descriptor(descriptor) for descriptor in (stdin, stdout, stderr)]
        self._process = context.Process(
            target=_run_script, args=(str(script), arguments, env, str(cwd), start_new_session, *theirs)
        )
        with _environment({"OMP_NUM_THREADS": "1"}):
            self._process.start()
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        self.args, self.pid, self.returncode = [str(script), *arguments], self._process.pid, None
        self.stdin, self.stdout, self.stderr = os.fdopen(theirs_in, "wb"), os.fdopen(theirs_out, "rb"), None
        self.stderr = os.fdopen(theirs_err, "rb")
        # What `communicate` of the parent looks at:
        self.text_mode = self.universal_newlines = self._communication_started = False
        self._input, self.encoding, self.errors, self._child_created = None, None, None, True

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def __del__(self):
        pass


class _environment:
    """Sets variables for the process that is started inside."""

    def __init__(self, variables: dict[str, str]):
        self._variables = variables

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in self._variables}
        os.environ.update(self._variables)

    def __exit__(self, *args) -> None:
        for name, value in self._before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _run_script(
    script: str,
    arguments: tuple[str, ...],
    env: dict[str, str],
    cwd: str,
    start_new_session: bool,
    stdin: int,
    stdout: int,
    stderr: int,
) -> None:
    """What the process does: a Python that begins and ends as usual."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if start_new_session:
        os.setsid()
    for place, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, place)
        os.close(descriptor)
    # ruff: noqa: SIM115 -- the streams stay open
    sys.stdin, sys.stdout = open(0, encoding="utf-8"), open(1, "w", encoding="utf-8")
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = [script, *arguments]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        code = 1
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:
            code = end.code
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream and stream.flush()
        except (OSError, ValueError):
            code = 120
    os._exit(code or 0)
