"""Lightning's Trainer from our config: times, and what several devices can be bounded by."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from configs.errors import UserError
from model.trainer import parse_duration, refuse_time_on_several_devices


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
