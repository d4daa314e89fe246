"""Whatever is wrong with what a user gives, a real process says so in one line and leaves nothing half-made.

The line has the value, what was expected and how to mend it. Texts, settings, checkpoints, prompts and sampling
values; then texts and paths that are only odd, and work.
"""

import os
import pickle
import random
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from checkpoint.checkpoint import NETWORK_PREFIX, checkpoint_metadata, load_checkpoint
from data.config import TokenizerConfig
from data.tokenizer import build_tokenizer
from model.config import GPTConfig
from model.gpt import GPT

CACHE_FILE = re.compile(r"(tokens|bpe)-[0-9a-f]{16}\.(npy|txt)")
SHAPE = ("model.context_length=16", "model.d_model=32", "model.num_heads=2", "model.bigram_table_size=64")
SMALL = ("tokenizer=byte", "trainer.max_steps=1", "data.batch_size=2", "data.cache_dir=cache", *SHAPE)


def train(*arguments: str, text: str = "good.txt") -> tuple[str, tuple[str, ...]]:
    """A bad training: small, on a good text, but for these arguments."""
    return "train.py", (f"data.corpus={{shelf}}/{text}", *SMALL, *arguments)


def sample(*arguments: str) -> tuple[str, tuple[str, ...]]:
    """A bad sampling, from a good checkpoint but for these arguments."""
    return "sample.py", ("checkpoint={shelf}/good.ckpt", *arguments)


def text(name: str) -> tuple[str, tuple[str, ...]]:
    return train(text=name)


def checkpoint(name: str) -> tuple[str, tuple[str, ...]]:
    return "sample.py", (f"checkpoint={{shelf}}/{name}",)


