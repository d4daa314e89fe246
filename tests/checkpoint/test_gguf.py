"""A GGUF file is the same network and tokenizer to llama.cpp."""

import sys

import numpy as np
import pytest
import regex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from checkpoint.checkpoint import Checkpoint
from checkpoint.gguf_file import _merge
from data.config import TokenizerConfig
from data.corpus import Corpus, find_files
from data.tokenizer import build_tokenizer, encode, make_encoding
from data.tokenizers.bpe import PATTERNS
from model.gpt import GPT
from sampling.config import SamplingConfig
from sampling.sampler import generate
from system.errors import UserError
from tests.checkpoint.test_hugging_face import TEXTS
from tests.model.test_gpt import family

gguf = pytest.importorskip("gguf")

SHAPES = {
    "gpt2": ("gpt2", {}),
    "gpt2 without biases and norm weights": ("gpt2", {"bias": False, "norm_affine": False, "tied_embeddings": False}),
    "llama": ("llama", {"rope_base": 500_000.0}),
    "llama with grouped heads": ("llama", {"num_kv_heads": 2, "bias": True, "tied_embeddings": True}),
}


@pytest.fixture(scope="module")
def encodings(cache_dir):
    train_split = Corpus(find_files(None), 0.1).train
    bpe = TokenizerConfig(kind="bpe", vocab_size=600, pattern="gpt2")
    return {
        "bpe": build_tokenizer(bpe, train_split, cache_dir),
        "byte": build_tokenizer(TokenizerConfig(kind="byte"), train_split, cache_dir),
    }


def checkpoint(name: str, tokenizer, **fields) -> Checkpoint:
    torch.manual_seed(0)
    sizes = {"context_length": 128, "num_layers": 2, "num_heads": 4, "d_model": 32}
    network = GPT(family(name, **sizes | fields, vocab_size=tokenizer.n_vocab)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, std=0.3)
    return Checkpoint(None, network, tokenizer, 7, {})


@pytest.fixture(scope="module", params=SHAPES)
def exported(request, encodings, tmp_path_factory):
    """A checkpoint and its GGUF file."""
    name, fields = SHAPES[request.param]
    gpt = checkpoint(name, encodings["bpe"], **fields)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    gpt.export_gguf(path)
    return gpt, path


def read(path) -> tuple[dict, dict]:
    """The entries and the tensors of a file, as the gguf package reads them."""
    reader = gguf.GGUFReader(path)
    entries = {name: field.contents() for name, field in reader.fields.items()}
    return entries, {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in reader.tensors}


# Weights


