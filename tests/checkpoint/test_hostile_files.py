"""No file given to train.py or sample.py runs code, fills the memory, or writes where it should not.

Each file here tries. Were it followed, there would be a canary; it must be refused in one line, or do nothing.
"""

import base64
import builtins
import json
import os
import pickle
import random
import resource
import shutil
import struct
import zipfile
from collections import OrderedDict
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from benchmarks import context_seen
from checkpoint.checkpoint import NETWORK_PREFIX, checkpoint_metadata, load_checkpoint
from checkpoint.io import read_checkpoint
from checkpoint.pickle_scan import check_safe
from data.config import DataConfig, TokenizerConfig
from data.tokenizer import build_tokenizer
from model.config import GPTConfig
from model.flops import min_parameters
from model.gpt import GPT
from system.checks import short_repr
from system.errors import UserError
from training.callbacks.checkpoints import BestCheckpoint
from training.callbacks.metrics_logger import MetricsLogger
from training.config import OptimizerConfig
from training.datamodule import TextDataModule
from training.optim import build_optimizer
from training.progress import RunTimer
from training.run_state import check_run_state, restorable_state

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
    entry = checkpoint_metadata(config, tokenizer, 0, {"nats_per_token": 5.5, "bits_per_byte": 8.0})
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
    assert "bad.ckpt is damaged, or not a checkpoint written by train.py" in error
    assert "refers to" in error or "tensor" in error


def test_plain_values_in_the_same_archive_are_let_through(tmp_path, good):
    path = archive(tmp_path / "good.ckpt", pickled({"gpt": good["gpt"], "extra": tensor(Data(2))}))
    check_safe(path, BytesIO(path.read_bytes()))


@pytest.mark.parametrize("name", ["os.system", "exec", "pickle in pickle"])
def test_the_same_without_a_zip_is_refused_and_would_have_run(refuse, tmp_path, name):
    canary, path = tmp_path / "canary", tmp_path / "bad.ckpt"
    path.write_bytes(pickled(payloads(canary)[name]))
    assert "is damaged, or not a checkpoint" in refuse("sample", f"checkpoint={path}")
    assert not canary.exists()
    pickle.loads(path.read_bytes())  # what the tests above look for does happen where nobody looks first
    assert canary.exists()


def test_real_process_runs_nothing(call, canary, tmp_path):
    path = archive(tmp_path / "bad.ckpt", pickled({"gpt": Calls(os.system, f"touch {canary}")}))
    error = call("sample.py", f"checkpoint={path}", cwd=tmp_path).error
    assert "refers to 'posix.system'" in error or "refers to 'nt.system'" in error


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
    assert "is damaged, or not a checkpoint" in refuse("sample", f"checkpoint={path}")
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
    assert "is damaged, or not a checkpoint" in refuse("sample", f"checkpoint={archive(tmp_path / 'bad.ckpt', inner)}")


