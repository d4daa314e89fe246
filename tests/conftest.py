"""Shared by all tests: one tiny training run as a user starts it, and ways to start more, cheaply."""

import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from hydra.core.global_hydra import GlobalHydra

import sample
import train
from configs.entry_point import entry_point
from model import kernels
from system.process import command_start
from tests.warm_process import WarmProcess
from training import ranks
from training.callbacks.graceful_stop import GracefulStop

# Tiny tensors gain nothing from a second thread, and several test processes would fight over the cores.
torch.set_num_threads(1)

# The first run of a process began with the process; those of the tests begin when they are called.
command_start()

PROJECT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
CHROMIUM_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --no-proxy-server --window-size=1300,900"
)
SHAPE = (
    "model.num_layers=2",
    "model.num_heads=2",
    "model.d_model=32",
    "model.context_length=16",
    "data.batch_size=4",
    "tokenizer.vocab_size=300",
)


@dataclass(frozen=True)
class Finished:
    """A process that has ended, or a call that stands for one; `dir` is the newest run directory it made."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    dir: str = ""

    @property
    def path(self) -> Path:
        return Path(self.dir)

    @property
    def summary(self) -> dict:
        return json.loads((self.path / "summary.json").read_text(encoding="utf-8"))

    @property
    def error(self) -> str:
        """The one line of a refusal, and nothing else."""
        assert self.returncode == 2, self
        assert self.stderr.startswith("error: ") and self.stderr.count("\n") == 1, self.stderr
        assert self.stderr.endswith("\n") and "Traceback" not in self.stderr + self.stdout, self
        return self.stderr


def newest(runs: Path) -> str:
    found = sorted((path for path in runs.glob("*") if path.is_dir()), key=lambda path: path.stat().st_mtime_ns)
    return str(found[-1]) if found else ""


def hear_signals() -> None:
    """As in a new process of a terminal, also where the tests run behind nohup or in the background of a script."""
    for number in GracefulStop.SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


# Arguments of every subprocess that is sent a signal.
FOREGROUND = {"preexec_fn": hear_signals} if os.name == "posix" else {}


@pytest.fixture(scope="session")
def clean_environment() -> dict[str, str]:
    """The environment of a process of its own: one thread, and no settings that another test left."""
    ours = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    left_out = ("TINY_GPT_PARENT", "TINY_GPT_RUN_DIR", "HYDRA_FULL_ERROR", "LOCAL_RANK")
    return {name: value for name, value in os.environ.items() if name not in left_out} | ours


@pytest.fixture(scope="session")
def start(clean_environment) -> Callable[..., subprocess.Popen]:
    """start("train.py", *arguments) is that process, with pipes. fresh: in an interpreter of its own from the start."""

    def started(
        script: str,
        *arguments: str,
        env: dict[str, str] | None = None,
        cwd=PROJECT,
        prefix=(),
        fresh: bool = False,
        **options,
    ) -> subprocess.Popen:
        if not (fresh or env or prefix or options.keys() - {"start_new_session"} or os.name != "posix"):
            return WarmProcess(PROJECT / script, arguments, clean_environment, cwd, **options)
        return subprocess.Popen(
            [*prefix, sys.executable, str(PROJECT / script), *arguments],
            env=clean_environment | (env or {}),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **FOREGROUND | options,
        )

    return started


@pytest.fixture(scope="session")
def call(start) -> Callable[..., Finished]:
    """call("train.py", *arguments) runs that to its end."""

    def called(
        script: str, *arguments: str, stdin: str = "", runs: Path | None = None, timeout: float = 120, **options
    ) -> Finished:
        began = time.perf_counter()
        process = start(script, *arguments, **options)
        try:
            out, err = process.communicate(stdin.encode(), timeout=timeout)
        finally:
            process.kill()
        seconds = time.perf_counter() - began
        return Finished(process.returncode, out.decode(), err.decode(), seconds, newest(runs) if runs else "")

    return called


def write_text(path: Path, num_lines: int) -> Path:
    """Lines of eight words in random order: there is something to learn, and soon no more."""
    words = "the king and queen of night day love death sweet thou art no more than what we are speak my lord"
    draw = random.Random(0)
    lines = [" ".join(draw.choice(words.split(" ")) for _ in range(8)).capitalize() + "." for _ in range(num_lines)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.txt", 120)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny(text_file, cache_dir) -> tuple[str, ...]:
    """Overrides of a run that takes a moment; it still needs a runs_dir and an end."""
    places = (f"data.corpus={text_file}", f"data.cache_dir={cache_dir}")
    return (*SHAPE, *places, "trainer.log_every_n_steps=5", "trainer.accelerator=cpu")


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, worker_id, call) -> Finished:
    """One real training run of 40 steps with 5 validations. All worker processes share it: look, don't touch."""
    alone = worker_id == "master"
    folder = tmp_path_factory.mktemp("tiny_run") if alone else tmp_path_factory.getbasetemp().parent / "tiny_run"
    record = folder / "finished.json"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not record.is_file():
            text = write_text(folder / "words.txt", 120)
            finished = call(
                "train.py",
                *SHAPE,
                f"data.corpus={text}",
                f"data.cache_dir={folder / 'cache'}",
                f"runs_dir={folder / 'runs'}",
                "trainer.log_every_n_steps=5",
                "trainer.max_steps=40",
                runs=folder / "runs",
                fresh=True,
            )
            record.write_text(json.dumps(asdict(finished)), encoding="utf-8")
    return Finished(**json.loads(record.read_text(encoding="utf-8")))


