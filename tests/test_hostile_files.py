"""No file given to train.py or sample.py runs code, fills the memory, or writes where it should not.

Each file here tries. Were it followed, there would be a canary; it must be refused in one line, or do nothing.
"""

import builtins
import json
import os
import pickle
import resource
import struct
import zipfile
from collections import OrderedDict
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import context_seen
from checkpoint.checkpoint import NETWORK_PREFIX, gpt_entry, load_checkpoint
from checkpoint.pickle_scan import refuse_unsafe
from data.config import DataConfig, TokenizerConfig
from data.tokenizer import build_tokenizer
from model.config import GPTConfig
from model.gpt import GPT
from training.datamodule import TextData

HUGE = 10**12


@pytest.fixture
def canary(tmp_path):
    """The file that any code in a hostile file would make."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "the file ran code"


class Calls:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


class Data:
    """Pickles as torch.save pickles a tensor's data: `count` numbers in the entry `key`."""

    def __init__(self, count, key="0", storage=torch.FloatStorage):
        self.pid = "storage", storage, key, "cpu", count


class _Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return getattr(value, "pid", None)


def tensor(data, shape=(2,), strides=(1,), offset=0):
    return Calls(torch._utils._rebuild_tensor_v2, data, offset, shape, strides, False, OrderedDict())


def pickled(value) -> bytes:
    file = BytesIO()
    _Pickler(file, 2).dump(value)
    return file.getvalue()


def archive(path: Path, content: bytes, more: dict[str, bytes] | None = None, packed=zipfile.ZIP_STORED) -> Path:
    """A zip as torch.save writes them."""
    with zipfile.ZipFile(path, "w", packed) as file:
        entries = {"data.pkl": content, "byteorder": b"little", "version": b"3\n", "data/0": bytes(8)} | (more or {})
        for name, data in entries.items():
            file.writestr(name if name.startswith(("/", "..")) else f"archive/{name}", data)
    return path


@pytest.fixture(scope="module")
def good() -> dict:
    """What a checkpoint holds."""
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"), None, Path())
    config = GPTConfig(vocab_size=256, context_length=16, num_layers=1, num_heads=2, d_model=32)
    weights = {NETWORK_PREFIX + name: weight for name, weight in GPT(config).state_dict().items()}
    entry = gpt_entry(config, tokenizer, 0, {"nats_per_token": 5.5, "bits_per_byte": 8.0})
    return {"gpt": entry, "state_dict": weights}


# Checkpoints


def payloads(canary: Path) -> dict:
    """Values whose pickle runs code, or makes PyTorch read or write where it should not."""
    touch = f"open({str(canary)!r}, 'w').close()"
    inner = pickle.dumps(Calls(builtins.exec, touch))
    overwritten = tensor(Data(2))
    return {
        "os.system": Calls(os.system, f"touch {canary}"),
        "eval": Calls(builtins.eval, f"open({str(canary)!r}, 'w')"),
        "exec": Calls(builtins.exec, touch),
        "getattr": Calls(builtins.getattr, "", "join"),
        "pickle in pickle": Calls(pickle.loads, inner),
        "torch's own unpickling": Calls(torch.storage._load_from_bytes, inner),
        "torch.load": Calls(torch.load, str(canary)),
        "tensor of a type that calls": Calls(
            torch._tensor._rebuild_from_type_v2, exec, Calls(type, touch), (touch,), None
        ),
        "more numbers than there are": tensor(Data(HUGE)),
        "a shape of 10^12": tensor(Data(2), (HUGE,), (0,)),
        "a shape beyond its data": tensor(Data(2), (2,), (10**6,)),
        "an offset beyond its data": tensor(Data(2), offset=10**6),
        "a negative offset": tensor(Data(2), offset=-(10**6)),
        "a negative count": tensor(Data(-1)),
        "data that is not there": tensor(Data(2, "../1")),
        "data of another kind": tensor(Data(2, storage=torch.storage.UntypedStorage)),
        "a number as data": tensor(5),
        "a tensor that is changed": Changed(overwritten),
    }


