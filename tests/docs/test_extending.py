"""The examples of docs/extending.md do what the page says: training, maps and sampling follow the edit."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

import model.attention
import model.gpt
from model.gpt import GPT, Block
from sampling import decoder
from sampling.config import SamplingConfig
from sampling.sampler import generate
from tests.conftest import PROJECT
from tests.model.test_gpt import FAMILIES, family

SIZES = {"vocab_size": 50, "context_length": 16, "num_layers": 2, "num_heads": 4, "d_model": 32}
PAGE = (PROJECT / "docs" / "extending.md").read_text(encoding="utf-8")
CHANGES, ADDITIONS = PAGE.split("# Adding a choice\n")
BLOCK, ATTENTION = re.findall(r"```python\n(.*?)```", CHANGES, re.DOTALL)


@pytest.fixture(params=["block", "attention"])
def edited(request, monkeypatch):
    """One of the two edits, made to this process's modules as the page makes it to the files."""
    decoder.warn_once.cache_clear()
    if request.param == "block":
        names = dict(vars(model.gpt))
        exec(BLOCK, names)
        monkeypatch.setattr(Block, "forward", names["forward"])
    else:
        names = dict(vars(model.attention))
        exec(ATTENTION, names)
        monkeypatch.setattr(model.gpt, "MultiHeadAttention", names["MuPAttention"])
    yield request.param
    decoder.warn_once.cache_clear()


def network(name: str) -> GPT:
    torch.manual_seed(0)
    gpt = GPT(family(name, **SIZES)).eval()
    with torch.no_grad():
        for weight in gpt.parameters():
            weight.normal_(std=0.3)
    return gpt


@pytest.mark.parametrize("name", FAMILIES)
def test_an_edited_network_learns_is_looked_at_and_sampled_from(edited, name, caplog, monkeypatch):
    ids = torch.arange(16)[None] % 5
    gpt = network(name)
    logits = gpt(ids)
    with monkeypatch.context() as unedited:  # the same weights in the network as it was
        unedited.setattr(Block, "forward", ORIGINAL_FORWARD)
        unedited.setattr(model.gpt, "MultiHeadAttention", ORIGINAL_ATTENTION)
        assert (network(name)(ids) - logits).abs().max() > 0.01

    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = gpt.train().loss(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2

    gpt.eval()
    maps = gpt.attention_maps(ids)
    assert len(maps) == 2
    for weights in maps:
        assert_close(weights.sum(-1), torch.ones(1, 4, 16))

    written = list(generate(gpt, [0, 1], SamplingConfig(max_new_tokens=12, temperature=0)))
    with torch.no_grad():
        likeliest = gpt(torch.tensor([[0, 1, *written]]))[0].argmax(-1)
    assert written == likeliest[1:-1].tolist()
    (warning,) = caplog.messages
    assert warning in PAGE


ORIGINAL_FORWARD, ORIGINAL_ATTENTION = Block.forward, model.gpt.MultiHeadAttention


# Adding a choice


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the project with all additions of the page, each in the file that the page names before it."""
    folder = tmp_path_factory.mktemp("extended")
    for room in {path.parent.name for path in PROJECT.glob("*/__init__.py")} - {"tests", "benchmarks"}:
        shutil.copytree(PROJECT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__", "shakespeare.txt"))
    for name in ("train.py", "sample.py", "requirements.txt"):
        shutil.copy(PROJECT / name, folder)
    additions = re.findall(r"`([a-z_/]+\.(?:py|yaml))`:\n\n```(?:python|yaml)\n(.*?)```", ADDITIONS, re.DOTALL)
    assert len(additions) == ADDITIONS.count("\n```\n") == 10
    for name, code in additions:
        path = folder / name
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        start = "FINAL_METRICS = {\n"
        after = before.replace(start, start + code) if start in before else before + "\n\n" * bool(before) + code
        path.write_text(after, encoding="utf-8")
    return folder


def in_copy(folder, *command):
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_additions_of_the_page_train_and_sample_in_a_copy_of_the_project(extended):
    (extended / "text.txt").write_text("Schöne Wörter über Bäume. " * 200, encoding="utf-8")
    small = (
        "model.d_model=16",
        "model.num_heads=2",
        "model.context_length=8",
        "data.batch_size=2",
        "num_validations=1",
    )
    settings = ("experiment=plain", "data.corpus=text.txt", "logger=[tensorboard,jsonl]", *small)
    in_copy(extended, "train.py", *settings, "trainer.max_steps=3")
    (run,) = (extended / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["val_compressed"] == pytest.approx(summary["val_bits_per_byte"] / 8)
    assert summary["steps"] == 3
    config = (run / "config.yaml").read_text()
    assert "mlp: relu\n" in config and "name: sgd\n" in config and "kind: characters\n" in config
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["Loss/validation"] for row in rows if "Loss/validation" in row] == pytest.approx(
        [summary["val_nats_per_token"]]
    )
    said = in_copy(extended, "sample.py", "prompt=To be", "max_new_tokens=5")
    assert "tokenizer characters (259 tokens)" in said  # 256 bytes, ä, ö, ü


def test_additions_of_the_page_are_listed_by_help_and_by_error_messages(extended):
    text = in_copy(extended, "train.py", "--help-all")
    assert "optimizer= one of adamw, muon, sgd" in text and "tokenizer= one of bpe, byte, characters, tiktoken" in text
    code = (
        "import sys; from data.config import TokenizerConfig; from model.activations import ACTIVATIONS; "
        "from training.optim import OPTIMIZERS; print(*ACTIVATIONS, *OPTIMIZERS); sys.exit('torch' in sys.modules)"
    )
    assert in_copy(extended, "-c", code).split() == ["gelu", "swiglu", "relu2", "relu", "adamw", "muon", "sgd"]
