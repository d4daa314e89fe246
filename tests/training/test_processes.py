"""Several processes of one run end together, whoever started them; what Lightning would wait for is refused."""

import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from lightning.pytorch import Trainer

from checkpoint.checkpoint import load_checkpoint
from system.errors import UserError
from tests.conftest import FOREGROUND, PROJECT
from training.callbacks.graceful_stop import GracefulStop
from training.processes import ProcessWatcher, check_processes, launched_devices

TWO = ("trainer.devices=2", "trainer.accelerator=cpu")
ENDLESS = ("trainer.max_steps=100000", "trainer.val_check_interval=10")
needs_posix = pytest.mark.skipif(os.name != "posix", reason="signals and process groups are POSIX's")


def is_over(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def run_of_two(start, tiny, tmp_path):
    """run_of_two(pattern, send, *overrides): at that line of output `send(first, other)`; then the first's end."""

    def ended(pattern, send, *overrides):
        process = start("train.py", *tiny, *TWO, f"runs_dir={tmp_path / 'runs'}", *overrides, start_new_session=True)
        others = []
        try:
            next(line for line in process.stdout if re.match(pattern, line))
            deadline = time.monotonic() + 60
            while not others and time.monotonic() < deadline:
                others = psutil.Process(process.pid).children()
            send(process, others[0])
            out, err = process.communicate(timeout=60)
            psutil.wait_procs(others, timeout=30)
            assert all(is_over(other) for other in others), others
        finally:
            process.kill()
            for other in others:
                if not is_over(other):
                    other.kill()
        return process.returncode, out.decode(), err.decode()

    return ended


@needs_posix
@pytest.mark.parametrize(
    ("number", "receiver"), [(signal.SIGTERM, "first"), (signal.SIGINT, "other")], ids=["first", "other"]
)
def test_signal_to_one_process_stops_all_after_the_same_step_and_saves_it(run_of_two, tmp_path, number, receiver):
    def send(first, other):
        os.kill(first.pid if receiver == "first" else other.pid, number)

    code, out, err = run_of_two(b"step 10:", send, *ENDLESS)
    assert (code, err) == (128 + number, "")
    (run_dir,) = (tmp_path / "runs").iterdir()
    step = load_checkpoint(run_dir / "checkpoints/last.ckpt").step
    assert step >= 10 and f"stopped at step {step:,}; saved; " in out.splitlines()[-1]


@needs_posix
def test_second_signal_stops_at_once_also_where_a_process_hangs(run_of_two):
    def send(first, other):
        other.suspend()
        for _ in range(2):
            time.sleep(0.5)
            first.terminate()

    code, out, err = run_of_two(b"step 10:", send, *ENDLESS)
    assert (code, err) == (143, "") and re.match(r"stopped at step \d+; ", out.splitlines()[-1])


@needs_posix
def test_signal_to_all_while_they_start_is_one_line_and_no_traceback(run_of_two):
    code, out, err = run_of_two(b"a uniform guess", lambda first, other: os.killpg(first.pid, signal.SIGTERM), *ENDLESS)
    assert (code, err) == (143, "") and out.splitlines()[-1].startswith("stopped at step 0; nothing was saved yet")


@needs_posix
def test_killed_process_is_named_and_ends_the_others(run_of_two):
    code, _, err = run_of_two(b"step 10:", lambda first, other: other.kill(), *ENDLESS)
    assert code == 2 and re.fullmatch(r"error: the process of rank 1 was ended by signal 9.*resume=.*\n", err), err


@needs_posix
def test_others_end_where_the_first_process_is_killed(run_of_two):
    assert run_of_two(b"step 10:", lambda first, other: first.kill(), *ENDLESS)[::2] == (-9, "")


@pytest.mark.skipif(not hasattr(signal, "SIGCONT"), reason="no process can be stopped here")
@pytest.mark.parametrize(("number", "ends"), [("SIGCONT", False), ("SIGTERM", True)])
def test_process_that_is_stopped_and_continued_again_and_again_goes_on(monkeypatch, number, ends):
    ended, graceful_stop = [], GracefulStop()
    graceful_stop.training = True
    for name, value in {"SECONDS_BETWEEN_CHECKS": 0.01, "SECONDS_TO_REACT": -1.0}.items():
        monkeypatch.setattr(ProcessWatcher, name, value)
    monkeypatch.setattr(ProcessWatcher, "_end_all", lambda self, reason: ended.append(reason))
    before = signal.signal(getattr(signal, number), lambda *args: None)
    try:
        with ProcessWatcher(SimpleNamespace(failed=lambda: None), graceful_stop, "", None):
            for _ in range(3):
                signal.raise_signal(getattr(signal, number))
                time.sleep(0.2)
    finally:
        signal.signal(getattr(signal, number), before)
    assert bool(ended) == ends


def test_torchrun_is_one_run_with_one_result(tiny, clean_environment, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    settings = ("trainer.max_steps=4", "num_validations=1", f"runs_dir={tmp_path}")
    finished = subprocess.run(
        [*command, *tiny, *settings], cwd=PROJECT, env=clean_environment, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0 and finished.stderr == "", finished
    (run_dir,) = tmp_path.iterdir()
    assert (run_dir / "summary.json").is_file() and len(list(run_dir.glob("events*"))) == 1
    assert finished.stdout.count("best checkpoint, step 4 of 4") == 1


def test_each_run_of_a_sweep_on_two_devices_has_its_processes_also_with_one_validation_window(call, tiny, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("Thou art the king of night. " * 15)
    settings = ("trainer.max_steps=2", "num_validations=1", "tokenizer=byte", "tokenizer.vocab_size=null")
    settings += (f"data.corpus={text}", "model.context_length=64", f"runs_dir={tmp_path / 'runs'}", *TWO)
    finished = call("train.py", "-m", *tiny, *settings, "seed=0,1", runs=tmp_path / "runs")
    assert finished.returncode == 0 and finished.stderr == "", finished
    assert len(list(finished.path.glob("*/summary.json"))) == 2


# What is refused, and what does not matter


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook", "ddp_fork"])
def test_strategies_that_start_processes_in_other_ways_are_refused_with_what_works(refuse, tiny, strategy):
    error = refuse("train", *tiny, *TWO, "trainer.max_steps=2", f"trainer.strategy={strategy}")
    assert f"trainer.strategy={strategy} is not supported. Use trainer.strategy=ddp" in error


def test_several_machines_need_a_launcher(refuse, tiny):
    error = refuse("train", *tiny, "trainer.max_steps=2", "trainer.num_nodes=2")
    assert "trainer.num_nodes is 2" in error and "torchrun --nnodes=2" in error


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}


def test_launcher_and_devices_that_disagree_are_named(monkeypatch, tmp_path):
    trainer = Trainer(devices=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    check_processes(trainer, "auto")
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="torchrun started 2 processes, but trainer.devices x trainer.num_nodes is 1"):
        check_processes(trainer, "auto")
    assert launched_devices() == {"devices": 2, "num_nodes": 1}


def test_launcher_of_a_sweep_is_refused(call, tiny, tmp_path):
    where = (f"runs_dir={tmp_path / 'runs'}", "trainer.max_steps=2")
    finished = call("train.py", *tiny, *where, "-m", "seed=0,1", env=TORCHRUN)
    assert "without torchrun" in finished.error and not list(tmp_path.iterdir())


STRAY = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "none", "SLURM_NTASKS": "2"}
STRAY |= {"SLURM_PROCID": "1", "SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "none", "TINY_GPT_RUN_DIR": "/somewhere"}


def test_stray_variables_of_launchers_change_nothing(call, tiny, tmp_path):
    settings = ("trainer.max_steps=2", "num_validations=1", f"runs_dir={tmp_path}")
    finished = call("train.py", *tiny, *settings, env=STRAY, runs=tmp_path)
    assert finished.returncode == 0 and finished.stderr == "" and finished.summary["steps"] == 2, finished


def test_variable_of_a_process_that_is_gone_is_named(call, tiny, tmp_path):
    env = {"TINY_GPT_PARENT": "1", "TINY_GPT_RUN_DIR": str(tmp_path), "LOCAL_RANK": "1"}
    finished = call("train.py", *tiny, "trainer.max_steps=2", f"runs_dir={tmp_path}", env=env)
    assert "TINY_GPT_PARENT is set" in finished.error and not list(tmp_path.iterdir())


# Signals that are ignored


@needs_posix
@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_signal_that_was_ignored_at_the_start_stays_ignored(start, tiny, tmp_path, name):
    ignored = {**FOREGROUND, "preexec_fn": lambda: signal.signal(getattr(signal, name), signal.SIG_IGN)}
    settings = ("trainer.max_steps=60", "trainer.val_check_interval=20", f"runs_dir={tmp_path}")
    process = start("train.py", *tiny, *settings, **ignored)
    try:
        next(line for line in process.stdout if line.startswith(b"step 20:"))
        process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and b"step 60: validation" in out and err == b"", err