class Changed:
    """Pickles as a tensor into which the pickle then writes."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return (*self.value.__reduce__(), (None, 0, (2,), (1,)))


@pytest.mark.parametrize("name", payloads(Path()))
def test_pickle_that_does_more_than_plain_values_is_refused(refuse, canary, tmp_path, good, name):
    value = payloads(canary)[name]
    path = archive(tmp_path / "bad.ckpt", pickled({"gpt": good["gpt"], "state_dict": {}, "extra": value}))
    error = refuse("sample", f"checkpoint={path}")
    assert "bad.ckpt is no checkpoint written by train.py" in error and ("asks for" in error or "tensor" in error)


def test_plain_values_in_the_same_archive_are_let_through(tmp_path, good):
    path = archive(tmp_path / "good.ckpt", pickled({"gpt": good["gpt"], "extra": tensor(Data(2))}))
    refuse_unsafe(path, BytesIO(path.read_bytes()))


@pytest.mark.parametrize("name", ["os.system", "exec", "pickle in pickle"])
def test_the_same_without_a_zip_is_refused_and_would_have_run(refuse, tmp_path, name):
    canary, path = tmp_path / "canary", tmp_path / "bad.ckpt"
    path.write_bytes(pickled(payloads(canary)[name]))
    assert "is no checkpoint" in refuse("sample", f"checkpoint={path}")
    assert not canary.exists()
    pickle.loads(path.read_bytes())  # what the tests above look for does happen where nobody looks first
    assert canary.exists()


def test_real_process_runs_nothing(call, canary, tmp_path):
    path = archive(tmp_path / "bad.ckpt", pickled({"gpt": Calls(os.system, f"touch {canary}")}))
    error = call("sample.py", f"checkpoint={path}", cwd=tmp_path).error
    assert "asks for 'posix.system'" in error or "asks for 'nt.system'" in error


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02r\xff\xff\xff\x7f.",  # a place in the memo that would reserve 16 GB
        b"\x80\x02" + b"(" * 100_000 + b".",
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",  # a list in a list in a list ...
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a frame of 2^63 bytes
        b"\x80\x02\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # as many bytes
        b"cos\nsystem\n.",
        b"S'text'\n.",
        b"",
    ],
)
def test_pickle_of_other_instructions_is_refused_at_once(refuse, tmp_path, content):
    path = archive(tmp_path / "bad.ckpt", content)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "is no checkpoint" in refuse("sample", f"checkpoint={path}")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 100_000


@pytest.mark.parametrize(
    "name", ["../../canary", "/tmp/canary", "archive/../canary", "archive/code/model.py", "archive"]
)
def test_archive_with_other_entries_is_refused(refuse, canary, tmp_path, name):
    path = tmp_path / "bad.ckpt"
    torch.save({"gpt": 1}, path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(name.replace("{here}", str(tmp_path)), b"canary")
    assert "it holds" in refuse("sample", f"checkpoint={path}")
    assert not (tmp_path.parent / "canary").exists()


def test_archive_in_an_archive_is_refused(refuse, canary, tmp_path):
    inner = archive(tmp_path / "inner", pickled(Calls(os.system, f"touch {canary}"))).read_bytes()
    assert "is no checkpoint" in refuse("sample", f"checkpoint={archive(tmp_path / 'bad.ckpt', inner)}")


def test_archive_that_unpacks_to_much_more_is_refused_without_unpacking(refuse, tmp_path):
    path = archive(tmp_path / "bad.ckpt", pickled({}), {"data/0": bytes(300_000_000)}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1_000_000
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "packed" in refuse("sample", f"checkpoint={path}")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 50_000


def test_archive_that_two_readers_would_read_differently_is_refused(refuse, tmp_path, good):
    path = tmp_path / "bad.ckpt"
    torch.save(good, path)
    content = path.read_bytes()
    for changed in (b"before" + content, content + content[-22:], content + b"after", content[:-2] + b"\x05\x00after"):
        path.write_bytes(changed)
        assert "is no checkpoint" in refuse("sample", f"checkpoint={path}")


def test_archive_whose_entry_occurs_twice_is_refused(refuse, tmp_path):
    path = archive(tmp_path / "bad.ckpt", pickled({}))
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("archive/data.pkl", pickled({"gpt": 1}))
    assert "twice" in refuse("sample", f"checkpoint={path}")


def test_what_a_run_writes_is_let_through(tiny_run):
    for name in ("best.ckpt", "last.ckpt"):
        assert load_checkpoint(tiny_run.path / "checkpoints" / name).step > 0


def test_every_flipped_bit_is_noticed(tmp_path, good):
    path = tmp_path / "good.ckpt"
    torch.save(good, path)
    before = load_checkpoint(path).network.state_dict()
    content = bytearray(path.read_bytes())
    for place in np.random.default_rng(0).integers(len(content), size=60):
        content[place] ^= 16
        path.write_bytes(content)
        try:
            after = load_checkpoint(path).network.state_dict()
        except Exception as error:  # noqa: BLE001 -- which it is, is what is asked
            assert type(error).__name__ == "UserError", error
        else:  # padding between the entries: nobody reads it
            assert all(torch.equal(before[name], after[name]) for name in before)
        content[place] ^= 16


# Values in a checkpoint that is well formed


def changes(canary: Path) -> dict[str, dict]:
    """Entries of `gpt` that ask for something."""
    call = {"_target_": "os.system", "command": f"touch {canary}", "_args_": [f"touch {canary}"]}
    return {
        "a _target_ among the hyperparameters": {"model": call},
        "a _target_ for the tokenizer": {"tokenizer": call},
        "a _target_ for the figures": {"validation": call},
        "a resolver": {"model": {"vocab_size": "${oc.env:HOME}"}},
        "a resolver as a switch": {"model": {"vocab_size": 256, "bias": "${oc.env:HOME}"}},
        "a network of 10^12 weights": {"model": {"vocab_size": HUGE}},
        "10^9 layers": {"model": {"vocab_size": 256, "num_layers": 10**9}},
        "a context of 10^7": {"model": {"vocab_size": 256, "context_length": 10**7, "positions": "rope"}},
        "a width of 10^7": {"model": {"vocab_size": 256, "d_model": 10**7, "num_heads": 1}},
        "a text as a number": {"model": {"vocab_size": "256"}},
        "a step that moves the cursor": {"step": "\x1b[2J"},
        "nothing": {"model": None},
    }


@pytest.mark.parametrize("name", changes(Path()))
def test_value_that_asks_for_something_is_only_a_value(refuse, canary, tmp_path, good, name, monkeypatch):
    def built(config):  # a network of any other size might take hours, or all memory
        return GPT(config) if config == GPTConfig(**good["gpt"]["model"]) else pytest.fail(f"is built: {config}")

    monkeypatch.setattr("checkpoint.checkpoint.GPT", built)
    torch.save(good | {"gpt": good["gpt"] | changes(canary)[name]}, tmp_path / "bad.ckpt")
    assert refuse("sample", f"checkpoint={tmp_path / 'bad.ckpt'}").count("does not fit") == 1  # said once


TOKENIZERS = {
    "an id of 2^31": {"special_tokens": [["<|end|>", (1 << 31) - 1]]},
    "a name that moves the cursor": {"name": "\x1b[2Jbyte"},
    "merges that are no text": {"merges": {"_target_": "os.system"}},
    "a pattern that is none": {"pattern": "("},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_hostile_tokenizer_is_refused(refuse, tmp_path, good, name):
    entry = good["gpt"] | {"tokenizer": good["gpt"]["tokenizer"] | TOKENIZERS[name]}
    torch.save(good | {"gpt": entry}, tmp_path / "bad.ckpt")
    error = refuse("sample", f"checkpoint={tmp_path / 'bad.ckpt'}")
    assert "does not fit" in error and "\x1b" not in error


def test_pattern_that_searches_for_ever_is_given_up(sample_here, tmp_path, good):
    endless = good["gpt"]["tokenizer"] | {"pattern": r"(?=(a+))\1*b|(x+x+)+y(?<!z)"}
    torch.save(good | {"gpt": good["gpt"] | {"tokenizer": endless}}, tmp_path / "bad.ckpt")
    finished = sample_here(f"checkpoint={tmp_path / 'bad.ckpt'}", "prompt=" + "x" * 4000)
    assert finished.returncode == 2 and "gives up on this text" in finished.stderr.splitlines()[-1]


def test_other_entries_of_a_checkpoint_are_never_looked_at(sample_here, canary, tmp_path, good):
    call = {"_target_": "os.system", "command": f"touch {canary}"}
    extra = {
        "hyper_parameters": call,
        "hparams_name": "os.system",
        "datamodule_hparams_by_path": call,
        "callbacks": call,
    }
    torch.save(good | extra, tmp_path / "odd.ckpt")
    assert sample_here(f"checkpoint={tmp_path / 'odd.ckpt'}", "max_new_tokens=2").returncode == 0


# Safetensors


def test_exported_network_writes_the_same_from_the_one_file_alone(sample_here, call, tmp_path, tiny_run):
    file = tmp_path / "weights=1.safetensors"
    assert sample_here(f"checkpoint={tiny_run.path}", f"export={file}").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    asked = ("prompt=The king", "max_new_tokens=20", "seed=3")
    fresh = call("sample.py", f"checkpoint={file}", *asked)
    assert fresh.stdout == sample_here(f"checkpoint={tiny_run.path}", *asked).stdout != ""
    assert fresh.stderr.partition(":")[2] == sample_here(f"checkpoint={tiny_run.path}", *asked).stderr.partition(":")[2]


def test_context_seen_measures_an_export_as_it_does_the_run(tmp_path, tiny_run, monkeypatch, capsys):
    file = tmp_path / "weights.safetensors"
    load_checkpoint(tiny_run.path / "checkpoints" / "best.ckpt").export(file)
    monkeypatch.setattr(context_seen, "CHARACTERS", 400)
    measured = []
    for checkpoint in (tiny_run.path, file):
        monkeypatch.setattr("sys.argv", ["context_seen", str(checkpoint)])
        context_seen.main()
        measured.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert measured[0] == measured[1] and measured[0]["tokens"] > 100


def test_export_of_another_version_is_named(refuse, tmp_path, tiny_run, monkeypatch):
    file, checkpoint = tmp_path / "later.safetensors", load_checkpoint(tiny_run.path / "checkpoints" / "best.ckpt")
    with monkeypatch.context() as later_version:
        later_version.setattr("checkpoint.checkpoint.FORMAT", 7)
        checkpoint.export(file)
    error = refuse("sample", f"checkpoint={file}")
    assert "has format 7" in error and "reads format 1" in error


def headers(canary: Path) -> dict[str, bytes]:
    """Starts of a safetensors file: its length, its JSON."""
    call = json.dumps({"_target_": "os.system", "command": f"touch {canary}"})
    entries = {"model": call, "tokenizer": call, "step": "0", "validation": call, "format": "1"}

    def header(described) -> bytes:
        text = json.dumps(described).encode()
        return struct.pack("<Q", len(text)) + text + bytes(8)

    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    return {
        "no JSON": struct.pack("<Q", 8) + b"not json" + bytes(8),
        "a header of 2^63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
        "a header longer than the file": struct.pack("<Q", 10**6) + b"{}",
        "10^12 numbers": header({"w": one | {"shape": [HUGE]}, "__metadata__": entries}),
        "data beyond the file": header({"w": one | {"shape": [HUGE], "data_offsets": [0, 4 * HUGE]}}),
        "tensors that overlap": header({"a": one, "b": one, "__metadata__": entries}),
        "an unknown type": header({"w": one | {"dtype": "PICKLE"}, "__metadata__": entries}),
        "no metadata": header({"w": one}),
        "metadata that is no JSON": header({"w": one, "__metadata__": entries | {"model": "os.system"}}),
        "metadata that names a target": header({"w": one, "__metadata__": entries}),
        "a list in a list in a list": header({"w": one, "__metadata__": entries | {"step": "[" * 100_000}}),
        "a pickle": pickle.dumps(Calls(os.system, f"touch {canary}")),
    }


@pytest.mark.parametrize("name", headers(Path()))
def test_hostile_safetensors_are_refused(refuse, canary, tmp_path, name):
    (tmp_path / "bad.safetensors").write_bytes(headers(canary)[name])
    error = refuse("sample", f"checkpoint={tmp_path / 'bad.safetensors'}")
    assert "bad.safetensors is no export" in error or "bad.safetensors does not fit" in error


# Caches


def hostile_caches(canary: Path) -> dict[str, bytes]:
    """Files of the cache that would run code, or take all memory, were they read as what they claim to be."""
    call = Calls(os.system, f"touch {canary}")
    objects, several = BytesIO(), BytesIO()
    np.save(objects, np.array([call], dtype=object), allow_pickle=True)
    np.savez(several, tokens=np.arange(5))
    huge = b"\x93NUMPY\x01\x00v\x00{'descr': '<u2', 'fortran_order': False, 'shape': (" + str(HUGE).encode() + b",), }"
    return {
        "an array of objects": objects.getvalue(),
        "several arrays": several.getvalue(),
        "a pickle": pickle.dumps(call),
        "an array of 10^12": huge.ljust(127) + b"\n" + bytes(100),
        "an expression": huge.replace(b"False", b"exec('')").ljust(128),
        "an archive": archive(canary.with_name("a_zip"), pickled(call)).read_bytes(),
    }


CACHES = ("an array of objects", "several arrays", "a pickle", "an array of 10^12", "an expression", "an archive")


@pytest.mark.parametrize("name", CACHES)
def test_hostile_cache_is_named_and_made_again(canary, tmp_path, text_file, caplog, name):
    caplog.set_level("INFO")

    def tokens() -> list[list[int]]:
        config = DataConfig(corpus=str(text_file), cache_dir=str(tmp_path / "cache"))
        data = TextData(config, TokenizerConfig(vocab_size=300), 16, 0)
        data.prepare()
        return [data.train_tokens.tolist(), data.val_tokens.tolist()]

    before = tokens()
    cached = sorted((tmp_path / "cache").iterdir())
    for path in cached:
        path.write_bytes(hostile_caches(canary)[name])
    assert tokens() == before
    assert [path for path in cached if f"{path} is damaged" not in caplog.text] == [] and len(cached) == 3
