"""A Hugging Face directory from a stranger runs nothing, fills no memory, and reads no file but its own.

Each directory here is rejected in one line.
"""

import json
import os
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.checkpoint import Checkpoint, load_checkpoint
from checkpoint.hugging_face import directory
from data.config import TokenizerConfig
from data.tokenizer import build_tokenizer
from model.config import GPTConfig
from model.gpt import GPT
from system.errors import UserError

FAMILIES = {
    "gpt2": {},
    "llama": {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "tied_embeddings": False},
}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, Path]:
    """Directories as they should be, by model_type."""
    tokenizer, root = build_tokenizer(TokenizerConfig(kind="byte"), None, Path()), tmp_path_factory.mktemp("good")
    for name, fields in FAMILIES.items():
        config = GPTConfig(vocab_size=256, context_length=16, num_layers=1, num_heads=2, d_model=32, **fields)
        checkpoint = Checkpoint(root, GPT(config), tokenizer, 0, {"nats_per_token": 1.0, "bits_per_byte": 1.0})
        checkpoint.export_directory(root / name, {}, {})
    return {name: root / name for name in FAMILIES}


@pytest.fixture
def path(good, tmp_path) -> Path:
    """A copy of the directory of a GPT-2."""
    return Path(shutil.copytree(good["gpt2"], tmp_path / "model"))


@pytest.fixture
def llama(good, tmp_path) -> Path:
    return Path(shutil.copytree(good["llama"], tmp_path / "model"))


@pytest.fixture
def reject(sample_here) -> Callable[[Path], str]:
    """reject(path) is the one line with which sample.py rejects it. It takes little memory."""

    def rejected(path: Path) -> str:
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        finished = sample_here(f"checkpoint={path}", "prompt=To be", "max_new_tokens=2", "device=cpu")
        assert finished.stdout == ""
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 100_000
        assert len(finished.error) < 800
        return finished.error

    return rejected


def edit(path: Path, name: str, change: Callable[[dict], None]) -> Path:
    """Changes the content of a JSON file."""
    content = json.loads((path / name).read_text(encoding="utf-8"))
    change(content)
    (path / name).write_text(json.dumps(content), encoding="utf-8")
    return path


def write_tensors(path: Path, header: dict, data: bytes) -> None:
    """A safetensors file with any header."""
    head = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)


def test_unchanged_directories_load(good):
    for path in good.values():
        assert load_checkpoint(path).network.config.vocab_size == 256


# config.json


@pytest.mark.parametrize(
    "entries, words",
    [
        ({"n_layer": 1_000_000, "n_embd": 1_000_000, "n_head": 1}, "weights"),  # 10^19
        ({"n_embd": 1_000_000, "n_head": 1, "n_inner": None}, "weights"),  # 10^13
        ({"n_positions": 16_000_000}, "weights"),
        ({"n_layer": 16_000_000}, "weights"),
        ({"n_layer": -1}, "n_layer"),
        ({"n_embd": 0}, "n_embd"),
        ({"n_embd": 10**30}, "n_embd"),
        ({"n_head": True}, "n_head"),
        ({"n_embd": "32"}, "n_embd"),
        ({"n_positions": 16.0}, "n_positions"),
        ({"vocab_size": [256]}, "vocab_size"),
        ({"n_inner": {}}, "n_inner"),
        ({"n_head": 3}, "divisible"),
        ({"layer_norm_epsilon": -1e-5}, "layer_norm_epsilon"),
        ({"layer_norm_epsilon": "x"}, "layer_norm_epsilon"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"activation_function": "relu"}, "activation_function"),
        ({"activation_function": ["gelu_new"]}, "activation_function"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"model_type": "bert"}, "model_type"),
        ({"model_type": ["gpt2"]}, "model_type"),
        ({"model_type": "x" * 100_000}, "model_type"),
        ({"model_type": None}, "model_type"),
    ],
    ids=str,
)
def test_config_with_other_values_is_rejected(path, reject, entries, words):
    assert words in reject(edit(path, "config.json", lambda config: config.update(entries)))


