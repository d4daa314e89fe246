"""The time of a step is that of a step: with all that belongs to it, without what happens beside it.

A sleep many times a tiny step's own time is put in one place; it shows or it does not.
"""

import time

import pytest

from data.batches import TrainBatches
from model.callbacks import RunLogger, Snapshots
from model.keeping import KeepBest
from model.lightning_module import GPTLightning


@pytest.fixture
def step_ms(train_here, events, monkeypatch):
    """step_ms(owner, name, seconds) is the step time of a run in which that method sleeps so long before it works.

    Twelve steps, a reading and a validation every third. `when` says from the method's self whether it sleeps.
    """

    def measured(owner, name, seconds, when=lambda owner: True):
        method = getattr(owner, name)

        def slowed(self, *args, **kwargs):
            if when(self):
                time.sleep(seconds)
            return method(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, slowed)
            finished = train_here("trainer.max_steps=12", "trainer.log_every_n_steps=3", "validations=4")
        assert finished.returncode == 0, finished
        readings = [event.value for event in events(finished.path).Scalars("speed/step_ms")]
        assert len(readings) == 3  # at steps 6, 9 and 12: the first five are warm-up
        assert finished.summary["step_ms"] == pytest.approx(sorted(readings)[1], rel=1e-3)
        return finished.summary["step_ms"]

    return measured


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (GPTLightning, "validation_step"),
        (GPTLightning, "on_validation_epoch_end"),
        (Snapshots, "on_validation_end"),
        (KeepBest, "on_validation_end"),
        (RunLogger, "log_metrics"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_step_time_leaves_out_what_happens_beside_steps(step_ms, owner, name):
    median = step_ms(owner, name, 0.25)
    assert median < 0.25 * 1000 / 3  # one sleep an interval of three steps


def test_step_time_leaves_out_the_warm_up(step_ms):
    median = step_ms(GPTLightning, "training_step", 0.25, when=lambda module: module.global_step < 5)
    assert median < 0.25 * 1000 / 3


@pytest.mark.parametrize("steps", [1, 5, 6])
def test_step_time_of_a_run_that_is_mostly_warm_up_is_a_number(train_here, steps):
    assert 0 < train_here(f"trainer.max_steps={steps}", "validations=1").summary["step_ms"] < 10_000


@pytest.mark.parametrize(
    ("owner", "name"),
    [(GPTLightning, "training_step"), (GPTLightning, "optimizer_step"), (TrainBatches, "batch")],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_step_time_has_all_that_belongs_to_a_step(step_ms, owner, name):
    median = step_ms(owner, name, 0.1)
    assert 60 < median < 250  # the first batch of an interval is fetched before its clock starts


def test_step_time_of_accumulated_batches_is_that_of_all_of_them(train_here, monkeypatch):
    step = GPTLightning.training_step

    def slowed(self, batch, batch_idx):
        time.sleep(0.03)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(GPTLightning, "training_step", slowed)
    settings = ("trainer.max_steps=10", "trainer.accumulate_grad_batches=4", "validations=1", "tokenizer=byte")
    summary = train_here(*settings, "trainer.log_every_n_steps=1").summary
    assert 120 <= summary["step_ms"] < 300
    assert summary["tokens"] == 10 * 4 * 4 * 16
    assert summary["tokens_per_second"] == pytest.approx(4 * 4 * 16 / (summary["step_ms"] / 1000), rel=0.3)
