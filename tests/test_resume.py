"""A run that was stopped goes on as if nothing had happened, and nothing else is taken for it."""

import os
import re
import shutil
import signal

import pytest
import torch
from omegaconf import OmegaConf

from data.batches import TrainBatches
from model.checkpoint import load_checkpoint
from model.lightning_module import GPTLightning

CURVES = ("train/loss", "train/grad_norm", "train/tokens", "val/loss", "val/bits_per_byte")


def content_of(run, name="last.ckpt"):
    return torch.load(run.path / "checkpoints" / name, map_location="cpu", weights_only=True)


def curves(events, run):
    log = events(run.path)
    rates = [tag for tag in log.Tags()["scalars"] if tag.startswith("lr/")]
    return {tag: [(event.step, event.value) for event in log.Scalars(tag)] for tag in (*CURVES, *rates)}


def equal(a, b):
    """The same plain values and the same bits, in whatever they are nested."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.fixture
def stopped_after(train_here, monkeypatch):
    """stopped_after(batches, *overrides) is a run that gets Ctrl-C while it trains on its batches + 1st batch."""

    def stopped(batches, *overrides, number=signal.SIGINT, **options):
        step = GPTLightning.training_step

        def interrupted(self, batch, batch_idx):
            if self.batches_done == batches:
                os.kill(os.getpid(), number)
            return step(self, batch, batch_idx)

        with monkeypatch.context() as patch:
            patch.setattr(GPTLightning, "training_step", interrupted)
            finished = train_here(*overrides, **options)
        assert finished.returncode == 128 + number, finished
        return finished

    return stopped


def assert_same_run(events, one, other):
    a, b = content_of(one), content_of(other)
    for key in ("state_dict", "optimizer_states", "gpt", "global_step", "epoch"):
        assert equal(a[key], b[key]), key
    assert curves(events, one) == curves(events, other)
    best, other_best = (load_checkpoint(run.path / "checkpoints/best.ckpt") for run in (one, other))
    assert best.step == other_best.step and best.validation == other_best.validation
    assert equal(best.network.state_dict(), other_best.network.state_dict())
    figures = ("val_nats_per_token", "val_bits_per_byte", "steps", "tokens", "best_step")
    assert all(one.summary[name] == other.summary[name] for name in figures)


EPOCHS = ("tokenizer=byte", "data.batch_size=24", "trainer.max_epochs=3")  # of 11 batches
ADAMW = ("optimizer=adamw", "model.dropout=0.2")
ACCUMULATING = ("trainer.max_steps=8", "trainer.accumulate_grad_batches=4", "trainer.val_check_interval=6")


@pytest.mark.parametrize(
    ("settings", "stops"),
    [
        (("trainer.max_steps=20",), (0, 9)),
        (("trainer.max_steps=20",), (3,)),  # a validation is due after this step
        (("trainer.max_steps=20",), (4,)),  # has just been done
        (("trainer.max_steps=20", *ADAMW), (7, 8)),
        (("trainer.max_steps=20", "model=llama", "trainer.gradient_clip_val=0.5"), (13,)),
        ((*ACCUMULATING, *ADAMW), (5, 14)),  # in the middle of a step
        (ACCUMULATING, (11, 17)),  # in a step's last batch, a validation after it; in the middle, a validation after it
        (EPOCHS, (10, 16)),  # in the last batch of an epoch, and within one
        ((*EPOCHS, "trainer.accumulate_grad_batches=4"), (9, 11, 32)),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(train_here, stopped_after, events, settings, stops):
    settings = (*settings, "trainer.log_every_n_steps=3")
    whole = train_here(*settings)
    stopped = stopped_after(stops[0], *settings)
    for batches in stops[1:]:
        stopped_after(batches, f"resume={stopped.dir}", settings=())
    resumed = train_here(f"resume={stopped.dir}", settings=())
    assert resumed.returncode == 0 and resumed.stderr == "", resumed
    assert resumed.dir == stopped.dir
    assert_same_run(events, whole, resumed)


def constant(*settings):
    """A learning rate that does not know how long the run is."""
    return (*settings, "optimizer.warmup=0", "optimizer.cooldown=0", "trainer.log_every_n_steps=1")


@pytest.mark.parametrize(
    ("bound", "interval"),
    [(("trainer.max_steps=12", "trainer.max_steps=23"), 5), (("trainer.max_epochs=1", "trainer.max_epochs=2"), 4)],
)
def test_extended_run_is_the_longer_one_bit_for_bit(train_here, events, bound, interval):
    settings = constant("tokenizer=byte", "data.batch_size=24", f"trainer.val_check_interval={interval}")
    short, long = bound
    whole = train_here(*settings, long)
    finished = train_here(*settings, short)
    extended = train_here(f"resume={finished.dir}", long, settings=())
    assert extended.returncode == 0, extended
    assert f"changed: {short.replace('=', ' ')} -> {long.partition('=')[2]}" in extended.stdout.replace("\n", " ")
    a, b = content_of(whole), content_of(extended)
    assert equal(a["state_dict"], b["state_dict"]) and equal(a["optimizer_states"], b["optimizer_states"])
    expected, found = curves(events, whole), curves(events, extended)
    for name in ("train/loss", "train/grad_norm", "lr/muon"):
        assert found[name] == expected[name], name
    steps = {step for step, _ in found["val/loss"]}
    assert steps >= {step for step, _ in expected["val/loss"]}  # and where the short run ended
    assert [event.step for event in events(extended.path).Scalars("final/val_loss")] == [max(steps)]
    assert extended.summary["steps"] == whole.summary["steps"] and extended.summary["tokens"] == whole.summary["tokens"]


def test_finished_run_says_what_to_raise(train_here):
    finished = train_here("trainer.max_steps=2")
    error = train_here(f"resume={finished.dir}", settings=()).error
    assert "is finished: trainer.max_steps=2 is reached" in error and "larger trainer.max_steps" in error
    assert "has done 2" in train_here(f"resume={finished.dir}", "trainer.max_steps=1", settings=()).error
    assert finished.summary["steps"] == 2  # still finished


def test_time_already_used_counts_and_the_schedule_goes_on_from_its_share(train_here, stopped_after, events):
    settings = ("trainer.max_time=4s", "optimizer.warmup=0", "optimizer.cooldown=1", "trainer.log_every_n_steps=1")
    stopped = stopped_after(60, *settings)
    used = content_of(stopped)["run"]["train_seconds"]
    before = events(stopped.path).Scalars("lr/muon")[-1].value
    resumed = train_here(f"resume={stopped.dir}", settings=())
    assert resumed.returncode == 0, resumed
    log = events(resumed.path)
    rates = {event.step: event.value for event in log.Scalars("lr/muon")}
    assert 0.8 * before < rates[62] < before  # falls on from there
    seconds = content_of(resumed)["run"]["train_seconds"]
    assert 0 < used < 4 <= seconds < 8
    assert resumed.summary["seconds"] > content_of(resumed)["run"]["train_seconds"]