def test_archive_that_unpacks_to_much_more_is_refused_without_unpacking(refuse, tmp_path):
    path = archive(tmp_path / "bad.ckpt", pickled({}), {"data/0": bytes(300_000_000)}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1_000_000
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "compressed" in refuse("sample", f"checkpoint={path}")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 50_000


def test_archive_that_two_readers_would_read_differently_is_refused(refuse, tmp_path, good):
    path = tmp_path / "bad.ckpt"
    torch.save(good, path)
    content = path.read_bytes()
    for changed in (b"before" + content, content + content[-22:], content + b"after", content[:-2] + b"\x05\x00after"):
        path.write_bytes(changed)
        assert "is damaged, or not a checkpoint" in refuse("sample", f"checkpoint={path}")


def test_archive_whose_entry_occurs_twice_is_refused(refuse, tmp_path):
    path = archive(tmp_path / "bad.ckpt", pickled({}))
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("archive/data.pkl", pickled({"gpt": 1}))
    assert "duplicate" in refuse("sample", f"checkpoint={path}")


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
    "a pattern of a million characters": {"pattern": "a" * 10**6},
    "a token of a million bytes": {"merges": base64.b64encode(bytes(10**6)).decode() + " 256\n"},
    "a token of no bytes": {"merges": " 256\n"},
    "an id that is a text": {"special_tokens": [["<|end|>", "256"]]},
    "a special token twice": {"special_tokens": [["<|a|>", 256], ["<|b|>", 256]]},
    "special tokens that are a number": {"special_tokens": 5},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_hostile_tokenizer_is_refused(refuse, tmp_path, good, name):
    ours, changed = good["gpt"]["tokenizer"], dict(TOKENIZERS[name])
    if isinstance(changed.get("merges"), str):
        changed["merges"] = ours["merges"] + changed["merges"]
    entry = good["gpt"] | {"tokenizer": ours | changed}
    torch.save(good | {"gpt": entry}, tmp_path / "bad.ckpt")
    error = refuse("sample", f"checkpoint={tmp_path / 'bad.ckpt'}")
    assert "does not fit" in error and "\x1b" not in error


def test_pattern_that_searches_for_ever_is_given_up(sample_here, tmp_path, good):
    endless = good["gpt"]["tokenizer"] | {"pattern": r"(?=(a+))\1*b|(x+x+)+y(?<!z)"}
    torch.save(good | {"gpt": good["gpt"] | {"tokenizer": endless}}, tmp_path / "bad.ckpt")
    finished = sample_here(f"checkpoint={tmp_path / 'bad.ckpt'}", "prompt=" + "x" * 4000)
    assert finished.returncode == 2 and "fails on this text" in finished.stderr.splitlines()[-1]


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


# Small in the file, large in memory


def shared(kind, levels):
    """Ten references to ten references to ...: a few bytes a level, ten times as many values as the level before."""
    value = kind("x" * 10)
    for _ in range(levels):
        value = kind([value] * 10)
    return value


GROWING = {
    "a size": {"model": {"vocab_size": shared(list, 7)}},
    "a choice": {"model": {"vocab_size": 256, "norm": shared(tuple, 7)}},
    "a key that nobody knows": {"model": {"vocab_size": 256, "other": shared(list, 7)}},
    "the format": {"format": shared(list, 7)},
    "the step": {"step": shared(list, 7)},
    "a figure": {"validation": {"nats_per_token": shared(tuple, 7), "bits_per_byte": 1.0}},
    "a tokenizer's name": {"tokenizer": {"name": shared(list, 7)}},
    "a long text a thousand times": {"step": ["x" * 10**6] * 1000},
    "a key that takes for ever to hash": {"model": {shared(tuple, 3): 1}},
}


@pytest.mark.parametrize("name", GROWING)
def test_value_that_is_small_in_the_file_and_large_in_memory_is_refused(refuse, tmp_path, good, name):
    torch.save(good | {"gpt": good["gpt"] | GROWING[name]}, tmp_path / "bad.ckpt")
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = refuse("sample", f"checkpoint={tmp_path / 'bad.ckpt'}")
    assert "bad.ckpt is damaged, or not a checkpoint" in error and len(error) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 100_000


def test_key_of_nested_tuples_is_never_hashed(refuse, tmp_path):
    levels = b"K\x01" + b"".join(b"q\x00" + b"(" + b"h\x00" * 10 + b"t" for _ in range(30))  # each ten of the one below
    assert "is damaged, or not a checkpoint" in refuse(
        "sample", f"checkpoint={archive(tmp_path / 'a.ckpt', b'%c%c}' % (128, 2) + levels + b'Ns.')}"
    )


def test_dictionary_is_never_copied(refuse, tmp_path):
    copied = Calls(OrderedDict, {"a": 1})
    path = archive(tmp_path / "bad.ckpt", pickled({"gpt": {}, "state_dict": {}, "extra": copied}))
    assert "is damaged, or not a checkpoint" in refuse("sample", f"checkpoint={path}")


@pytest.mark.parametrize(
    "shape", [(2,) * 100, tuple(range(10)), (1 << 70,)], ids=["100 dimensions", "10 dimensions", "2^70 rows"]
)
def test_tensor_of_a_shape_that_only_counts_long_is_refused(refuse, tmp_path, shape):
    path = archive(tmp_path / "bad.ckpt", pickled({"extra": tensor(Data(2), shape, shape)}))
    assert "tensor" in refuse("sample", f"checkpoint={path}")


def test_weights_count_once_however_many_names_they_have(refuse, tmp_path, good, monkeypatch):
    monkeypatch.setattr("checkpoint.checkpoint.GPT", lambda config: pytest.fail(f"is built: {config}"))
    needed = min_parameters(GPTConfig(**good["gpt"]["model"]))
    one = torch.zeros(needed // 2)
    torch.save(good | {"state_dict": {NETWORK_PREFIX + name: one for name in "abc"}}, tmp_path / "bad.ckpt")
    assert "does not fit" in refuse("sample", f"checkpoint={tmp_path / 'bad.ckpt'}")


def test_layers_without_tensors_are_not_built(refuse, tmp_path, good, monkeypatch):
    monkeypatch.setattr("checkpoint.checkpoint.GPT", lambda config: pytest.fail(f"is built: {config}"))
    slim = {"d_model": 2, "num_heads": 1, "mlp_hidden": 1, "num_layers": 2000}
    weights = {"network.all": torch.zeros(100_000)}
    entry = good["gpt"] | {"model": good["gpt"]["model"] | slim}
    torch.save({"gpt": entry, "state_dict": weights}, tmp_path / "bad.ckpt")
    assert "2000 layers, but has 1 tensors" in refuse("sample", f"checkpoint={tmp_path / 'bad.ckpt'}")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x" * 10**6, f"'{'x' * 80}'…"),
        (1 << 100_000, "a number of 100,001 bits"),
        ([[1] * 1000] * 1000, "a list of 1000"),
        ({"a": 1}, "a dictionary of 1"),
        (torch.zeros(1000), "a tensor"),
        (None, "None"),
    ],
    ids=["text", "number", "list", "dictionary", "tensor", "nothing"],
)
def test_value_is_shown_in_a_few_characters(value, shown):
    assert short_repr(value) == shown


