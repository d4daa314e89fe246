"""A file that is written whole: the one before stays until then, and nothing half-made is ever left."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.attention_html import save_page
from analysis.attention_plot import save
from checkpoint.safetensors_io import ENTRIES, write_safetensors
from system.errors import UserError
from system.files import atomic_write


def write(path, content, **names):
    with atomic_write(path, **names) as file:
        file.write(content)


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError()])
@pytest.mark.parametrize("temporary", [None, "file.tmp"])
def test_failure_leaves_the_files_before_and_nothing_else(tmp_path, failure, temporary):
    path, previous = tmp_path / "file", tmp_path / "previous"
    path.write_bytes(b"before"), previous.write_bytes(b"older")
    with pytest.raises(type(failure)):
        with atomic_write(path, temporary and tmp_path / temporary, previous) as file:
            file.write(b"half")
            raise failure
    assert names_in(tmp_path) == ["file", "previous"]
    assert path.read_bytes() == b"before" and previous.read_bytes() == b"older"


def test_output_that_does_not_fit_is_named_and_leaves_what_was_there(tmp_path, monkeypatch):
    """A picture, a page and an export: none of them is left empty on a full disk."""

    def full(descriptor):
        raise OSError(28, "No space left on device")

    picture, page, weights = (tmp_path / name for name in ("maps.png", "page.html", "weights.safetensors"))
    page.write_bytes(b"before")
    monkeypatch.setattr(os, "fsync", full)
    entry = dict.fromkeys(ENTRIES)
    writers = (
        (picture, lambda: save(np.zeros((2, 2, 3), np.uint8), picture)),
        (page, lambda: save_page("<html>", page)),
        (weights, lambda: write_safetensors(weights, entry, {"a": torch.zeros(2)})),
    )
    for path, write_it in writers:
        with pytest.raises(UserError, match=re.escape(f"{path} cannot be written: No space left on device")):
            write_it()
    assert names_in(tmp_path) == ["page.html"] and page.read_bytes() == b"before"


def test_file_before_goes_to_previous(tmp_path):
    for content in (b"one", b"two", b"three"):
        write(tmp_path / "file", content, previous=tmp_path / "previous")
    assert (tmp_path / "file").read_bytes() == b"three" and (tmp_path / "previous").read_bytes() == b"two"
    assert names_in(tmp_path) == ["file", "previous"]


def test_two_that_write_one_file_at_once_do_not_mix(tmp_path):
    path = tmp_path / "file"
    with atomic_write(path) as one, atomic_write(path) as two:
        for _ in range(1000):
            one.write(b"one"), two.write(b"two")
    assert path.read_bytes() == b"one" * 1000 and names_in(tmp_path) == ["file"]  # the one that ended last


def test_what_a_kill_left_is_written_over(tmp_path):
    (tmp_path / "file.tmp").write_bytes(b"half of something longer")
    write(tmp_path / "file", b"whole", temporary=tmp_path / "file.tmp")
    assert (tmp_path / "file").read_bytes() == b"whole" and names_in(tmp_path) == ["file"]


@pytest.mark.parametrize("place", ["missing/file", "text/file", "directory"])
def test_error_names_the_file_that_was_asked_for(tmp_path, place):
    (tmp_path / "text").write_text("no directory")
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError) as failed:
        write(tmp_path / place, b"content")
    assert Path(failed.value.filename) == tmp_path / place
    assert names_in(tmp_path) == ["directory", "text"]


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_whoever_may_read_other_new_files_may_read_it(tmp_path):
    (tmp_path / "usual").touch()
    write(tmp_path / "file", b"content")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode
