"""A key of an earlier version is rejected with its current name."""

import pytest

from configs.defaults import known_keys
from training.config import RENAMED_KEYS


def test_every_current_name_is_a_key_and_no_earlier_name_is():
    known = known_keys("train")
    assert [new for new in RENAMED_KEYS.values() if new not in known] == []
    assert [old for old in RENAMED_KEYS if old in known] == []


@pytest.mark.parametrize(("old", "new"), RENAMED_KEYS.items())
def test_a_renamed_key_is_rejected_with_its_new_name(refuse, old, new):
    error = refuse("train", f"{old}=3")
    assert old in error and new in error


def test_the_new_letters_of_the_window_pattern_are_explained(refuse):
    error = refuse("train", "model.attention_pattern=LF")
    assert "model.window_pattern" in error and "S (sliding window)" in error and "L (all tokens)" in error
