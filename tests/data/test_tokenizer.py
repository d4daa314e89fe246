"""Any text encodes, fast, and decodes to itself; a checkpoint and a picture can carry the tokenizer."""

import functools
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from configs.defaults import CONFIG_DIR
from data import tokenizer as module
from data.corpus import Corpus, find_files
from data.tokenizer import (
    SEGMENT_CHARS,
    StreamingDetokenizer,
    TokenizerConfig,
    build_tokenizer,
    deserialize,
    encode,
    encode_chunks,
    fingerprint,
    serialize,
    token_bytes,
    token_labels,
)
from data.tokenizers import TOKENIZERS, bpe, tiktoken_encodings
from data.tokenizers.bpe import DEFAULT_VOCAB_SIZES, TEXT_BYTES_PER_TOKEN, vocab_size_for
from system.errors import UserError

PROJECT = Path(__file__).resolve().parents[2]
# The pre-tokenizers of GPT-2 and GPT-4 as published, whose look-ahead made long runs of white space panic.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s"
)
VERSE = "The raven himself is hoarse\nThat croaks the fatal entrance of Duncan\nUnder my battlements, 1606.\n"
KINDS = ["byte", "bpe", "gpt2", "gpt4"]

any_text = st.text(st.characters(codec="utf-8"))  # every code point but surrogates
texts_with_runs = st.lists(
    st.one_of(
        any_text,
        st.builds(lambda text, times: text * times, any_text, st.integers(1, 500)),
        st.sampled_from([VERSE * 60, "<|endoftext|>", "\r\n" * 3000, "word " * 900, "\u3000é\u0301"]),
    ),
    max_size=6,
)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "verse.txt"
    path.write_text(shakespeare()[:200_000], encoding="utf-8")
    return Corpus([path], 0.1).train


@functools.cache
def shakespeare():
    return find_files()[0].read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def encodings(split, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    bpe = build_tokenizer(TokenizerConfig(vocab_size=600), split, cache)
    ranks = bpe._mergeable_ranks | {b" " * n: 600 + n for n in range(2, 9)} | {b"a" * n: 610 + n for n in range(2, 9)}
    return {
        "byte": build_tokenizer(TokenizerConfig(kind="byte"), split, cache),
        "bpe": bpe,
        "gpt2": tiktoken.Encoding(
            "gpt2-like", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 700}
        ),
        "gpt4": tiktoken.Encoding("gpt4-like", pat_str=GPT4_PATTERN, mergeable_ranks=ranks, special_tokens={}),
    }


fast = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


# Round trips


@pytest.mark.parametrize("kind", KINDS)
@fast
@given(texts=texts_with_runs)
def test_any_text_decodes_to_itself(encodings, kind, texts):
    text = "".join(texts)
    assert encodings[kind].decode_bytes(encode(encodings[kind], text).tolist()).decode() == text


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_text_gets_the_ids_tiktoken_gives_it(encodings, kind):
    text = shakespeare()[-300_000:]
    assert encode(encodings[kind], text).tolist() == encodings[kind].encode_ordinary(text)


@pytest.mark.parametrize("kind", KINDS)
@fast
@given(texts=texts_with_runs, data=st.data())
def test_ids_do_not_depend_on_how_the_text_arrives(encodings, kind, texts, data):
    text = "".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    arrived = [i for ids in encode_chunks(encodings[kind], pieces) for i in ids.tolist()]
    assert arrived == encode(encodings[kind], text).tolist()


def test_byte_ids_are_the_utf8_bytes(encodings):
    assert encode(encodings["byte"], VERSE + "☃").tolist() == list((VERSE + "☃").encode())


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_looks_like_a_special_token_is_text(encodings, kind):
    ids = encode(encodings[kind], "a<|endoftext|>b")
    assert 700 not in ids and encodings[kind].decode(ids.tolist()) == "a<|endoftext|>b"


def test_empty_text_has_no_ids(encodings):
    assert encode(encodings["bpe"], "").shape == (0,) and encode(encodings["bpe"], "").dtype == np.int64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", [" ", "a", "\n", "\n ", "é", "!", "字", "\r\n", "1"])