# What is given, and pieces of the line that answers it. {shelf} is the folder of the files below.
BAD = [
    # texts
    (text("empty.txt"), ["empty.txt", "empty", "data.corpus"]),
    (text("mark.txt"), ["mark.txt", "empty"]),  # a byte-order mark and nothing else
    (text("binary.bin"), ["binary.bin", "NUL", "Convert"]),
    (text("utf16.txt"), ["utf16.txt", "NUL", "Convert"]),
    (text("latin1.txt"), ["latin1.txt", "not UTF-8", "0xe9 at offset 3", "Convert"]),
    (text("late.txt"), ["late.txt", "0xff at offset 50000"]),
    (text("line.txt"), ["context_length 16 needs at least 17", "11", "≤ 10"]),
    (text("character.txt"), ["character.txt", "1 bytes", "longer text"]),
    (text("nothing/here.txt"), ["nothing/here.txt", "does not exist", "Give"]),
    (text("good.txt/deeper"), ["good.txt/deeper", "does not exist"]),
    (text("empty_folder"), ["empty_folder", "no text file", "Give"]),
    (text("binary_folder"), ["binary_folder", "no text file"]),
    (text("hidden_folder"), ["hidden_folder", "no text file"]),
    (text("*.nothing"), ["*.nothing", "no text file"]),
    (text("pipe"), ["pipe", "not a regular file", "Give"]),
    (text("dangling"), ["dangling", "does not exist"]),
    (text("circle"), ["circle", "does not exist"]),
    (text("n" * 300), ["nnn", "characters", "name too long"]),
    (train("data.corpus=/dev/zero"), ["/dev/zero", "not a regular file"]),
    (train("data.corpus=~nobody_here/x.txt"), ["~nobody_here", "full path"]),
    (train("data.corpus="), ["data.corpus is empty", "Give a path"]),
    (train("data.corpus=\udcff"), ["data.corpus", "not UTF-8", "rename"]),
    (train("data.val_fraction=1e-9"), ["9200 bytes", "validation split", "another fraction"]),
    (train("data.val_fraction=0.9999"), ["training split has 1", "longer text"]),
    # settings of the wrong type, unknown ones
    (train("model.num_heads=many"), ["model.num_heads=many", "Integer"]),
    (train("model.num_layers=2.5"), ["model.num_layers=2.5", "Integer"]),
    (train("model.d_model=null"), ["model.d_model=null", "not Optional"]),
    (train("model.bias=perhaps"), ["model.bias=perhaps", "bool"]),
    (train("model.dropout=[1]"), ["model.dropout=[1]", "Float"]),
    (train("seed=1e99"), ["seed=1e99", "Integer"]),
    (train("modle=llama"), ["modle is an unknown key", "model"]),
    (train("model.num_hedas=2"), ["model.num_hedas", "model.num_heads"]),
    (train("+novelty=1"), ["novelty is an unknown key", "train.yaml"]),
    (train("++model.novelty=1"), ["novelty is an unknown key of GPTConfig"]),
    (train("~compile"), ["compile has no value", "Give one"]),
    (("train.py", ("~model",)), ["model has no value"]),
    (train("~model"), ["model.context_length cannot be set", "another setting removes model"]),
    (train("data.batch_size=???"), ["data.batch_size has no value"]),
    # zero, negative, not a number, huge
    (train("model.num_layers=0"), ["model.num_layers is 0", "at least 1"]),
    (train("model.context_length=-5"), ["model.context_length is -5", "at least 1"]),
    (train("model.dropout=nan"), ["model.dropout is nan", "below 1"]),
    (train("model.norm_eps=inf"), ["model.norm_eps is inf", "positive"]),
    (train("optimizer.lr=nan"), ["optimizer.lr is nan", "above 0"]),
    (train("optimizer.warmup_fraction=2"), ["optimizer.warmup_fraction 2", "at most 1"]),
    (train("data.val_fraction=nan"), ["data.val_fraction is nan", "between 0 and 1"]),
    (train("data.batch_size=0"), ["data.batch_size is 0", "at least 1"]),
    (train("data.batch_size=100000000000000"), ["100000000000000", "at most 1,048,576"]),
    (train("data.val_tokens=-1"), ["data.val_tokens is -1", "at least 1"]),
    (train("tokenizer=bpe", "tokenizer.vocab_size=256"), ["tokenizer.vocab_size is 256", "257 to 1000000"]),
    (train("seed=-1"), ["seed is -1", "from 0 to"]),
    (train("model.d_model=10000000"), ["weights take", "GB", "Lower model.num_layers"]),
    (train("model.num_layers=1000000000000"), ["model.num_layers is 1000000000000", "at most"]),
    (train("model.context_length=16000000", "model.positions=rope"), ["16000001 tokens", "≤ 8279"]),
    # what does not go together
    (train("model.num_heads=3"), ["d_model 32", "num_heads 3", "1, 2, 4, 8, 16, or"]),
    (train("model.num_kv_heads=3"), ["num_heads 2", "num_kv_heads 3", "1, 2"]),
    (train("model.positions=rope", "model.num_heads=32"), ["even head_dim", "d_model 32 / num_heads 32"]),
    (train("model.vocab_size=5"), ["model.vocab_size", "tokenizer.vocab_size"]),
    (train("budget=60s"), ["budget=60s", "trainer.max_steps=1", "Use one of them"]),
    (train("model=null"), ["model=null does not exist", "llama"]),
    (train("model=5"), ["model=5 does not exist", "llama"]),
    (train("model=gpt5"), ["model=gpt5", "gpt2, llama, nanochat, tiny"]),
    (train("experiment=nothing"), ["experiment=nothing", "heads_sweep"]),
    (train("experiment=null"), ["experiment=null does not exist", "baby_gpt"]),
    (train("compile=often"), ["'often'", "auto, true or false"]),
    (train("num_validations=0"), ["num_validations is 0", "at least 1"]),
    (train("tokenizer=tiktoken", "tokenizer.name=gtp2"), ["'gtp2'", "gpt2"]),
    # what is no setting
    (train("fast"), ["'fast'", "key=value"]),
    (train("=5"), ["'=5'", "key=value"]),
    (train("--steps", "5"), ["--steps", "key=value"]),
    (train("--cfg=nothing"), ["nothing", "job", "key=value"]),
    (train("model..num_heads=1"), ["model..num_heads=1", "key=value"]),
    (train("model.num_heads=[2"), ["model.num_heads=[2", "key=value"]),
    (train("model.num_heads=2,4"), ["model.num_heads=2,4", "-m"]),
    (train("seed=${seed}"), ["seed", "Recursive", "plain value"]),
    (train("seed=${nothing}"), ["seed", "'nothing' not found", "plain value"]),
    (train("hydra.run.dir=elsewhere"), ["hydra.run.dir=elsewhere", "runs_dir"]),
    (train("--config-name=sample"), ["--config-name", "configs/experiment/"]),
    (train("-m", "model.num_heads=3", "seed=0,1"), ["d_model 32", "num_heads 3"]),
    # times, devices, Lightning's options
    (train("trainer.max_steps=null", "trainer.max_time=soon"), ["'soon'", "5m"]),
    (train("trainer.max_steps=null", "budget=-5s"), ["'-5s'", "5m"]),
    (train("trainer.max_steps=0"), ["trainer.max_steps is 0", "at least 1"]),
    (train("trainer.max_step=5"), ["trainer.max_step is", "trainer.max_steps"]),
    (train("trainer.accelerator=abacus"), ["abacus", "cpu"]),
    (train("trainer.accelerator=tpu"), ["xla"]),
    (train("trainer.devices=0"), ["devices=0", "cpu"]),
    (train("trainer.precision=17"), ["17", "32-true"]),
    (train("trainer.gradient_clip_val=nan"), ["trainer.gradient_clip_val is nan", "1.0"]),
    (train("trainer.limit_train_batches=0.0001"), ["trainer.limit_train_batches is 0.0001", "258"]),
    (train("trainer.val_check_interval=0"), ["trainer.val_check_interval is 0", "a number of batches"]),
    (train("-m", "seed=1,2", "trainer.strategy=nothing"), ["'nothing'", "ddp"]),
    # places
    (train("runs_dir="), ["runs_dir is empty", "path"]),
    (train("runs_dir={shelf}/good.txt"), ["good.txt", "runs_dir"]),
    (train("runs_dir=/proc/nothing"), ["/proc/nothing", "runs_dir"]),
    (train("data.cache_dir={shelf}/good.txt"), ["good.txt", "data.cache_dir"]),
    (train("data.cache_dir=/proc/nothing"), ["/proc/nothing", "data.cache_dir"]),
    # checkpoints
    (checkpoint("nothing.ckpt"), ["nothing.ckpt", "train.py"]),
    (checkpoint("empty_folder"), ["empty_folder", "best.ckpt", "train.py"]),
    (checkpoint("pipe"), ["pipe", "train.py"]),
    (checkpoint("good.txt"), ["good.txt is damaged, or not a checkpoint", "not a zip file", "train.py"]),
    (checkpoint("empty.txt"), ["empty.txt is damaged, or not a checkpoint", "train.py"]),
    (checkpoint("short.ckpt"), ["short.ckpt is damaged, or not a checkpoint", "damaged"]),
    (checkpoint("flipped.ckpt"), ["flipped.ckpt", "damaged", "checksum"]),
    (checkpoint("pickle.ckpt"), ["pickle.ckpt is damaged, or not a checkpoint"]),
    (checkpoint("legacy.ckpt"), ["legacy.ckpt is damaged, or not a checkpoint"]),
    (checkpoint("foreign.ckpt"), ["foreign.ckpt is damaged, or not a checkpoint"]),
    (checkpoint("tensor.ckpt"), ["tensor.ckpt is damaged, or not a checkpoint"]),
    (checkpoint("lacking.ckpt"), ["lacking.ckpt does not fit", "final_norm", "Train again"]),
    (checkpoint("wider.ckpt"), ["wider.ckpt does not fit", "66,560 weights"]),
    (checkpoint("vocabulary.ckpt"), ["vocabulary.ckpt does not fit", "257 tokens", "256"]),
    (checkpoint("nothing.safetensors"), ["nothing.safetensors", "export="]),
    (checkpoint("text.safetensors"), ["text.safetensors is damaged, or not an export"]),
    (checkpoint("short.safetensors"), ["short.safetensors", "damaged"]),
    (checkpoint("foreign.safetensors"), ["foreign.safetensors is damaged, or not an export", "'model'"]),
    (("sample.py", ("prompt=x",)), ["no trained run below 'runs'", "train.py"]),
    # prompts and sampling values
    (sample("prompt=a", "prompt_file=b"), ["prompt and prompt_file", "Leave one out"]),
    (sample("prompt=a\udcffb"), ["prompt", "not UTF-8"]),
    (sample("prompt_file={shelf}/nothing.txt"), ["nothing.txt", "No such file"]),
    (sample("prompt_file={shelf}"), ["Is a directory"]),
    (sample("prompt_file={shelf}/latin1.txt"), ["latin1.txt", "not UTF-8 at byte 3"]),
    (sample("prompt_file=/dev/zero"), ["/dev/zero", "64 MB"]),
    (sample("mode=score"), ["no text to score", "prompt="]),
    (sample("mode=interactive", "prompt=x"), ["interactive", "Leave prompt"]),
    (sample("mode=dance"), ["'dance'", "write, interactive, score"]),
    (sample("format=xml"), ["'xml'", "text, jsonl"]),
    (sample("device=cuda:99"), ["'cuda:99'", "cpu"]),
    (sample("max_new_tokens=0"), ["max_new_tokens is 0", "at least 1"]),
    (sample("num_samples=1,2"), ["num_samples=1,2", "give one"]),
    (sample("temperature=inf"), ["temperature is inf", "0 (greedy)"]),
    (sample("temperature=hot"), ["temperature=hot", "Float"]),
    (sample("top_k=-1"), ["top_k is -1", "0 (off)"]),
    (sample("top_p=nan"), ["top_p is nan", "at most 1"]),
    (sample("min_p=1.1"), ["min_p is 1.1", "from 0"]),
    (sample("repetition_penalty=0"), ["repetition_penalty is 0", "above 0"]),
    (sample("stop=[1"), ["stop is [1", "JSON list"]),
    (sample("seed=4294967296"), ["seed is 4294967296", "from 0 to"]),
    (sample("topk=5"), ["topk is an unknown key", "top_k"]),
    (sample("export=weights.bin"), ["'weights.bin'", ".safetensors"]),
    (sample("export=/proc/weights.safetensors"), ["/proc/weights.safetensors", "another file"]),
    (sample("export=w.safetensors", "prompt=x"), ["export", "Leave prompt"]),
]


