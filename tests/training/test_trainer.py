"""Lightning's Trainer from our config: each of its options, times, and what several devices can be bounded by."""

import inspect
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.profilers import SimpleProfiler

from system.errors import UserError
from training.lightning_module import GPTLightning
from training.lightning_overhead import SHORTCUTS, NoProfiler, skip_empty_hooks, without
from training.progress import RunTimer
from training.trainer import (
    build_trainer,
    check_time_bounds,
    parse_duration,
    resolve_trainer_options,
)
from training.trainer_options import HANDLED_HERE, REJECTED, TO_LIGHTNING


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(90, 90), ("60s", 60), ("5m", 300), ("5min", 300), ("1h30m", 5400), ("1.5h", 5400), ("00:01:30:00", 5400)],
)
def test_a_time_can_be_written_in_many_ways(text, seconds):
    assert parse_duration(text, "trainer.max_time") == timedelta(seconds=seconds)
    assert parse_duration({"seconds": seconds}, "trainer.max_time") == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "soon", "5x", "0s", -3, True, "99999999999d", {"foo": 1}, {"seconds": -1}, "1.2.3s"]
)
def test_what_is_no_time_is_refused_by_the_name_of_its_key_with_examples(text):
    with pytest.raises(UserError, match="^budget is .*such as 60s, 5m, 1h30m"):
        parse_duration(text, "budget")


def test_several_devices_have_no_clock_in_common():
    two = SimpleNamespace(world_size=2, max_steps=10, max_epochs=-1)
    with pytest.raises(UserError, match="2 devices cannot be bounded by time.*budget.*max_time.*trainer.max_steps"):
        check_time_bounds(SimpleNamespace(world_size=2, max_steps=-1, max_epochs=-1), {})
    for name in ("max_time", "val_check_interval"):
        with pytest.raises(UserError, match=f"trainer.{name} is a time.*trainer.devices=1"):
            check_time_bounds(two, {name: timedelta(seconds=5)})
    check_time_bounds(two, {"max_time": None, "val_check_interval": 5})
    check_time_bounds(SimpleNamespace(world_size=1, max_steps=-1, max_epochs=-1), {})