def test_a_million_equal_characters_encode_in_linear_time(encodings, kind, run, monkeypatch):
    text, encoding, lengths = run * (1_000_000 // len(run)), encodings[kind], []

    def count(segment, encode_ordinary=encoding.encode_ordinary):
        lengths.append(len(segment))
        assert lengths[-1] <= SEGMENT_CHARS  # of a longer one tiktoken's time grows as its square: minutes
        return encode_ordinary(segment)

    monkeypatch.setattr(encoding, "encode_ordinary", count)
    assert token_bytes(encoding)[encode(encoding, text)].sum() == len(text.encode())
    assert sum(lengths) == len(text) and len(lengths) <= len(text) / (SEGMENT_CHARS / 2)


def test_no_call_of_tiktoken_gets_more_than_a_segment(encodings):
    assert max(map(len, module.segments(["x" * 50_000, VERSE * 100]))) <= SEGMENT_CHARS


# Learning merges


def test_merges_come_from_the_training_split_alone(split, tmp_path):
    words = "Zyzzyva quixotry " * 2000
    (tmp_path / "text").write_text(VERSE * 500 + words, encoding="utf-8")
    corpus = Corpus([tmp_path / "text"], 0.5)
    assert "Zy" in "".join(corpus.val.read()) and "Zy" not in "".join(corpus.train.read())
    tokens = build_tokenizer(TokenizerConfig(vocab_size=1000), corpus.train, tmp_path).token_byte_values()
    assert b"That" in b"".join(tokens) and not [token for token in tokens if b"zz" in token]


def test_bpe_spends_fewer_tokens_than_bytes(encodings):
    assert len(encode(encodings["bpe"], VERSE)) < 0.6 * len(VERSE)


def test_tiny_text_has_the_vocabulary_it_can_fill(tmp_path):
    (tmp_path / "text").write_text("ab ab ab", encoding="utf-8")
    encoding = build_tokenizer(TokenizerConfig(), Corpus([tmp_path / "text"], 0.2).train, tmp_path)
    assert 256 < encoding.n_vocab < 300
    assert encoding.decode(encode(encoding, "Unseen: ☃").tolist()) == "Unseen: ☃"


def test_merges_are_learned_once_and_again_if_the_cache_is_damaged(split, tmp_path, monkeypatch):
    config = TokenizerConfig(vocab_size=300)
    first = build_tokenizer(config, split, tmp_path)
    (cached,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(bpe, "_train_merges", None)  # calling it would raise
        assert fingerprint(build_tokenizer(config, split, tmp_path)) == fingerprint(first)
    cached.write_bytes(cached.read_bytes()[:1000])
    assert fingerprint(build_tokenizer(config, split, tmp_path)) == fingerprint(first)


def test_unwritable_cache_is_named_with_the_option_that_moves_it(split, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/cache.*data\.cache_dir"):
        build_tokenizer(TokenizerConfig(vocab_size=300), split, tmp_path / "file" / "cache")


def test_each_tokenizer_has_a_file_and_each_file_a_tokenizer():
    files = {yaml.safe_load(path.read_text())["kind"] for path in (CONFIG_DIR / "tokenizer").glob("*.yaml")}
    assert files == set(TOKENIZERS)


def test_name_of_a_tokenizer_is_checked_without_slow_imports():
    code = "import sys, data.config; sys.exit(bool({'torch', 'numpy', 'tiktoken'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT).returncode == 0


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"kind": "nonsense"}, "bpe, byte, tiktoken"),
        ({"vocab_size": 256}, "257 to 1000000"),
        ({"vocab_size": 10**7}, "257 to 1000000"),
        ({"vocab_size": 1024.0}, "whole number"),
        ({"vocab_size": True}, "whole number"),
    ],
)
def test_impossible_tokenizer_is_refused_with_what_is_possible(wrong, message):
    with pytest.raises(UserError, match=message):
        TokenizerConfig(**wrong)


# tiktoken's own


def test_unknown_name_is_answered_with_the_nearest(split, tmp_path):
    with pytest.raises(UserError, match="gpt2"):
        build_tokenizer(TokenizerConfig(kind="tiktoken", name="gtp2"), split, tmp_path)