def test_config_is_in_the_entries_of_the_architecture(exported):
    gpt, path = exported
    entries, c = read(path)[0], gpt.network.config
    kind = "llama" if c.positions == "rope" else "gpt2"
    assert entries["general.architecture"] == kind
    expected = {
        "context_length": c.context_length,
        "embedding_length": c.d_model,
        "block_count": c.num_layers,
        "feed_forward_length": c.resolved_mlp_hidden,
        "attention.head_count": c.num_heads,
        "vocab_size": c.vocab_size,
    }
    if kind == "llama":
        expected |= {"attention.head_count_kv": c.resolved_num_kv_heads, "rope.dimension_count": c.head_dim}
        assert entries["llama.rope.freq_base"] == pytest.approx(c.rope_base)
        assert entries["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(c.norm_eps)
    else:
        assert entries["gpt2.attention.layer_norm_epsilon"] == pytest.approx(c.norm_eps)
    assert {name: entries[f"{kind}.{name}"] for name in expected} == expected


def test_every_weight_is_in_the_file_once(exported):
    gpt, path = exported
    tensors, c = read(path)[1], gpt.network.config
    assert ("output.weight" in tensors) == (not c.tied_embeddings)
    present = sum(tensor.numel() for name, tensor in tensors.items())
    missing = sum(  # vectors that llama.cpp needs and that the network leaves out: ones and zeros
        tensor.numel()
        for name, tensor in tensors.items()
        if (name.endswith("bias") and not c.bias) or ("norm.weight" in name and not c.norm_affine)
    )
    assert present - missing == gpt.network.num_parameters()


def test_attention_of_the_exported_matrices_is_the_networks(exported):
    """llama.cpp rotates adjacent pairs of queries and keys: the scores have to be the same as ours."""
    gpt, path = exported
    c, tensors = gpt.network.config, read(path)[1]
    attention, x = gpt.network.blocks[0].attention, torch.randn(1, 9, c.d_model)
    _, rope = gpt.network.embed(torch.zeros(1, 9, dtype=torch.long))
    if c.positions != "rope":
        qkv = x @ tensors["blk.0.attn_qkv.weight"].T + tensors["blk.0.attn_qkv.bias"]
        assert_close(qkv, attention.in_proj(x))
        return

    def rotated(part: str, num_heads: int) -> torch.Tensor:
        y = x @ tensors[f"blk.0.attn_{part}.weight"].T + tensors.get(f"blk.0.attn_{part}.bias", torch.zeros(1))
        y = y.view(1, 9, num_heads, c.head_dim).transpose(1, 2)  # (B, H, T, D)
        rates = c.rope_base ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        turns = torch.polar(torch.ones(9, c.head_dim // 2), torch.outer(torch.arange(9), rates))
        return torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turns).flatten(-2)

    q, k = rotated("q", c.num_heads), rotated("k", c.resolved_num_kv_heads)
    our_q, our_k, _ = attention.project(x, rope=rope)
    groups = c.num_heads // c.resolved_num_kv_heads
    ours = our_q @ our_k.repeat_interleave(groups, 1).mT
    assert_close(q @ k.repeat_interleave(groups, 1).mT, ours, atol=1e-4, rtol=1e-4)


# Tokenizer


@pytest.mark.parametrize("kind", ["bpe", "byte"])
def test_vocabulary_is_in_gpt2s_characters_and_ends_with_a_token_no_text_has(encodings, kind, tmp_path):
    tokenizer = encodings[kind]
    checkpoint("gpt2", tokenizer).export_gguf(tmp_path / "m.gguf")
    entries = read(tmp_path / "m.gguf")[0]
    assert entries["tokenizer.ggml.model"] == "gpt2" and entries["tokenizer.ggml.pre"] == "gpt-2"
    tokens = entries["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == tokenizer.n_vocab
    assert tokens[encode(tokenizer, "é")[-1]] == "©" or kind == "bpe"
    space = tokenizer.encode_ordinary(" ")[0]
    assert tokens[space] == "Ġ"
    end = entries["tokenizer.ggml.eos_token_id"]
    assert tokenizer.decode_single_token_bytes(end) == b"\xff"
    assert set(entries["tokenizer.ggml.token_type"]) == {gguf.TokenType.NORMAL}


def test_published_end_of_text_is_a_control_token(tmp_path, encodings):
    ranks = encodings["bpe"]._mergeable_ranks
    tokenizer = make_encoding("gpt2", PATTERNS["gpt2"], ranks, {"<|endoftext|>": len(ranks)})
    checkpoint("gpt2", tokenizer).export_gguf(tmp_path / "m.gguf")
    entries = read(tmp_path / "m.gguf")[0]
    assert entries["tokenizer.ggml.eos_token_id"] == len(ranks)
    assert entries["tokenizer.ggml.tokens"][-1] == "<|endoftext|>"
    assert entries["tokenizer.ggml.token_type"][-1] == gguf.TokenType.CONTROL


def pieces_of_gpt2(text: str) -> list[str]:
    """How the pre-tokenizer of GPT-2 in the package tokenizers splits a text."""
    tokenizers = pytest.importorskip("tokenizers")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return [text[start:end] for _, (start, end) in byte_level.pre_tokenize_str(text)]


def check_pieces(text: str) -> None:
    assert regex.findall(PATTERNS["gpt2"], text) == pieces_of_gpt2(text)


@pytest.mark.parametrize("name", [name for name in TEXTS if "\x1c" not in TEXTS[name]])
def test_pattern_splits_as_gpt2_does(name):
    check_pieces(TEXTS[name])


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn"])))
def test_pattern_splits_any_text_as_gpt2_does(text):
    check_pieces(text)


def test_merges_alone_make_every_token(encodings):
    ranks = encodings["bpe"]._mergeable_ranks
    assert all(_merge(token, ranks.get) == [token] for token in ranks)
    assert _merge(b"abc", {b"bc": 1, b"ab": 2}.get) == [b"a", b"bc"]


# What llama.cpp cannot run


@pytest.mark.parametrize(
    ("name", "fields", "field"),
    [
        ("tiny", {}, "model."),
        ("nanochat", {}, "model.qk_norm=true"),
        ("llama", {"sliding_window": 8}, "model.sliding_window=8"),
    ],
)
def test_network_that_llama_cpp_does_not_have_is_rejected(encodings, tmp_path, name, fields, field):
    with pytest.raises(UserError) as rejection:
        checkpoint(name, encodings["bpe"], **fields).export_gguf(tmp_path / "m.gguf")
    assert field in str(rejection.value) and "\n" not in str(rejection.value) and not list(tmp_path.iterdir())


def test_tokenizer_with_another_pattern_is_rejected(cache_dir, tmp_path):
    default = TokenizerConfig(kind="bpe", vocab_size=300)
    tokenizer = build_tokenizer(default, Corpus(find_files(None), 0.1).train, cache_dir)
    with pytest.raises(UserError, match="tokenizer.pattern=gpt2"):
        checkpoint("gpt2", tokenizer).export_gguf(tmp_path / "m.gguf")


def test_token_that_merges_do_not_make_is_rejected(encodings, tmp_path):
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"abc": 256}
    with pytest.raises(UserError, match="b'abc'"):
        checkpoint("gpt2", make_encoding("bpe", PATTERNS["gpt2"], ranks)).export_gguf(tmp_path / "m.gguf")


def test_directory_that_is_not_there_is_named(encodings, tmp_path):
    with pytest.raises(UserError, match="missing.*cannot be written"):
        checkpoint("gpt2", encodings["byte"]).export_gguf(tmp_path / "missing" / "m.gguf")


def test_missing_package_is_named_with_how_to_install_it(encodings, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="pip install gguf"):
        checkpoint("gpt2", encodings["byte"]).export_gguf(tmp_path / "m.gguf")


def test_command_exports_a_run(train_here, sample_here, tmp_path):
    run = train_here("model=gpt2", "tokenizer.pattern=gpt2", "trainer.max_steps=2").path
    path = tmp_path / "model.gguf"
    assert sample_here(f"checkpoint={run}", f"export={path}").returncode == 0
    assert read(path)[0]["general.architecture"] == "gpt2"
    assert ".gguf" in sample_here(f"checkpoint={run}", f"export={tmp_path / 'model.ggml'}").error


# llama.cpp itself


@pytest.fixture
def llama(exported):
    llama_cpp = pytest.importorskip("llama_cpp")
    return exported[0], llama_cpp.Llama(
        str(exported[1]),
        n_ctx=128,
        logits_all=True,
        verbose=False,
        **dict.fromkeys(("type_k", "type_v"), llama_cpp.GGML_TYPE_F32),  # its default is float16
    )


def test_llama_cpp_gives_the_same_ids(llama):
    gpt, model = llama
    for name, text in TEXTS.items():
        if text and len(text) < 4096:
            assert model.tokenize(text.encode(), add_bos=False, special=False) == list(encode(gpt.tokenizer, text)), (
                name
            )


def test_llama_cpp_gives_the_same_bytes(encodings, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    checkpoint("gpt2", encodings["byte"]).export_gguf(tmp_path / "m.gguf")
    model = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=128, verbose=False)
    for name, text in TEXTS.items():
        if text:
            assert model.tokenize(text.encode(), add_bos=False, special=False) == list(text.encode()), name


def test_llama_cpp_gives_the_same_greedy_tokens_and_logits(llama):
    gpt, model = llama
    prompt = encode(gpt.tokenizer, "To be, or not").tolist()
    ours = list(generate(gpt.network, prompt, SamplingConfig(max_new_tokens=100, temperature=0)))
    theirs = []
    for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
        theirs.append(token)
        if len(theirs) == 100:
            break
    assert theirs == ours
    model.reset()
    model.eval(prompt)
    with torch.no_grad():
        logits = gpt.network(torch.tensor([prompt]))[0]
    assert_close(
        torch.from_numpy(np.array(model.scores[: len(prompt)])), logits, atol=4e-3, rtol=1e-3
    )  # its GELU is a table
