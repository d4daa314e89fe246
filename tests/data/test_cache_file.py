"""The cache: damage is noticed and mended, a full disk is named, two runs get along, and it does not grow for ever."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import cache as cache_file
from data.cache import CorruptCache, atomic_cache_write, verified_size
from data.config import TokenizerConfig
from data.corpus import Corpus
from data.tokenizer import build_tokenizer, fingerprint
from data.tokens import load_tokens, token_path

TEXT = "What, you egg! Young fry of treachery! ☃\n" * 40
SMALL = ("model.context_length=16", "model.d_model=32", "model.num_heads=2", "model.bigram_table_size=64")
BRIEF = (*SMALL, "tokenizer.vocab_size=300", "data.batch_size=2", "trainer.max_steps=2")


@pytest.fixture
def split(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return Corpus([tmp_path / "text.txt"], 0.5).train


def write(path: Path, content: bytes = b"content") -> Path:
    with atomic_cache_write(path) as file:
        file.write(content)
    return path


# Damage


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_any_damage_is_named_and_the_file_made_again(split, tmp_path, caplog, place, bit, cut):
    caplog.set_level("INFO")
    cache = tmp_path / "cache"
    tokenizer = build_tokenizer(TokenizerConfig(vocab_size=300), split, cache)
    tokens = load_tokens(split, tokenizer, cache)[0].tolist()
    for path in cache.iterdir():
        content = bytearray(path.read_bytes())
        at = int(place * len(content))
        content[at] ^= 1 << bit
        path.write_bytes(content[:at] if cut else content)
    caplog.clear()
    again = build_tokenizer(TokenizerConfig(vocab_size=300), split, cache)
    assert fingerprint(again) == fingerprint(tokenizer)
    assert load_tokens(split, again, cache)[0].tolist() == tokens
    assert all(f"{path} is damaged" in caplog.text for path in cache.iterdir())


def test_file_of_another_version_is_named_and_made_again(split, tmp_path, caplog):
    caplog.set_level("INFO")
    byte = build_tokenizer(TokenizerConfig(kind="byte"), split, None)
    path = token_path(split, byte, tmp_path)
    np.save(path, np.zeros(500, np.uint16))  # as it was before there were checksums
    assert load_tokens(split, byte, tmp_path)[0].tolist() == list("".join(split.read()).encode())
    assert f"{path} is damaged" in caplog.text and "of another version" in caplog.text


def test_ids_that_the_tokenizer_does_not_have_are_not_believed(split, tmp_path, caplog):
    caplog.set_level("INFO")
    byte = build_tokenizer(TokenizerConfig(kind="byte"), split, None)
    tokens, path = load_tokens(split, byte, tmp_path)[0].tolist(), token_path(split, byte, tmp_path)
    content = bytearray(path.read_bytes()[: verified_size(path)])
    content[-1] = 1  # the last id is now above 256
    write(path, content)  # whole, by its checksum
    assert load_tokens(split, byte, tmp_path)[0].tolist() == tokens
    assert "ids beyond the vocabulary" in caplog.text


def test_damaged_cache_changes_nothing_but_a_line(train_here, tmp_path):
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    first = train_here("trainer.max_steps=2", cache)
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    second = train_here("trainer.max_steps=2", cache)
    assert second.stdout.count("is damaged") == 3 and second.returncode == 0
    assert "(encoded now)" in second.stdout and "(cached)" not in second.stdout
    assert second.summary["val_bits_per_byte"] == first.summary["val_bits_per_byte"]


@pytest.mark.parametrize("size", [0, 1, 50, cache_file.LAST_LINE_BYTES, 5000])
def test_file_without_its_last_line_is_damaged(tmp_path, size):
    (tmp_path / "file").write_bytes(bytes(size))
    with pytest.raises(CorruptCache):
        verified_size(tmp_path / "file")


# Disks that are full or cannot be written


def mounted(options: str) -> tuple[str, ...]:
    """What starts a process that finds a small disk of its own at ./cache."""
    return ("unshare", "-rm", "sh", "-c", f'mount -t tmpfs {options} tmpfs cache && exec "$0" "$@"')


def may_mount() -> bool:
    try:
        command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"]
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        (("bash", "-c", 'ulimit -f 64; exec "$0" "$@"'), "File too large"),
        (mounted("-o size=64k"), "No space left on device"),
        (mounted("-o ro"), "Read-only file system"),
    ],
)
@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_disk_that_takes_no_more_is_named_and_nothing_half_made_stays(call, tmp_path, prefix, reason, tokenizer):
    if prefix[0] == "unshare" and not may_mount():
        pytest.skip("needs the permission to mount")
    if shutil.which(prefix[0]) is None:
        pytest.skip(f"needs {prefix[0]}")
    (tmp_path / "cache").mkdir()
    (tmp_path / "text.txt").write_text(TEXT * 100, encoding="utf-8")
    vocab_size = {"byte": "null", "bpe": "257"}[tokenizer]
    arguments = (*SMALL, "trainer.max_steps=1", f"tokenizer={tokenizer}", f"tokenizer.vocab_size={vocab_size}")
    error = call(
        "train.py", "data.corpus=text.txt", "data.cache_dir=cache", *arguments, cwd=tmp_path, prefix=prefix
    ).error
    assert error.startswith("error: Cannot write to the cache cache: " + reason) and "data.cache_dir" in error
    left = [path.name for path in tmp_path.rglob("*") if path.name not in ("cache", "text.txt")]
    assert [name for name in left if not name.startswith("bpe-")] == []  # merges are small: they may be whole


# Two at once


def test_two_runs_on_one_text_from_a_cold_cache_are_as_one_alone(start, text_file, tmp_path):
    def begin(runs: str, cache: str) -> subprocess.Popen:
        places = (f"data.corpus={text_file}", f"runs_dir={runs}", f"data.cache_dir={cache}")
        return start("train.py", *BRIEF, *places, cwd=tmp_path)

    together = [begin(runs, "cache") for runs in ("one", "two")]
    for process in together:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and err == b"", err
    summaries = [json.loads(path.read_text()) for path in tmp_path.glob("*/*/summary.json")]
    figures = {tuple(summary[name] for name in ("val_nats_per_token", "val_tokens", "steps")) for summary in summaries}
    assert len(figures) == 1 and len(list(tmp_path.glob("*/*/summary.json"))) == 2
    assert sorted(path.name[:4] for path in (tmp_path / "cache").iterdir()) == ["bpe-", "toke", "toke"]


# Not for ever


def name(number: int) -> str:
    return f"tokens-{number:016x}.npy"


def test_cache_keeps_the_files_used_last(tmp_path):
    now = time.time()
    for number in range(cache_file.MAX_FILES + 10):
        path = write(tmp_path / name(number))
        os.utime(path, (now - 1000 + number,) * 2)  # written one after the other
    verified_size(tmp_path / name(15))  # used
    write(tmp_path / name(1000))
    kept = {path.name for path in tmp_path.iterdir()}
    assert len(kept) == cache_file.MAX_FILES and {name(15), name(1000), name(cache_file.MAX_FILES + 9)} < kept
    assert not kept & {name(number) for number in range(11)}


def test_files_of_others_stay_in_a_cache(tmp_path):
    others = ["thesis.txt", "tokens-of-mine.npy", "tokens-0123456789abcdef.npy.bak", "bpe-0123456789abcdef", "x.tmp"]
    for other in others:
        (tmp_path / other).write_text("mine")
        os.utime(tmp_path / other, (0, 0))
    for number in range(cache_file.MAX_FILES + 2):
        write(tmp_path / name(number))
    assert [other for other in others if not (tmp_path / other).exists()] == []


def test_file_that_a_killed_run_left_goes_after_a_day(tmp_path):
    left, young = tmp_path / f"{name(1)}.abc.tmp", tmp_path / f"{name(2)}.abc.tmp"
    for path in (left, young):
        path.write_bytes(b"half")
    os.utime(left, (time.time() - 2 * cache_file.STALE_SECONDS,) * 2)
    write(tmp_path / name(3))
    assert not left.exists() and young.exists()