# Odd, and harmless


class Shadowed:
    """Pickles as a dictionary with numbers in the place of its methods."""

    def __init__(self, items: dict):
        self.content = items

    def __reduce__(self):
        attributes = dict.fromkeys(("items", "keys", "values", "get", "copy"), 5)
        return OrderedDict, (), attributes, None, iter(self.content.items())


def test_names_of_weights_that_are_numbers_are_refused(refuse, tmp_path, good):
    torch.save(good | {"state_dict": {**good["state_dict"], 5: torch.zeros(2)}}, tmp_path / "bad.ckpt")
    assert "is damaged, or not a checkpoint" in refuse("sample", f"checkpoint={tmp_path / 'bad.ckpt'}")


def test_attributes_in_place_of_a_dictionarys_methods_are_left_out(tmp_path, good):
    torch.save(good | {"state_dict": Shadowed(good["state_dict"])}, tmp_path / "odd.ckpt")
    assert type(read_checkpoint(tmp_path / "odd.ckpt")["state_dict"]) is dict
    assert load_checkpoint(tmp_path / "odd.ckpt").step == 0


def test_numbers_of_another_kind_are_refused_as_weights(refuse, tmp_path, good):
    whole = {name: weight.long() for name, weight in good["state_dict"].items()}
    torch.save(good | {"state_dict": whole}, tmp_path / "bad.ckpt")
    assert "torch.int64" in refuse("sample", f"checkpoint={tmp_path / 'bad.ckpt'}")


def test_each_tensor_of_a_file_is_in_one_piece(tmp_path, good):
    overlapping = torch.zeros(100).as_strided((5, 20), (0, 0), 90)  # 100 numbers from the 90th of 100 on
    torch.save(good | {"extra": overlapping}, tmp_path / "odd.ckpt")
    assert read_checkpoint(tmp_path / "odd.ckpt")["extra"].is_contiguous()


# Any value in any place


def replacements(old) -> list:
    """What may stand in the place of a value."""
    values = [None, 10**60, -1, float("nan"), "x", [], {}, (), shared(list, 4), torch.zeros(3, 5), torch.tensor(7)]
    if isinstance(old, dict):
        values += [{**old, "extra": 1}, dict(list(old.items())[1:]), Shadowed(old), list(old)]
    if isinstance(old, torch.Tensor):
        values += [old.double(), old.flatten(), old.bool(), old * float("nan")]
    return values