@pytest.mark.parametrize(
    "entries, words",
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE is scaled"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}, "RoPE is scaled"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"head_dim": 1000}, "head_dim"),
        ({"max_position_embeddings": 16_000_000}, "weights"),  # tables of RoPE, that no file has
        ({"intermediate_size": 10**7}, "weights"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"model_type": "mistral", "sliding_window": -4}, "sliding_window"),
        ({"model_type": "ministral", "sliding_window": 4, "layer_types": ["chunked"]}, "layer_types"),
        ({"model_type": "ministral", "sliding_window": 4, "layer_types": "full_attention"}, "layer_types"),
    ],
    ids=str,
)
def test_llama_of_another_kind_is_rejected(llama, reject, entries, words):
    assert words in reject(edit(llama, "config.json", lambda config: config.update(entries)))


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "config.json"),
        (b"[]", "config.json"),
        (b"null", "config.json"),
        (b'{"model_type": "gpt2"', "cannot be used"),
        (b"\xff\xfe\x00", "cannot be used"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "cannot be used"),
        (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "cannot be used"),
        (b'{"model_type": "gpt2", "model_type": "llama"}', "duplicate"),
        (b'{"model_type": "gpt2", "n_embd": ' + b"1" * 100_000 + b"}", "cannot be used"),
        (b'{"model_type": "gpt2"}' + b" " * (2 << 20), "1 MB"),
    ],
    ids=lambda value: repr(value[:30]),
)
def test_damaged_config_is_rejected(path, reject, content, words):
    (path / "config.json").write_bytes(content)
    assert words in reject(path)


def test_auto_map_runs_nothing(path, tmp_path, reject, sample_here):
    canary = tmp_path / "canary"
    (path / "modeling_x.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    (path / "__init__.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.M", "AutoTokenizer": "modeling_x.T"}
    edit(path, "config.json", lambda config: config.update(auto_map=auto_map))
    assert sample_here(f"checkpoint={path}", "prompt=a", "max_new_tokens=1").returncode == 0
    assert "model_type" in reject(edit(path, "config.json", lambda config: config.update(model_type="x")))
    assert not canary.exists()


def test_pickled_weights_are_never_read(path, tmp_path, reject):
    (path / "model.safetensors").unlink()
    canary = tmp_path / "canary"
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR.")
    assert "never read" in reject(path)
    assert not canary.exists()


# model.safetensors


def change_tensors(path: Path, change: Callable[[dict], None]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


NAME = "transformer.h.0.ln_1.weight"


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda tensors: tensors.pop(NAME), "ln_1.weight"),
        (lambda tensors: tensors.pop("transformer.wte.weight"), "weights"),
        (lambda tensors: tensors.clear(), "weights"),
        (lambda tensors: tensors.update({"transformer.h.1.ln_1.weight": torch.ones(32)}), "too many"),
        (lambda tensors: tensors.update({"evil\x1b[31m": torch.ones(1)}), "too many"),
        (lambda tensors: tensors.update({"x" * 5000: torch.ones(1)}), "too many"),
        (lambda tensors: tensors.update({NAME: torch.ones(31)}), "cannot be used|fit"),
        (lambda tensors: tensors.update({NAME: torch.ones(32, 1)}), "cannot be used|fit"),
        (lambda tensors: tensors.update({NAME: torch.ones(0)}), "cannot be used|fit"),
        (lambda tensors: tensors.update({NAME: torch.ones(32, dtype=torch.int64)}), "int64"),
        (lambda tensors: tensors.update({NAME: torch.ones(32, dtype=torch.bool)}), "bool"),
        (lambda tensors: tensors.update({NAME: torch.ones(32, dtype=torch.float64)}), "float64"),
        (lambda tensors: tensors.update({NAME: torch.ones(32).to(torch.float8_e4m3fn)}), "float8"),
        (lambda tensors: tensors.update({NAME: torch.full((32,), torch.nan)}), "finite"),
        (lambda tensors: tensors.update({NAME: torch.full((32,), torch.inf)}), "finite"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(256, 32)}), "ties them"),
        (lambda tensors: tensors.update({"wpe.weight": torch.zeros(16, 32)}), "twice"),  # and with the prefix
    ],
)
def test_weights_that_are_not_the_networks_are_rejected(path, reject, change, words):
    line = reject(change_tensors(path, change))
    assert any(word in line for word in words.split("|")), line
    assert "\x1b" not in line


@pytest.mark.parametrize("num_bytes", [0, 7, 100, -1])
def test_truncated_weights_are_rejected(path, reject, num_bytes):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert "cannot be used" in reject(path)


