"""Text files become one text and two splits: every byte once, whatever the locale, in bounded memory."""

import glob
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.corpus import Corpus, find_files
from system.errors import UserError

PROJECT = Path(__file__).resolve().parents[2]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def text_of(split, **options):
    return "".join(split.read(**options))


def both(corpus):
    return text_of(corpus.train) + text_of(corpus.val)


# Which files


def test_default_corpus_is_embedded_and_there():
    assert find_files() == find_files("shakespeare")
    assert Corpus(find_files(), 0.1).num_bytes > 1_000_000


def test_folder_gives_its_text_files_sorted_without_hidden_and_binary_ones(tmp_path, caplog):
    for name in ("b.txt", "a/z.md", ".hidden", ".git/config", "photo.jpg"):
        write(tmp_path / name, b"JF\0IF" if name == "photo.jpg" else name)
    assert find_files(str(tmp_path)) == [tmp_path / "a/z.md", tmp_path / "b.txt"]
    assert "1 binary file" in caplog.text and "photo.jpg" in caplog.text


def test_glob_gives_its_matches_sorted(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "d.md"):
        write(tmp_path / name, name)
    assert find_files(f"{tmp_path}/**/*.txt") == [tmp_path / name for name in ("a.txt", "b.txt", "deep/c.txt")]


def test_a_name_with_glob_characters_is_a_name_first(tmp_path):
    file = write(tmp_path / "act[1].txt", "text")
    assert find_files(str(file)) == [file]


@pytest.mark.skipif(os.name != "posix", reason="links need a permission on Windows")
@pytest.mark.parametrize("corpus", ["", "/**", "/**/*.txt", "/*/*.txt"])
def test_links_that_lead_round_in_a_circle_give_each_real_file_once(tmp_path, caplog, corpus):
    for name in ("a.txt", "deep/b.txt"):
        write(tmp_path / "texts" / name, name)
    for link in ("again", "once_more", "deep/up"):
        (tmp_path / "texts" / link).symlink_to(tmp_path / "texts", target_is_directory=True)
    expected = [tmp_path / "texts" / name for name in ("a.txt", "deep/b.txt")]
    if corpus == "/*/*.txt":  # which asks for files in the folder's folders: it is one of them, by its links
        expected[0] = tmp_path / "texts/again/a.txt"
    assert find_files(f"{tmp_path / 'texts'}{corpus}") == expected
    assert "skipped" in caplog.text and "texts/once_more" in caplog.text


@pytest.mark.skipif(os.name != "posix", reason="links need a permission on Windows")
def test_other_names_of_a_file_are_left_out_and_named(tmp_path, caplog):
    file = write(tmp_path / "texts/m.txt", "text")
    (tmp_path / "texts/a.txt").symlink_to(file)
    (tmp_path / "texts/z.txt").hardlink_to(file)
    (tmp_path / "texts/gone.txt").symlink_to(tmp_path / "nowhere")
    assert find_files(str(tmp_path / "texts/*.txt")) == [file]
    assert "2 other names of files that are read" in caplog.text and "1 broken link or device" in caplog.text
    assert all(f"texts/{name}.txt" in caplog.text for name in ("a", "z", "gone"))


@pytest.mark.skipif(os.name != "posix", reason="links need a permission on Windows")
def test_link_to_a_folder_elsewhere_is_followed(tmp_path):
    write(tmp_path / "elsewhere/b.txt", "b")
    write(tmp_path / "texts/a.txt", "a")
    (tmp_path / "texts/more").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    for corpus in ("texts", "texts/**/*.txt"):
        assert find_files(str(tmp_path / corpus)) == [tmp_path / "texts/a.txt", tmp_path / "texts/more/b.txt"]


@pytest.mark.parametrize(
    "corpus", ["", "/**", "/*.txt", "/**/*.txt", "/deep/*", "/?.txt", "/[ab].txt", "/.hidden", "/d*/**", "/*/c.txt"]
)
def test_glob_gives_what_pythons_own_gives(tmp_path, caplog, corpus):
    for name in ("a.txt", "b.txt", "deep/c.txt", "deep/er/d.txt", "e.md", ".hidden", ".git/f.txt"):
        write(tmp_path / name, name)
    caplog.clear()
    python = glob.glob(f"{tmp_path}{corpus or '/**'}", recursive=True)
    assert find_files(f"{tmp_path}{corpus}") == sorted({Path(name) for name in python if os.path.isfile(name)})
    assert caplog.text == ""  # nothing is left out


def test_what_runs_wrote_is_no_text_wherever_it_lies(tmp_path, caplog):
    text = write(tmp_path / "play.txt", "text")
    for run in ("runs/one", "moved"):
        for name in ("config.yaml", "train.log", "summary.json"):
            write(tmp_path / run / name, name)
    for name in ("multirun.yaml", "0_seed_1/config.yaml", "0_seed_1/checkpoints/x", "by_context_length/events.out"):
        write(tmp_path / "a_sweep" / name, name)
    write(tmp_path / "cache/bpe-0123456789abcdef.txt", "merges")
    theirs = write(tmp_path / "other/config.yaml", "of another program")
    assert find_files(str(tmp_path)) == find_files(f"{tmp_path}/**") == [theirs, text]
    assert "3 run directories of train.py" in caplog.text and "1 cache file (" in caplog.text
    assert find_files(str(tmp_path / "runs/one/train.log")) == [tmp_path / "runs/one/train.log"]  # asked for by name