def places(node, at=()) -> list:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, (list, tuple)) else ()
    return [at] + [place for key, inner in items for place in places(inner, (*at, key))]


def replaced(node, at, value):
    """The content with `value` in that place, or what `value` makes of what was there."""
    if not at:
        return value(node) if callable(value) else value
    changed = dict(node) if isinstance(node, dict) else list(node)
    changed[at[0]] = replaced(node[at[0]], at[1:], value)
    return changed if isinstance(node, (dict, list)) else tuple(changed)


def mutations(content, number: int):
    """Contents with a random value in a random place, always the same ones, each with its place."""
    draw = random.Random(0)
    everywhere = places(content)
    for _ in range(number):
        at = draw.choice(everywhere)
        old = content
        for key in at:
            old = old[key]
        yield at, replaced(content, at, draw.choice(replacements(old)))


def test_any_value_in_any_place_of_a_checkpoint_is_refused_in_one_line_or_does_nothing(tmp_path, good):
    refused = 0
    for at, content in mutations(good, 150):
        torch.save(content, tmp_path / "odd.ckpt")
        try:
            load_checkpoint(tmp_path / "odd.ckpt").describe()
        except UserError as error:
            refused += 1
            assert "odd.ckpt" in str(error) and len(str(error)) < 1000 + len(str(tmp_path)) * 2, at
    assert 75 < refused < 150


@pytest.fixture(scope="module")
def last(tiny_run) -> dict:
    """What a run resumes from."""
    return read_checkpoint(tiny_run.path / "checkpoints" / "last.ckpt")


def test_any_value_in_any_place_of_a_runs_state_is_refused_or_can_be_restored(last, tmp_path):
    path, refused = tmp_path / "last.ckpt", 0
    network = GPT(GPTConfig(**last["gpt"]["model"]))
    state = {name: value for name, value in last.items() if name not in ("state_dict", "gpt")}
    for at, changed in mutations(state, 300):
        optimizer = build_optimizer(network, OptimizerConfig(embedding_lr=0.02))
        callbacks = [MetricsLogger({}), BestCheckpoint(path), RunTimer(None)]
        trainer = Trainer(accelerator="cpu", logger=False, callbacks=[*callbacks], enable_progress_bar=False)
        content = {**last, **changed} if isinstance(changed, dict) else changed
        try:
            torch.save(content, path)
            content = read_checkpoint(path)
            check_run_state(content, path)
            restored = restorable_state(content, trainer, optimizer, path)
        except UserError as error:
            refused += 1
            assert str(path) in str(error) and len(str(error)) < 1000, at
            continue
        trainer.fit_loop.load_state_dict(restored["loops"]["fit_loop"])
        optimizer.load_state_dict(restored["optimizer_states"][0])
        for callback in callbacks:
            callback.load_state_dict(restored["callbacks"][callback.state_key.partition("{")[0]])
        for weight in network.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        assert trainer.fit_loop.state_dict().keys() == restored["loops"]["fit_loop"].keys()
        assert trainer.global_step == last["global_step"]
    assert 100 < refused < 300


def spoilt_states() -> dict:
    """Changes of a checkpoint to resume from: where, and what is put there (a function: of what was there)."""
    first_state = ("optimizer_states", 0, "state", 0)
    steps = ("loops", "fit_loop", "epoch_loop.automatic_optimization.optim_progress", "optimizer", "step", "total")
    return {
        "no optimizer": (("optimizer_states",), []),
        "two optimizers": (("optimizer_states",), lambda states: states * 2),
        "an optimizer without state": (("optimizer_states", 0, "state"), {}),
        "one group less": (("optimizer_states", 0, "param_groups"), lambda groups: groups[1:]),
        "state of another shape": ((*first_state, "exp_avg"), torch.zeros(3, 5)),
        "state of another optimizer": (first_state, {"momentum": torch.zeros(3)}),
        "a count of steps that is a matrix": ((*first_state, "step"), torch.zeros(2, 2)),
        "loops that are a number": (("loops",), 5),
        "no counters": (("loops", "fit_loop"), {}),
        "a counter that is a text": (("loops", "fit_loop", "epoch_progress", "current", "ready"), "many"),
        "another step": ((*steps, "completed"), 7),
        "a step beyond all": (("global_step",), 10**30),
        "a run that is a list": (("run",), []),
        "seconds that are no number": (("run", "seconds"), float("nan")),
        "a budget without an end": (("run", "budget"), 60.0),
        "callbacks that are a text": (("callbacks",), "all"),
        "readings that are texts": (("callbacks", "MetricsLogger", "step_ms_readings"), ["fast"]),
        "no version": (("pytorch-lightning_version",), "newest"),
        "more weights": (("state_dict",), lambda weights: {**weights, "network.more": torch.zeros(2)}),
    }


