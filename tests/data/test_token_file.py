"""A split is encoded once, into a file that is right or not there, in memory that does not grow with it."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from data import tokens as token_file
from data.corpus import Corpus, Split
from data.tokenizer import TokenizerConfig, build_tokenizer, encode
from data.tokens import load_tokens, token_path
from system.errors import UserError

PROJECT = Path(__file__).resolve().parents[2]
TEXT = "What, you egg! Young fry of treachery! ☃\n" * 500


def split_of(text, folder):
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return Corpus([folder / "text.txt"], 0.5).train


@pytest.fixture
def split(tmp_path):
    return split_of(TEXT, tmp_path)


@pytest.fixture
def byte(split):
    return build_tokenizer(TokenizerConfig(kind="byte"), split, None)


def test_file_holds_the_ids_of_the_split(split, byte, tmp_path):
    tokens = load_tokens(split, byte, tmp_path)[0]
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.dtype("<u2")
    assert tokens.tolist() == list("".join(split.read()).encode())
    assert np.load(token_path(split, byte, tmp_path)).tolist() == tokens.tolist()


def test_second_use_does_not_encode(split, byte, tmp_path, monkeypatch):
    first = load_tokens(split, byte, tmp_path)[0]
    monkeypatch.setattr(token_file, "_write", None)  # calling it would raise
    assert load_tokens(split, byte, tmp_path)[0].tolist() == first.tolist()


def test_another_text_or_tokenizer_gets_another_file(split, byte, tmp_path):
    load_tokens(split, byte, tmp_path)
    bpe = build_tokenizer(TokenizerConfig(vocab_size=300), split, tmp_path)
    assert load_tokens(split, bpe, tmp_path)[0].tolist() == encode(bpe, "".join(split.read())).tolist()
    changed = split_of("X" + TEXT[1:], tmp_path)
    assert load_tokens(changed, byte, tmp_path)[0][0] == ord("X")
    assert len(list(tmp_path.glob("tokens-*.npy"))) == 3


def test_vocabulary_above_65536_takes_32_bits(split, byte, tmp_path):
    ranks = byte._mergeable_ranks | {b"What": 65_535}
    narrow = tiktoken.Encoding("narrow", pat_str=r"\w+|\W", mergeable_ranks=ranks, special_tokens={})
    ranks = byte._mergeable_ranks | {b"What": 70_000}
    wide = tiktoken.Encoding("wide", pat_str=r"\w+|\W", mergeable_ranks=ranks, special_tokens={})
    for encoding, dtype, first in ((narrow, "<u2", 65_535), (wide, "<u4", 70_000)):
        tokens = load_tokens(split, encoding, tmp_path)[0]
        assert tokens.dtype == np.dtype(dtype) and tokens[0] == first
        assert encoding.decode(tokens.tolist()) == "".join(split.read())


@pytest.mark.parametrize("damage", [b"", b"not numpy", "cut", "longer", "type", "header"])
def test_damaged_file_is_made_again(split, byte, tmp_path, damage, caplog):
    caplog.set_level("INFO")
    good = load_tokens(split, byte, tmp_path)[0].tolist()
    path = token_path(split, byte, tmp_path)
    content = path.read_bytes()
    damaged = {"cut": content[:-100], "longer": content + b"xx", "header": content.replace(b"(", b"[", 1)}
    path.unlink()
    if damage == "type":
        np.save(path, np.array(good, dtype=np.int64))
    else:
        path.write_bytes(damaged.get(damage, damage))
    assert load_tokens(split, byte, tmp_path)[0].tolist() == good
    assert caplog.text.count("is damaged") == 1


def test_interrupted_encoding_leaves_nothing(split, byte, tmp_path, monkeypatch):
    def interrupted(*_):
        yield np.arange(5)
        raise KeyboardInterrupt

    monkeypatch.setattr(token_file, "encode_chunks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_tokens(split, byte, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_disk_error_is_named_with_the_option_that_moves_the_cache(split, byte, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_file, "_write", full)
    with pytest.raises(UserError, match=r"No space left.*data\.cache_dir"):
        load_tokens(split, byte, tmp_path / "cache")


def _load_in_a_process(args):
    return load_tokens(*args)[0].tolist()


def test_two_processes_from_a_cold_cache_both_get_the_file(tmp_path):
    split = split_of(TEXT * 20, tmp_path)
    byte = build_tokenizer(TokenizerConfig(kind="byte"), split, None)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        one, two = pool.map(_load_in_a_process, [(split, byte, tmp_path / "cache")] * 2, chunksize=1)
    assert one == two == load_tokens(split, byte, tmp_path / "cache")[0].tolist()
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_long_encoding_tells_how_far_it_is(split, byte, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(token_file, "PROGRESS_SECONDS", 0)
    load_tokens(split, byte, tmp_path)
    assert "encoding the training split" in caplog.text and "% of" in caplog.text


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    line = "Tomorrow, and tomorrow, and tomorrow, creeps in this petty pace from day to day.\n"
    (tmp_path / "big.txt").write_text(line * (60_000_000 // len(line)), encoding="utf-8")
    program = """
import resource, sys
from pathlib import Path
from data.corpus import Corpus, find_files
from data.tokenizer import TokenizerConfig, build_tokenizer
from data.tokens import load_tokens
peak_mb = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
folder = Path(sys.argv[1])
split = Corpus(find_files(str(folder / "big.txt")), 0.1).train
byte = build_tokenizer(TokenizerConfig(kind="byte"), split, folder)
before = peak_mb()
tokens = load_tokens(split, byte, folder)[0]
print(len(tokens), round(peak_mb() - before))
"""
    out = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    num_tokens, grown_mb = map(int, out.stdout.split())
    assert num_tokens > 50_000_000 and grown_mb < 30


def test_split_is_the_only_thing_hashed(split):
    assert Split("renamed", split.spans).sha256 == split.sha256