@pytest.fixture(scope="session")
def shelf(tmp_path_factory) -> Path:
    """The files that BAD names, none of them as it should be but good.txt and good.ckpt."""
    folder = tmp_path_factory.mktemp("shelf")
    contents = {
        "good.txt": b"The king and queen of night and day are here.\n" * 200,
        "empty.txt": b"",
        "mark.txt": b"\xef\xbb\xbf",
        "binary.bin": bytes(range(256)) * 40,
        "utf16.txt": ("To be or not " * 500).encode("utf-16"),
        "latin1.txt": ("caf\xe9 " * 500).encode("latin-1"),
        "late.txt": b"good text " * 5000 + b"\xff\xfe",
        "line.txt": b"to be or not",
        "character.txt": b"a",
        "binary_folder/a.bin": bytes(100),
        "hidden_folder/.a.txt": b"To be or not",
        "pickle.ckpt": pickle.dumps({"gpt": 1}),
        "text.safetensors": b"To be or not",
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "empty_folder").mkdir()
    (folder / "dangling").symlink_to("nowhere")
    (folder / "circle").symlink_to("circle")
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe")
    _write_checkpoints(folder)
    return folder


def _write_checkpoints(folder: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"), None, Path())
    config = GPTConfig(vocab_size=256, context_length=16, num_layers=1, num_heads=2, d_model=32)
    entry = checkpoint_metadata(config, tokenizer, 0, {"nats_per_token": 5.5, "bits_per_byte": 8.0})
    weights = {NETWORK_PREFIX + name: weight for name, weight in GPT(config).state_dict().items()}
    torch.save({"gpt": entry, "state_dict": weights}, folder / "good.ckpt")
    torch.save({"gpt": entry, "state_dict": weights}, folder / "legacy.ckpt", _use_new_zipfile_serialization=False)
    torch.save({"state_dict": {"weight": torch.zeros(3)}}, folder / "foreign.ckpt")
    torch.save(torch.zeros(3), folder / "tensor.ckpt")
    lacking = {name: weight for name, weight in weights.items() if "final_norm" not in name}
    torch.save({"gpt": entry, "state_dict": lacking}, folder / "lacking.ckpt")
    wider = entry | {"model": entry["model"] | {"d_model": 64}}
    torch.save({"gpt": wider, "state_dict": weights}, folder / "wider.ckpt")
    one_more = entry["tokenizer"] | {"special_tokens": [["<|end|>", 256]]}
    torch.save({"gpt": entry | {"tokenizer": one_more}, "state_dict": weights}, folder / "vocabulary.ckpt")
    good = (folder / "good.ckpt").read_bytes()
    (folder / "short.ckpt").write_bytes(good[: len(good) // 2])
    (folder / "flipped.ckpt").write_bytes(good[:30_000] + bytes([good[30_000] ^ 1]) + good[30_001:])
    load_checkpoint(folder / "good.ckpt").export(folder / "good.safetensors")
    (folder / "short.safetensors").write_bytes((folder / "good.safetensors").read_bytes()[:-4])
    safetensors.torch.save_file({"weight": torch.zeros(3)}, folder / "foreign.safetensors")


def half_made(folder: Path) -> list[str]:
    """Everything below but whole files of the cache."""
    cache = folder / "cache"
    found = [path for path in folder.rglob("*") if path != cache]
    return [str(path) for path in found if path.parent != cache or not CACHE_FILE.fullmatch(path.name)]


@pytest.mark.parametrize(
    ("given", "said"), BAD, ids=[ascii(" ".join([given[0], *given[1][-1:]]))[1:60] for given, _ in BAD]
)
def test_bad_input_is_answered_by_one_line_and_leaves_nothing_half_made(call, shelf, tmp_path, given, said):
    script, arguments = given
    if "{shelf}/pipe" in " ".join(arguments) and not (shelf / "pipe").exists():
        pytest.skip("this system has no named pipes")
    error = call(script, *[argument.replace("{shelf}", str(shelf)) for argument in arguments], cwd=tmp_path).error
    assert [piece for piece in said if piece.lower() not in error.lower()] == [], error
    assert half_made(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_unreadable_text_is_named(call, tmp_path):
    (tmp_path / "secret.txt").write_text("To be or not " * 100)
    (tmp_path / "secret.txt").chmod(0)
    error = call("train.py", f"data.corpus={tmp_path / 'secret.txt'}", *SMALL, cwd=tmp_path).error
    assert "secret.txt: Permission denied" in error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_output_that_cannot_be_written_is_one_line(start, shelf):
    command = ("-c", 'exec "$0" "$@" >/dev/full')
    process = start("sample.py", f"checkpoint={shelf / 'good.ckpt'}", "max_new_tokens=3", prefix=("bash", *command))
    _, errors = process.communicate(timeout=60)
    loaded, error = errors.decode().splitlines()
    assert process.returncode == 2 and loaded.startswith(str(shelf))
    assert error.startswith("error: the output cannot be written: No space left on device.")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_training_goes_on_when_nobody_can_read_what_it_says(start, shelf, tmp_path):
    command = ("-c", 'exec "$0" "$@" >/dev/full')
    process = start("train.py", f"data.corpus={shelf / 'good.txt'}", *SMALL, cwd=tmp_path, prefix=("bash", *command))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and errors == b""
    (log,) = tmp_path.glob("runs/*/train.log")
    assert "best checkpoint, step 1 of 1" in log.read_text(encoding="utf-8")


# Odd, and all right


def test_folder_of_mixed_files_trains_on_its_texts(train_here, tmp_path):
    folder = tmp_path / "Gedichte, l'été = 漢 ☃"
    (folder / "deeper").mkdir(parents=True)
    texts = {
        "mark.txt": b"\xef\xbb\xbfTo be, or not to be.\r\n" * 40,
        "windows.md": b"Whether 'tis nobler in the mind\r\nto suffer\r\n" * 40,
        "deeper/emoji": "👑👩‍👧🇺🇿 the queen\n".encode() * 40,
        "deeper/right_to_left.txt": "שלום עולם، مرحبا بالعالم\n".encode() * 40,
        "special.txt": b"<|endoftext|><|im_start|>[INST]</s><pad>\n" * 40,
        "no_end_of_line.txt": b"The rest is silence",
        "picture.png": bytes(200),
        ".hidden": b"\xff" * 100,
    }
    for name, content in texts.items():
        (folder / name).write_bytes(content)
    finished = train_here(f"data.corpus={folder}", "trainer.max_steps=2")
    assert finished.returncode == 0, finished
    assert "6 files" in finished.stdout and "picture.png" in finished.stdout


ODD_TEXTS = {
    "a million spaces": " " * 1_000_000,
    "one line": "to be or not to be " * 60,
    "one letter": "a" * 5000,
    "line ends": "\r\n" * 3000,
    "no two alike": "".join(random.Random(0).sample([chr(code) for code in range(0x4E00, 0x9FFF)], 4000)),
}


@pytest.mark.parametrize("name", ODD_TEXTS)
def test_odd_text_trains(train_here, tmp_path, name):
    (tmp_path / "odd.txt").write_text(ODD_TEXTS[name], encoding="utf-8", newline="")
    finished = train_here(f"data.corpus={tmp_path / 'odd.txt'}", "trainer.max_steps=2", "data.val_tokens=100")
    assert finished.returncode == 0, finished


def test_places_with_odd_names_work_from_text_to_sample(call, shelf, tmp_path):
    folder = tmp_path / "it's a=b, ñ {x} [y] $HOME"
    folder.mkdir()
    shutil.copy(shelf / "good.txt", folder / "text=1.txt")
    places = (f"data.corpus={folder}/text=1.txt", f"runs_dir={folder}/my runs", "data.cache_dir=cache")
    trained = call("train.py", *SMALL, *places, cwd=folder, runs=folder / "my runs")
    assert trained.returncode == 0, trained
    sampled = call("sample.py", f"runs_dir={folder}/my runs", "prompt=<|endoftext|>", "max_new_tokens=3", cwd=folder)
    assert sampled.returncode == 0 and sampled.stdout.startswith("<|endoftext|>"), sampled