def test_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    write(tmp_path / "locked/a.txt", "a")
    iterdir = Path.iterdir

    def locked(folder):
        if folder.name == "locked":
            raise PermissionError(13, "Permission denied", str(folder))
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", locked)
    with pytest.raises(UserError, match="Cannot read .*locked: Permission denied"):
        find_files(str(tmp_path))


def test_line_about_the_text_counts_empty_files_and_those_with_crlf(tmp_path):
    for name, content in (("a.txt", "one\n"), ("b.txt", ""), ("c.txt", "two\r\n"), ("d.txt", "three\r\nfour")):
        write(tmp_path / name, content)
    corpus = Corpus(find_files(str(tmp_path)), 0.5)
    assert corpus.describe_files() == "4 files (1 empty, 2 with CRLF line ends, kept)"
    assert both(corpus) == "one\ntwo\r\nthree\r\nfour"
    assert Corpus([tmp_path / "a.txt"], 0.5).describe_files() == "a.txt"
    assert Corpus([tmp_path / "c.txt"], 0.5).describe_files() == "c.txt (CRLF line ends, kept)"


@pytest.mark.parametrize("corpus", ["missing.txt", "", "*.none", "x" * 5000])
def test_corpus_that_is_not_there_is_named_in_one_line(tmp_path, corpus):
    with pytest.raises(UserError, match="tmp|data.corpus") as caught:
        find_files(str(tmp_path / corpus))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf"])
def test_empty_text_is_refused_by_name(tmp_path, content):
    with pytest.raises(UserError, match=r"empty\.txt.*empty"):
        Corpus([write(tmp_path / "empty.txt", content)], 0.1)


def test_vanished_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"Cannot read .*gone\.txt"):
        Corpus([tmp_path / "gone.txt"], 0.1)


# What the text is


def test_files_are_joined_with_a_newline_only_where_one_is_missing(tmp_path):
    files = [write(tmp_path / f"{i}", text) for i, text in enumerate(["one", "two\n", "", "\ufeffthree\r\n", "four"])]
    assert both(Corpus(files, 0.5)) == "one\ntwo\nthree\r\nfour"


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=4),
    val_fraction=st.floats(0.05, 0.95),
    chunk_bytes=st.integers(1, 20),
)
def test_splits_hold_every_character_once_in_order(tmp_path, texts, val_fraction, chunk_bytes):
    files = [write(tmp_path / str(i), text) for i, text in enumerate(texts)]
    joined = ""
    for text in (text.removeprefix("\ufeff") for text in texts):
        joined += ("\n" if joined and text and not joined.endswith("\n") else "") + text
    num_bytes = len(joined.encode())
    cut = round(num_bytes * (1 - val_fraction))
    try:
        corpus = Corpus(files, val_fraction)
    except UserError:
        assert cut == 0 or cut > num_bytes - len(joined[-1].encode())  # only where a split would be empty
        return
    train, val = text_of(corpus.train, chunk_bytes=chunk_bytes), text_of(corpus.val, chunk_bytes=chunk_bytes)
    assert train + val == joined
    assert len(train.encode()) == corpus.train.num_bytes and len(val.encode()) == corpus.val.num_bytes
    assert 0 <= corpus.train.num_bytes - cut <= 3


def test_hash_depends_on_the_text_alone(tmp_path):
    one = Corpus([write(tmp_path / "one", "aaa\nbbb\nccc\n")], 0.3)
    two = Corpus([write(tmp_path / "x", "aaa"), write(tmp_path / "y", "bbb\nccc\n")], 0.3)
    other = Corpus([write(tmp_path / "other", "aab\nbbb\nccc\n")], 0.3)
    assert one.train.sha256 == two.train.sha256 != other.train.sha256
    assert one.val.sha256 == other.val.sha256


@pytest.mark.parametrize("before", [10, 5_000_000])
def test_file_that_is_not_utf8_is_refused_with_its_byte_offset(tmp_path, before):
    good = write(tmp_path / "good.txt", "é" * 10)
    bad = write(tmp_path / "latin1.txt", b"\xef\xbb\xbf" + b"a" * before + "caf\xe9 noir".encode("latin-1"))
    with pytest.raises(UserError, match=rf"latin1\.txt.*0xe9 at offset {3 + before + 3}\b"):
        both(Corpus([good, bad], 0.1))


def test_file_that_ends_inside_a_character_is_refused(tmp_path):
    with pytest.raises(UserError, match="offset 100"):
        both(Corpus([write(tmp_path / "cut.txt", b"a" * 100 + "€".encode()[:2])], 0.1))


def test_reading_ignores_the_locale(tmp_path):
    write(tmp_path / "text.txt", "Où est l’été ? ☃ 文字")
    program = (
        "import sys; from data.corpus import *; c = Corpus(find_files(sys.argv[1]), 0.5);"
        "print(ascii(''.join(c.train.read()) + ''.join(c.val.read())))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    out = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert out.stdout.strip() == ascii("Où est l’été ? ☃ 文字"), out.stderr


@pytest.mark.parametrize("val_fraction", [0, 1, -0.1, 1.5, float("nan")])
def test_impossible_val_fraction_is_refused(tmp_path, val_fraction):
    with pytest.raises(UserError, match="data.val_fraction"):
        Corpus([write(tmp_path / "text", "some text")], val_fraction)


def test_text_too_short_for_two_splits_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"2 bytes.*validation split.*data.val_fraction=0.1"):
        Corpus([write(tmp_path / "text", "ab")], 0.1)