@pytest.mark.parametrize("name", spoilt_states())
def test_state_that_a_run_cannot_resume_from_is_refused_and_nothing_is_touched(
    train_here, tiny_run, last, tmp_path, name
):
    run_dir = Path(shutil.copytree(tiny_run.dir, tmp_path / "received"))
    torch.save(replaced(last, *spoilt_states()[name]), run_dir / "checkpoints" / "last.ckpt")
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    error = train_here(f"resume={run_dir}", "trainer.max_steps=50", settings=()).error
    assert "last.ckpt" in error and len(error) < 1000 + 4 * len(str(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_best_of_another_network_is_named_and_put_aside(train_here, tiny_run, good, tmp_path):
    run_dir = Path(shutil.copytree(tiny_run.dir, tmp_path / "received"))
    torch.save(good, run_dir / "checkpoints" / "best.ckpt")
    resumed = train_here(f"resume={run_dir}", "trainer.max_steps=45", settings=())
    assert resumed.returncode == 0 and "best.ckpt is of another network" in resumed.stdout, resumed
    assert "It was renamed to best.unusable" in resumed.stdout and (run_dir / "checkpoints" / "best.unusable").is_file()
    assert load_checkpoint(run_dir / "checkpoints" / "best.ckpt").step == 45


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
        context_seen.main([str(checkpoint)])
        measured.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert measured[0] == measured[1] and measured[0]["tokens"] > 100


def test_export_of_another_version_is_named(refuse, tmp_path, tiny_run, monkeypatch):
    file, checkpoint = tmp_path / "later.safetensors", load_checkpoint(tiny_run.path / "checkpoints" / "best.ckpt")
    with monkeypatch.context() as later_version:
        later_version.setattr("checkpoint.checkpoint.FORMAT", 7)
        checkpoint.export(file)
    error = refuse("sample", f"checkpoint={file}")
    assert "has format 7" in error and "reads formats up to 3" in error


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
        "a key that comes twice": header(
            {"w": one, "__metadata__": entries | {"model": '{"bias": true, "bias": false}'}}
        ),
        "a number of 100,000 digits": header({"w": one, "__metadata__": entries | {"step": "9" * 100_000}}),
        "a size that is no number": header({"w": one, "__metadata__": entries | {"model": '{"vocab_size": NaN}'}}),
        "a list in a list in a list": header({"w": one, "__metadata__": entries | {"step": "[" * 100_000}}),
        "a pickle": pickle.dumps(Calls(os.system, f"touch {canary}")),
    }


@pytest.mark.parametrize("name", headers(Path()))
def test_hostile_safetensors_are_refused(refuse, canary, tmp_path, name):
    (tmp_path / "bad.safetensors").write_bytes(headers(canary)[name])
    error = refuse("sample", f"checkpoint={tmp_path / 'bad.safetensors'}")
    assert "bad.safetensors is damaged, or not an export" in error or "bad.safetensors does not fit" in error


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
        data = TextDataModule(config, TokenizerConfig(vocab_size=300), 16, 0)
        data.prepare()
        return [data.train_tokens.tolist(), data.val_tokens.tolist()]

    before = tokens()
    cached = sorted((tmp_path / "cache").iterdir())
    for path in cached:
        path.write_bytes(hostile_caches(canary)[name])
    assert tokens() == before
    assert [path for path in cached if f"{path} is damaged" not in caplog.text] == [] and len(cached) == 3