def test_name_without_cache_and_network_fails_at_once_with_both_ways_out(split, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # nothing listens there
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr("requests.get", lambda *_, **__: pytest.fail("waits for what does not answer"))
    with pytest.raises(UserError, match=r"'r50k_base'.*TIKTOKEN_CACHE_DIR.*tokenizer=bpe"):
        build_tokenizer(TokenizerConfig(kind="tiktoken", name="r50k_base"), split, tmp_path)


def test_network_that_never_answers_is_given_up(monkeypatch):
    over, answered = threading.Event(), []
    monkeypatch.setattr("requests.head", lambda *_, **__: answered.append(over.wait(60)))
    monkeypatch.setattr(tiktoken_encodings, "NETWORK_TIMEOUT_SECONDS", 0.1)
    with pytest.raises(OSError):
        tiktoken_encodings._download("http://127.0.0.1:9/")
    assert not answered  # it is still waited for, by a thread that is left behind
    over.set()


# Streaming


@pytest.mark.parametrize("kind", KINDS)
@fast
@given(data=st.data())
def test_streamed_text_equals_the_text_decoded_at_once(encodings, kind, data):
    encoding = encodings[kind]
    known = sorted([*encoding._mergeable_ranks.values(), *encoding._special_tokens.values()])
    ids = data.draw(st.lists(st.sampled_from(known)))
    decoder = StreamingDetokenizer(encoding)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == encoding.decode(ids, errors="replace")


def test_stream_holds_a_character_back_until_it_is_whole(encodings):
    decoder = StreamingDetokenizer(encodings["byte"])
    assert [decoder.push(byte) for byte in "a€".encode()] == ["a", "", "", "€"]
    assert decoder.push(0xE2) == "" and decoder.flush() == "�"


def test_an_id_without_bytes_is_silent(encodings):
    assert StreamingDetokenizer(encodings["gpt2"]).push(650) == ""


# What a token is


def test_token_bytes_add_up_to_the_text(encodings):
    text = shakespeare()[:5000] + "☃é"
    for encoding in encodings.values():
        lengths = token_bytes(encoding)
        assert lengths.shape == (encoding.n_vocab,) and lengths.dtype == np.int32
        assert lengths[encode(encoding, text)].sum() == len(text.encode())
    assert token_bytes(encodings["gpt2"])[[650, 700]].tolist() == [0, 0]


def test_labels_show_white_space_and_broken_bytes(encodings):
    labels = token_labels(encodings["byte"], b"\n a\t\x00\xe2")
    assert labels == ["↵", "·", "a", "→", r"\x00", r"\xe2"]


def test_labels_are_short_and_printable(encodings):
    labels = token_labels(encodings["gpt2"], range(encodings["gpt2"].n_vocab))
    assert max(map(len, labels)) <= 12 and all(label.isprintable() for label in labels)


# Plain values


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_survives_a_checkpoint_of_plain_values(encodings, kind, tmp_path):
    torch.save(serialize(encodings[kind]), tmp_path / "checkpoint")
    loaded = deserialize(torch.load(tmp_path / "checkpoint", weights_only=True))
    assert encode(loaded, VERSE * 3 + "☃").tolist() == encode(encodings[kind], VERSE * 3 + "☃").tolist()
    assert (loaded.name, loaded.n_vocab) == (encodings[kind].name, encodings[kind].n_vocab)
    assert loaded._special_tokens == encodings[kind]._special_tokens
    assert fingerprint(loaded) == fingerprint(encodings[kind])


@pytest.mark.parametrize(
    "damage",
    [
        {"pattern": None},
        {"pattern": "("},
        {"merges": ""},
        {"merges": "AA== 0\n"},
        {"merges": "?? 0\n"},
        {"merges": 3},
        {"special_tokens": [["<|end|>", -1]]},
        {"special_tokens": [["<|end|>", 5]]},
        {"special_tokens": [["a", 999]]},
        {"special_tokens": 7},
    ],
)
def test_damaged_tokenizer_is_refused(encodings, damage):
    with pytest.raises(UserError, match="tokenizer is damaged"):
        deserialize({**serialize(encodings["bpe"]), **damage})


@pytest.mark.parametrize("plain", [None, {}, [], {"name": "x"}])
def test_what_is_no_tokenizer_is_refused(plain):
    with pytest.raises(UserError, match="tokenizer is damaged"):
        deserialize(plain)


# The default vocabulary


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_longer_text_never_gets_a_smaller_vocabulary(one, other):
    assert vocab_size_for(min(one, other)) <= vocab_size_for(max(one, other))


@given(st.integers(0, 1 << 40))
@example(0)
@example(DEFAULT_VOCAB_SIZES[1] * TEXT_BYTES_PER_TOKEN)
@example(DEFAULT_VOCAB_SIZES[1] * TEXT_BYTES_PER_TOKEN - 1)
def test_default_vocabulary_is_the_largest_power_of_two_with_enough_text_a_token(num_bytes):
    size, (least, most) = vocab_size_for(num_bytes), DEFAULT_VOCAB_SIZES
    assert least <= size <= most and size.bit_count() == 1
    assert size == least or size * TEXT_BYTES_PER_TOKEN <= num_bytes
    assert size == most or 2 * size * TEXT_BYTES_PER_TOKEN > num_bytes


def test_bpe_without_a_vocabulary_given_learns_the_default_one(split, tmp_path):
    assert build_tokenizer(TokenizerConfig(), split, tmp_path).n_vocab == vocab_size_for(split.num_bytes)
