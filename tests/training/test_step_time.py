"""The time of a step is that of a step: with all that belongs to it, without what happens beside it.

The clock jumps ahead in one place, by thousands of a tiny step's own times; it shows or it does not.
"""

import math
import os
import signal
import subprocess
import sys
import time

import pytest

from data.batches import TrainBatches
from tests.conftest import PROJECT
from training.callbacks.checkpoints import BestCheckpoint
from training.callbacks.validation_images import ValidationImages
from training.lightning_module import GPTLightning
from training.loggers.tensorboard_logger import RunTensorBoardLogger

JUMP_MS = 100_000


@pytest.fixture
def jump(monkeypatch):
    """jump() puts the clock JUMP_MS ahead."""
    jumps, real = [], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + sum(jumps))
    return lambda: jumps.append(JUMP_MS / 1000)


@pytest.fixture
def step_ms(train_here, events, monkeypatch, jump):
    """step_ms(owner, name) are the readings of the step time in a run whose clock jumps whenever that method begins.

    Twelve steps, a reading every third, a validation every fourth. `when` says from the method's self whether it jumps.
    """

    def measured(owner, name, when=lambda owner: True):
        method = getattr(owner, name)

        def delayed(self, *args, **kwargs):
            if when(self):
                jump()
            return method(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, delayed)
            finished = train_here("trainer.max_steps=12", "trainer.log_every_n_steps=3", "num_validations=3")
        assert finished.returncode == 0, finished
        readings = [event.value for event in events(finished.path).Scalars("Speed/step_ms")]
        assert len(readings) == 3  # at steps 6, 9 and 12: the first five are warm-up
        assert finished.summary["step_ms"] == pytest.approx(sorted(readings)[1], rel=1e-3)
        return readings

    return measured


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (GPTLightning, "validation_step"),
        (GPTLightning, "on_validation_epoch_end"),
        (ValidationImages, "on_validation_end"),
        (BestCheckpoint, "on_validation_end"),
        (RunTensorBoardLogger, "log_metrics"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_step_time_leaves_out_what_happens_beside_steps(step_ms, owner, name):
    assert max(step_ms(owner, name)) < JUMP_MS / 3  # a reading is of three steps at most


def test_step_time_leaves_out_the_warm_up(step_ms):
    assert max(step_ms(GPTLightning, "training_step", when=lambda module: module.global_step < 5)) < JUMP_MS / 3


@pytest.mark.parametrize("steps", [1, 5, 6])
def test_step_time_of_a_run_that_is_mostly_warm_up_is_a_number(train_here, steps):
    assert 0 < train_here(f"trainer.max_steps={steps}", "num_validations=1").summary["step_ms"] < math.inf


@pytest.mark.parametrize(
    ("owner", "name"),
    [(GPTLightning, "training_step"), (GPTLightning, "optimizer_step"), (TrainBatches, "batch")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_step_time_has_all_that_belongs_to_a_step(step_ms, owner, name):
    last = step_ms(owner, name)[-1] / JUMP_MS  # of three steps; the clock starts when the first one's batch is there
    assert (2 / 3 if owner is TrainBatches else 1) <= last < 1.3


def test_step_time_of_accumulated_batches_is_that_of_all_of_them(train_here, monkeypatch, jump):
    step = GPTLightning.training_step

    def delayed(self, batch, batch_idx):
        jump()
        return step(self, batch, batch_idx)

    monkeypatch.setattr(GPTLightning, "training_step", delayed)
    settings = (
        "trainer.max_steps=10",
        "trainer.accumulate_grad_batches=4",
        "num_validations=1",
        "tokenizer=byte",
        "tokenizer.vocab_size=null",
    )
    summary = train_here(*settings, "trainer.log_every_n_steps=1").summary
    assert 4 * JUMP_MS <= summary["step_ms"] < 4.3 * JUMP_MS
    assert summary["tokens"] == 10 * 4 * 4 * 16
    assert summary["tokens_per_second"] == pytest.approx(4 * 4 * 16 / (summary["step_ms"] / 1000), rel=0.3)


@pytest.mark.skipif(not hasattr(signal, "SIGCONT"), reason="no process can be stopped here")
def test_time_in_which_the_process_was_stopped_is_no_steps_time(step_ms, jump, monkeypatch):
    step = GPTLightning.training_step

    def stopped(self, *args, **kwargs):
        if self.trainer.global_step == 7:
            jump()
            signal.raise_signal(signal.SIGCONT)  # as Ctrl-Z and fg
        return step(self, *args, **kwargs)

    monkeypatch.setattr(GPTLightning, "training_step", stopped)
    assert max(step_ms(GPTLightning, "training_step", when=lambda module: False)) < JUMP_MS / 100


@pytest.mark.skipif(not hasattr(signal, "SIGCONT"), reason="no process can be stopped here")
@pytest.mark.parametrize("bound", ["trainer.max_time=5s", "budget=15s"])
def test_time_in_which_the_process_was_stopped_counts_in_no_bound(train_here, clock, monkeypatch, bound):
    whole = train_here(bound).summary
    step = GPTLightning.training_step

    def stopped(self, *args, **kwargs):
        if self.trainer.global_step == 7:
            clock.now += 1000
            signal.raise_signal(signal.SIGCONT)  # as Ctrl-Z and fg
        return step(self, *args, **kwargs)

    monkeypatch.setattr(GPTLightning, "training_step", stopped)
    summary = train_here(bound).summary
    assert summary["steps"] == pytest.approx(whole["steps"], abs=2) and whole["steps"] > 10
    assert summary["seconds"] == pytest.approx(whole["seconds"], abs=1)


STOPPED = """
import os, signal, sys
from system.running_clock import running_seconds, exclude_suspensions
exclude_suspensions()
start = running_seconds()
print("stops", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
print(running_seconds() - start)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGCONT"), reason="no process can be stopped here")
def test_clock_stands_while_a_process_is_stopped(clean_environment):
    command = [sys.executable, "-c", STOPPED]
    process = subprocess.Popen(command, cwd=PROJECT, env=clean_environment, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"stops\n"
        os.waitpid(process.pid, os.WUNTRACED)  # it has stopped
        time.sleep(2)
        process.send_signal(signal.SIGCONT)
        assert float(process.communicate(timeout=60)[0]) < 1
    finally:
        process.kill()