@pytest.fixture
def train_here(tmp_path, tiny, monkeypatch, capfd) -> Callable[..., Finished]:
    """train_here(*overrides) is `python train.py` with a tiny run's overrides, in this process: seconds less."""
    runs = tmp_path / "runs"

    def trained(*overrides: str, settings: tuple[str, ...] = tiny) -> Finished:
        monkeypatch.setattr(sys, "argv", ["train.py", *settings, f"runs_dir={runs}", *overrides])
        return _as_process(lambda: entry_point(train.main, "train", sweeps=True), monkeypatch, capfd, runs)

    return trained


@dataclass
class FakeClock:
    """A clock that moves only where a run works, and by as many seconds as a test says; they are those of an idle
    machine, and become `load` times as many."""

    start: float = 4.0
    step: float = 0.25
    validation_batch: float = 0.02
    pictures: float = 0.1
    exit: float = 0.4
    load: Callable[[float], float] = lambda now: 1.0  # how busy the machine is so many seconds after the clock's start
    now: float = 0.0
    processor: float = 0.0

    BEGAN = 1000.0

    def read(self) -> float:
        """No two readings are equal: libraries divide by the difference."""
        self.now += 1e-6
        return self.BEGAN + self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds * self.load(self.now)
        self.processor += seconds

    def taken_by(self, function: Callable, name: str) -> Callable:
        """The function, which takes as long as the field of that name says."""

        @wraps(function)
        def taking_time(*args, **kwargs):
            self.spend(getattr(self, name))
            return function(*args, **kwargs)

        return taking_time


@pytest.fixture
def clock(monkeypatch) -> FakeClock:
    """The clock of runs in this process: their times are the same on every machine."""
    import analysis.attention_plot as attention_plot
    import training.setup as setup
    import training.summary as summary
    from training.lightning_module import GPTLightning

    clock = FakeClock()
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, clock.read)
    monkeypatch.setattr(time, "process_time", lambda: clock.processor)
    monkeypatch.setattr(setup, "measured_speed", clock.taken_by(lambda device, precision: 1e9, "start"))
    for owner, function, seconds in (
        (GPTLightning, "training_step", "step"),
        (GPTLightning, "validation_step", "validation_batch"),
        (attention_plot, "draw_attention", "pictures"),
        (summary, "run_statistics", "exit"),  # of summary.json, which has the seconds
    ):
        monkeypatch.setattr(owner, function, clock.taken_by(getattr(owner, function), seconds))
    return clock


@pytest.fixture
def refuse(tmp_path, monkeypatch, capfd) -> Callable[..., str]:
    """refuse("train", *arguments) is the one line with which that is refused; nothing is left on the disk."""
    runs = tmp_path / "runs"

    def refused(script: str, *arguments: str) -> str:
        where = () if any(argument.startswith("runs_dir=") for argument in arguments) else (f"runs_dir={runs}",)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *where, *arguments])

        task = _sample if script == "sample" else lambda: entry_point(train.main, "train", sweeps=True)
        finished = _as_process(task, monkeypatch, capfd, runs)
        assert not any(runs.glob("*")), list(runs.glob("**/*"))
        return finished.error

    return refused


@pytest.fixture
def sample_here(tmp_path, monkeypatch, capfd) -> Callable[..., Finished]:
    """sample_here(*arguments) is `python sample.py` in this process."""

    def sampled(*arguments: str) -> Finished:
        monkeypatch.setattr(sys, "argv", ["sample.py", *arguments])
        return _as_process(_sample, monkeypatch, capfd, tmp_path)

    return sampled


def _sample() -> None:
    entry_point(sample.main, "sample")


def _as_process(task: Callable[[], None], monkeypatch, capfd, runs: Path) -> Finished:
    """Runs the task as if in a process of its own: what it sets for all of a process is set back."""
    kernels_on = kernels.enabled()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    signals = {number: signal.getsignal(number) for number in GracefulStop.SIGNALS}
    hear_signals()
    root.handlers[:] = []
    capfd.readouterr()
    began, code = time.perf_counter(), 0
    try:
        with monkeypatch.context() as patch, warnings.catch_warnings():
            for name in ("HYDRA_FULL_ERROR", ranks.PARENT):
                patch.setenv(name, "")
                patch.delenv(name)
            warnings.simplefilter("default")
            task()
    except SystemExit as end:
        code = end.code
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)
        for number, handler in signals.items():
            signal.signal(number, handler)
        GlobalHydra.instance().clear()
        kernels.set_enabled(kernels_on)
    output = capfd.readouterr()
    return Finished(code, output.out, output.err, time.perf_counter() - began, newest(runs))


@pytest.fixture(scope="session")
def events() -> Callable[[Path], object]:
    """events(directory) is what TensorBoard itself reads from it."""

    def read(directory: Path):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        everything = {"scalars": 0, "images": 0, "tensors": 0, "histograms": 0, "compressedHistograms": 0, "audio": 0}
        accumulator = EventAccumulator(str(directory), size_guidance=everything)
        accumulator.Reload()
        return accumulator

    return read


@pytest.fixture(scope="session")
def board(clean_environment) -> Iterator[Callable[[Path], str]]:
    """board(directory) is the address of a TensorBoard that shows it."""
    processes = []

    def served(directory: Path) -> str:
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(directory), "--port", "0"]
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--load_fast=false", "--samples_per_plugin", "images=100"],
            env=clean_environment | {"TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        deadline = threading.Timer(60, process.kill)  # then the pipe closes, and the test fails
        deadline.start()
        lines = []
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"http://127\.0\.0\.1:\d+", line):
                deadline.cancel()
                return match[0]
        pytest.fail("".join(lines))

    yield served
    for process in processes:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium, without a window. Skips where there is none, which with REQUIRE_BROWSER set is a failure."""
    if not (CHROMIUM and DRIVER):
        reason = "needs chromium and chromedriver (on Debian: apt-get install chromium chromium-driver)"
        if os.environ.get("REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*CHROMIUM_FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()
