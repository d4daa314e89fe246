"""Lightning's Trainer from our config: times, and what several devices can be bounded by."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.profilers import SimpleProfiler

from system.errors import UserError
from training.lightning_module import GPTLightning
from training.trainer import (
    NoProfiler,
    build_trainer,
    parse_duration,
    refuse_time_on_several_devices,
    resolve,
    skip_empty_hooks,
)


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


def test_several_devices_are_not_bounded_by_time():
    with pytest.raises(UserError, match="2 devices cannot be bounded by time.*budget.*max_time.*trainer.max_steps"):
        refuse_time_on_several_devices(SimpleNamespace(world_size=2, max_steps=-1, max_epochs=-1))
    refuse_time_on_several_devices(SimpleNamespace(world_size=2, max_steps=10, max_epochs=-1))
    refuse_time_on_several_devices(SimpleNamespace(world_size=1, max_steps=-1, max_epochs=-1))


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
    options = resolve({"max_steps": 1, "accelerator": "cpu", "profiler": wanted})
    trainer = build_trainer(options, 1, 1, [], default_root_dir=tmp_path, logger=False, enable_checkpointing=False)
    assert type(trainer.profiler) is kind


def test_a_batch_moves_only_where_it_is_not_there_yet():
    module, batch = GPTLightning.__new__(GPTLightning), torch.arange(6).view(2, 3)
    assert module.transfer_batch_to_device(batch, torch.device("cpu"), 0) is batch
    assert module.transfer_batch_to_device(batch, torch.device("meta"), 0).device.type == "meta"
    moved = module.transfer_batch_to_device((batch, batch), torch.device("meta"), 0)
    assert [tensor.device.type for tensor in moved] == ["meta", "meta"]