@pytest.mark.parametrize(
    "header",
    [
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        },
        {"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}},
        {"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 8]}},
    ],
    ids=str,
)
def test_tensors_that_overlap_or_lie_outside_are_rejected(path, reject, header):
    write_tensors(path, header, bytes(12))
    assert "cannot be used" in reject(path)


def test_header_that_claims_to_be_huge_is_rejected(path, reject):
    (path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert "cannot be used" in reject(path)


def test_tensor_twice_in_a_header_is_rejected(path, reject):
    entry = b'"a":{"dtype":"F32","shape":[2],"data_offsets":[%d,%d]}'
    head = b"{" + entry % (0, 8) + b"," + entry % (8, 16) + b"}"
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(16))
    assert "cannot be used" in reject(path)


def test_half_precision_is_read_as_float32_and_said(path, sample_here, caplog):
    change_tensors(path, lambda tensors: tensors.update({name: tensor.half() for name, tensor in tensors.items()}))
    with caplog.at_level("INFO"):
        network = load_checkpoint(path).network
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    assert "float16" in caplog.text


# The index


def split_weights(path: Path) -> dict:
    """Two files of weights and an index, of which this is the content."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for file, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    return {"metadata": {}, "weight_map": weight_map}


def write_index(path: Path, content: object) -> Path:
    (path / "model.safetensors.index.json").write_text(json.dumps(content))
    return path


def test_several_files_of_weights_are_read(path, good):
    write_index(path, split_weights(path))
    ours, theirs = (load_checkpoint(where).network.state_dict() for where in (path, good["gpt2"]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "../a.safetensors", "/tmp/a.safetensors", "", "a.bin", ".."]
)
def test_index_names_no_file_elsewhere(path, reject, name):
    index = split_weights(path)
    index["weight_map"][NAME] = name
    assert "names a file" in reject(write_index(path, index))


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 1}}], ids=str)
def test_damaged_index_is_rejected(path, reject, content):
    split_weights(path)
    assert "cannot be used" in reject(write_index(path, content))


def test_index_of_too_many_files_is_rejected(path, reject):
    split_weights(path)
    names = {str(number): f"{number}.safetensors" for number in range(5000)}
    assert "weight files" in reject(write_index(path, {"weight_map": names}))


def test_weight_in_two_files_is_rejected(path, reject):
    index = split_weights(path)
    shutil.copy(path / "a.safetensors", path / "c.safetensors")
    index["weight_map"]["more"] = "c.safetensors"
    assert "twice" in reject(write_index(path, index))


# Links


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_link_out_of_the_directory_is_rejected(path, tmp_path, reject, name):
    (path / name).rename(tmp_path / name)
    (path / name).symlink_to(tmp_path / name)
    assert "link out of the directory" in reject(path)


def test_link_beside_a_fake_snapshot_is_rejected(path, tmp_path, reject):
    """Only blobs/ of the same model of huggingface_hub's cache may be linked."""
    fake = tmp_path / "models--x" / "snapshots" / "1"
    fake.parent.mkdir(parents=True)
    path.rename(fake)
    (fake / "config.json").rename(tmp_path / "config.json")
    (fake / "config.json").symlink_to(tmp_path / "config.json")
    assert "link out of the directory" in reject(fake)


def test_links_of_the_cache_of_huggingface_hub_are_followed(path, tmp_path):
    snapshot = tmp_path / "models--x" / "snapshots" / "1"
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in path.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(blobs / file.name)
    assert load_checkpoint(snapshot).network.config.vocab_size == 256


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_pipe_and_directory_in_place_of_a_file_are_rejected(path, reject, name):
    (path / name).unlink()
    os.mkfifo(path / name)  # to open it would wait forever
    assert "not a plain file" in reject(path)
    (path / name).unlink()
    (path / name).mkdir()
    assert "not a plain file" in reject(path)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(path, reject, name):
    (path / name).unlink()
    assert f"has no {name}" in reject(path)


# tokenizer.json


def bpe(change: Callable[[dict], None]) -> Callable[[dict], None]:
    return lambda content: change(content["model"])


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda content: content.update(normalizer={"type": "NFC"}), "normalizer"),
        (lambda content: content.update(model=[]), "model"),
        (lambda content: content.pop("model"), "model"),
        (lambda content: content.update(pre_tokenizer=None), "pre_tokenizer"),
        (lambda content: content.update(pre_tokenizer={"type": "Metaspace"}), "Metaspace"),
        (lambda content: content.update(pre_tokenizer={"type": "Sequence"}), "pretokenizers"),
        (lambda content: content.update(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True}), "space"),
        (lambda content: content.update(pre_tokenizer=split_by("(")), "tokenizer"),
        (lambda content: content.update(pre_tokenizer=split_by("a" * 20_000)), "pattern"),
        (lambda content: content.update(added_tokens=[{"content": "a", "id": -1}]), "added_tokens"),
        (lambda content: content.update(added_tokens=[{"content": "<s>", "id": 1 << 40}]), "added_tokens"),
        (lambda content: content.update(added_tokens=[{"content": "<s>", "id": 999}]), "1,000 tokens"),
        (lambda content: content.update(added_tokens=[{"content": "<s>", "id": 5}]), "shares its id"),
        (lambda content: content.update(added_tokens=[{"content": "xy", "id": 5, "special": False}]), "not special"),
        (bpe(lambda model: model.update(type="Unigram")), "Unigram"),
        (bpe(lambda model: model.update(type="WordPiece")), "WordPiece"),
        (bpe(lambda model: model.update(byte_fallback=True)), "byte-level"),
        (bpe(lambda model: model.update(vocab=[])), "vocab"),
        (bpe(lambda model: model.update(vocab={})), "tokenizer"),
        (bpe(lambda model: model["vocab"].update(a=-1)), "vocab"),
        (bpe(lambda model: model["vocab"].update(a="1")), "vocab"),
        (bpe(lambda model: model["vocab"].update(ab=256)), "257 tokens"),
        (bpe(lambda model: model["vocab"].update(ab=10**6)), "tokens"),
        (bpe(lambda model: model["vocab"].update(a=model["vocab"]["b"])), "twice"),
        (bpe(lambda model: model["vocab"].pop("a")), "byte"),
        (bpe(lambda model: model["vocab"].update({"▁the": 97})), "stands for no byte"),
        (bpe(lambda model: model.update(merges=["x y"])), "is no token"),
        (bpe(lambda model: model.update(merges=[1])), "merge"),
        (bpe(lambda model: model.update(merges=[[]])), "merge"),
        (bpe(lambda model: model.update(merges=[["a"]])), "merge"),
        (bpe(lambda model: model.update(merges=[["a", "b", "c"]])), "merge"),
        (bpe(lambda model: model.update(merges=[{"a": "b"}])), "merge"),
        (bpe(lambda model: model.update(merges="a b")), "merges"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tokenizer_that_is_not_ours_is_rejected(path, reject, change, words):
    assert words in reject(edit(path, "tokenizer.json", change))


def split_by(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def test_merges_in_another_order_than_ids_are_rejected(path, reject):
    def change(content):
        content["model"]["vocab"] |= {"ab": 256, "cd": 257}
        content["model"]["merges"] = ["c d", "a b"]

    edit(path, "config.json", lambda config: config.update(vocab_size=258))
    change_tensors(path, lambda tensors: tensors.update({"transformer.wte.weight": torch.zeros(258, 32)}))
    assert "another order" in reject(edit(path, "tokenizer.json", change))


def test_tokenizer_of_millions_of_merges_is_rejected_by_its_size(path, reject):
    with open(path / "tokenizer.json", "wb") as file:
        file.truncate(10**9)  # sparse
    assert "tokenizer.json has more than 32 MB" in reject(path)


def test_tokenizer_that_would_take_much_more_memory_than_its_file_is_rejected(path, reject):
    (path / "tokenizer.json").write_bytes(b'{"model": {"vocab": {}, "merges": [' + b"[]," * 10**7 + b"[]]}}")
    assert "lists and dictionaries" in reject(path)


def test_deep_tokenizer_is_rejected(path, reject):
    (path / "tokenizer.json").write_bytes(b'{"model": ' + b"[" * 1_000_000)
    assert "cannot be used" in reject(path)


def test_embedding_may_have_more_rows_than_there_are_tokens(path, sample_here):
    edit(path, "config.json", lambda config: config.update(vocab_size=300))
    change_tensors(path, lambda tensors: tensors.update({"transformer.wte.weight": torch.randn(300, 32)}))
    assert load_checkpoint(path).tokenizer.n_vocab == 300
    assert sample_here(f"checkpoint={path}", "prompt=To be", "max_new_tokens=30", "temperature=2").returncode == 0


# By name


def test_model_that_is_not_there_is_named_with_what_to_do(sample_here, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", _offline)
    line = sample_here("checkpoint=hf:openai-community/gpt2", "prompt=a").error
    assert "hf:openai-community/gpt2" in line and all(name in line for name in directory.FILES)


def _offline(*args, **kwargs):
    raise OSError("no network")


def test_every_rejection_is_an_error_of_the_user(path):
    edit(path, "config.json", lambda config: config.update(n_embd="x"))
    with pytest.raises(UserError):
        load_checkpoint(path)
