"""The progress bar on a terminal, with a fake Trainer and a fake clock."""

import io
import logging
from types import SimpleNamespace

import pytest

from training.callbacks import progress_bar
from training.callbacks.progress_bar import RunProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(monkeypatch):
    """A run of 100 steps; `seconds`, `step` and `terminal` are set and read by the tests."""
    run = SimpleNamespace(seconds=0.0, step=0, terminal=io.StringIO(), tokens=0)
    monkeypatch.setattr(progress_bar, "running_seconds", lambda: run.seconds)
    monkeypatch.setattr(progress_bar, "run_progress", lambda trainer: run.step / 100)
    monkeypatch.setattr("sys.stderr", run.terminal)
    return run


def train(run, bar, seconds: list[float]) -> None:
    """Steps that take so many seconds each, with 10 tokens each."""
    trainer, module = SimpleNamespace(is_global_zero=True, global_step=0), SimpleNamespace(last_loss=1.0)
    bar.on_train_start(trainer, module)
    for each in seconds:
        run.seconds, run.step, run.tokens = run.seconds + each, run.step + 1, run.tokens + 10
        trainer.global_step = run.step
        bar.on_train_batch_end(trainer, module)


def test_compile_time_is_not_in_the_speed_and_the_time_left(run, caplog):
    with caplog.at_level(logging.INFO):
        train(run, RunProgressBar(run), [60.0] + [1.0] * 10)
    assert caplog.messages == [" 11%  step 11  loss 1.000  10 tokens/s  1:29 left"]


def test_ctrl_c_removes_the_bar_so_that_the_prompt_starts_on_a_line_of_its_own(run, monkeypatch):
    run.terminal = Terminal()
    monkeypatch.setattr("sys.stderr", run.terminal)
    bar = RunProgressBar(run)
    train(run, bar, [1.0] * 5)
    assert "step 5" in run.terminal.getvalue()
    bar.on_exception(None, None, KeyboardInterrupt())
    assert run.terminal.getvalue().endswith("\r") and bar._bar is None