class Counting(Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
        """A hook of its class."""


def test_hooks_of_a_step_are_taken_away_where_they_are_empty_and_nowhere_else():
    from_class, from_call = Counting(), LambdaCallback(on_train_batch_end=print)
    for _ in range(2):  # a callback may be given to a second Trainer
        skip_empty_hooks(SimpleNamespace(callbacks=[from_class, from_call]))
    assert from_class.on_before_optimizer_step and from_call.on_train_batch_end is print
    assert from_class.on_train_batch_end is None and from_call.on_before_optimizer_step is None
    assert from_class.on_validation_end and Counting().on_train_batch_end


@pytest.mark.parametrize(("wanted", "kind"), [(None, NoProfiler), ("simple", SimpleProfiler)])
def test_a_profiler_that_is_asked_for_is_there(tmp_path, wanted, kind):
    options = resolve_trainer_options({"max_steps": 1, "accelerator": "cpu", "profiler": wanted})
    trainer = build_trainer(options, 1, [], default_root_dir=tmp_path, logger=False, enable_checkpointing=False)
    assert type(trainer.profiler) is kind


def test_a_batch_moves_only_where_it_is_not_there_yet():
    module, batch = GPTLightning.__new__(GPTLightning), torch.arange(6).view(2, 3)
    assert module.transfer_batch_to_device(batch, torch.device("cpu"), 0) is batch
    assert module.transfer_batch_to_device(batch, torch.device("meta"), 0).device.type == "meta"
    moved = module.transfer_batch_to_device((batch, batch), torch.device("meta"), 0)
    assert [tensor.device.type for tensor in moved] == ["meta", "meta"]


def test_a_shortcut_that_is_switched_off_leaves_lightnings_own_way_and_comes_back():
    for name, attributes in SHORTCUTS.items():
        before = [vars(owner)[attribute] for owner, attribute in attributes]
        with without(name):
            assert not any(attribute in vars(owner) for owner, attribute in attributes), name
        assert [vars(owner)[attribute] for owner, attribute in attributes] == before, name


def test_training_computes_the_same_weights_without_any_shortcut(train_here):
    settings = ("trainer.max_steps=6", "trainer.gradient_clip_val=0.5", "trainer.accumulate_grad_batches=2")
    with ExitStack() as stack:
        for name in SHORTCUTS:
            stack.enter_context(without(name))
        plain = train_here(*settings)
    shortened = train_here(*settings)
    ours, lightnings = (torch.load(run.path / "checkpoints" / "last.ckpt") for run in (shortened, plain))
    for name, weights in ours["state_dict"].items():
        assert torch.equal(weights, lightnings["state_dict"][name]), name


# Any option

BY_STEPS = {
    "accelerator": "cpu",
    "strategy": "auto",
    "devices": 1,
    "num_nodes": 1,
    "precision": "bf16-mixed",
    "max_steps": 5,
    "max_epochs": 3,
    "accumulate_grad_batches": 2,
    "limit_train_batches": 3,
    "limit_val_batches": 0.5,
    "val_check_interval": 0.5,
    "log_every_n_steps": 1,
    "gradient_clip_val": 0.5,
    "gradient_clip_algorithm": "value",
    "deterministic": True,
    "benchmark": True,
    "inference_mode": False,
    "detect_anomaly": True,
    "enable_progress_bar": False,
    "profiler": "simple",
}
BY_TIME = {
    "accelerator": "auto",
    "devices": "auto",
    "precision": "64-true",
    "max_time": "0.001s",
    "min_steps": 5,
    "min_epochs": 3,
    "overfit_batches": 2,
    "gradient_clip_algorithm": "norm",
    "gradient_clip_val": 1,
    "deterministic": "warn",
    "enable_progress_bar": True,
    "profiler": "advanced",
    "val_check_interval": "1h",
    "log_every_n_steps": 2,
}


def test_every_option_of_lightnings_trainer_is_in_one_table():
    tables = [*TO_LIGHTNING, *HANDLED_HERE, *REJECTED]
    assert len(tables) == len(set(tables))
    assert set(tables) == set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    assert set(BY_STEPS | BY_TIME) == {*TO_LIGHTNING, *HANDLED_HERE}  # and every one that can be set is tried below


@pytest.mark.parametrize("options", [BY_STEPS, BY_TIME], ids=["steps", "time"])
def test_every_option_that_can_be_set_works(train_here, events, monkeypatch, options):
    trainers, losses = [], []
    training_step = GPTLightning.training_step

    def watched(self, batch, batch_idx):
        trainers.append(self.trainer)
        losses.append(batch.tolist())
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(GPTLightning, "training_step", watched)
    try:
        finished = train_here(*(f"trainer.{name}={value}" for name, value in options.items()), "data.val_tokens=null")
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
    assert finished.returncode == 0 and "Profiler Report" in (finished.path / "train.log").read_text(), finished
    trainer, log = trainers[0], events(finished.path)
    validated = [event.step for event in log.Scalars("Loss/validation")]
    logged = [event.step for event in log.Scalars("Loss/train")]
    same = ("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "log_every_n_steps")
    assert all(getattr(trainer, name) == options[name] for name in same if name in options)
    assert trainer.num_devices == trainer.num_nodes == 1
    if options is BY_STEPS:
        assert (trainer.max_steps, trainer.max_epochs) == (5, 3) and not trainer.validate_loop.inference_mode
        assert trainer._detect_anomaly and "(trainer.limit_val_batches)" in finished.stdout
        assert len(losses) == 10 and logged == [1, 2, 3, 4, 5]  # 3 batches an epoch are 2 steps of 2
        assert validated == [1, 2, 3, 4, 5]
    else:
        assert "same 2 batches" in finished.stdout
        assert losses == losses[:2] * 3  # 3 epochs, in which 5 steps are done
        assert validated == [6] and logged == [2, 4, 6]


@pytest.mark.parametrize("name", REJECTED)
def test_option_that_cannot_be_set_is_rejected_with_what_to_do_instead(name):
    with pytest.raises(UserError, match=f"^trainer.{name} cannot be set. .*[.]$"):
        resolve_trainer_options({"max_steps": 1, name: 1})


@pytest.mark.parametrize("name", [*TO_LIGHTNING, *HANDLED_HERE, *REJECTED])
def test_null_is_as_if_an_option_was_not_given(name):
    bound = {"max_epochs": 1} if name == "max_steps" else {"max_steps": 1}
    assert resolve_trainer_options(bound | {name: None}) == resolve_trainer_options(bound)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("limit_train_batches", True, "number of batches"),
        ("limit_val_batches", 0, "best checkpoint"),
        ("overfit_batches", 1.5, "fraction up to 1.0"),
        ("overfit_batches", "all", "number of batches"),
        ("val_check_interval", False, "number of batches"),
        ("val_check_interval", "soon", "5m"),
        ("accumulate_grad_batches", -1, "at least 1"),
        ("log_every_n_steps", -1, "at least 1"),
        ("min_steps", 0, "at least 1"),
        ("min_steps", 6, "max_steps is 5"),
        ("enable_progress_bar", "no", "true or false"),
        ("inference_mode", 1, "true or false"),
        ("gradient_clip_val", "big", "1.0"),
        ("gradient_clip_algorithm", "norm", "gradient_clip_val"),
        ("profiler", "pytorch", "simple or advanced"),
        ("deterministic", "yes", "true, false or warn"),
        ("profiler", True, "simple or advanced"),
    ],
)
def test_value_that_an_option_does_not_take_is_rejected_before_training(option, value, expected):
    with pytest.raises(UserError, match=f"trainer.{option} .*{expected}"):
        resolve_trainer_options({"max_steps": 5, option: value})


def test_run_that_is_bounded_by_time_goes_on_until_its_minimums_are_reached():
    timer = RunTimer(timedelta(seconds=10), min_steps=400, min_epochs=2)
    assert timer.fraction_done(steps=100, epochs=1.5, seconds=1.0) == 0.1
    assert timer.fraction_done(steps=100, epochs=1.5, seconds=9.0) == 0.25
    assert timer.fraction_done(steps=800, epochs=1.5, seconds=20.0) == 0.75
    assert timer.fraction_done(steps=800, epochs=3.0, seconds=20.0) == 1.5
    assert RunTimer(None).fraction_done(1, 1, 1) is None
