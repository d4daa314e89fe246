"""The library does what the commands do, in the caller's process, and leaves that process as it was."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny_gpt
import train
from model import kernels
from sampling.config import SamplingConfig
from sampling.text import generate_text
from tests.conftest import hear_signals
from training.lightning_module import GPTLightning

PROJECT = Path(__file__).resolve().parents[2]
PAGE = (PROJECT / "docs" / "library.md").read_text(encoding="utf-8")


@pytest.fixture
def settings(tiny, tmp_path) -> tuple[str, ...]:
    return (*tiny, f"runs_dir={tmp_path / 'runs'}")


@pytest.fixture
def gpt(tiny_run):
    return tiny_gpt.load(tiny_run.path)


@pytest.fixture
def composed(monkeypatch) -> list:
    """Collects the configs that would be trained."""
    configs = []

    def record(config, started_at, exit_on_signal):
        configs.append(config)
        return Path("run")

    monkeypatch.setattr(train, "train", record)
    return configs


def in_process(code: str, clean_environment, cwd: Path) -> subprocess.CompletedProcess:
    environment = clean_environment | {"PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


# Importing


def test_import_loads_no_slow_library(clean_environment, tmp_path):
    code = "import sys, tiny_gpt; print([n for n in ('torch', 'numpy', 'hydra', 'lightning') if n in sys.modules])"
    finished = in_process(code, clean_environment, tmp_path)
    assert finished.stdout == "[]\n", finished


def test_own_modules_beside_a_notebook_do_not_get_in_the_way(clean_environment, tmp_path):
    for name in ("data", "model", "train"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not this one')")
    code = "import tiny_gpt\ntry: tiny_gpt.train('missing.txt')\nexcept tiny_gpt.UserError as error: print(error)"
    finished = in_process(code, clean_environment, tmp_path)
    assert "missing.txt" in finished.stdout and "not this one" not in finished.stderr, finished


def test_own_module_imported_before_is_named(clean_environment, tmp_path):
    (tmp_path / "data.py").write_text("")
    finished = in_process("import data, tiny_gpt", clean_environment, tmp_path)
    last = finished.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: tiny_gpt has a module named data") and "data.py" in last


# Training


def test_run_equals_that_of_the_command(settings, train_here, tmp_path, tiny):
    ours = tiny_gpt.train(*settings, **{"trainer.max_steps": 12})
    theirs = train_here("trainer.max_steps=12")
    assert ours.run_dir.parent == tmp_path / "runs" and ours.run_dir != theirs.path
    assert ours.summary["val_nats_per_token"] == theirs.summary["val_nats_per_token"]
    assert ours.summary == json.loads((ours.run_dir / "summary.json").read_text())
    assert ours.checkpoint == ours.run_dir / "checkpoints" / "best.ckpt" and ours.checkpoint.is_file()
    assert max(step for curve in ours.history.values() for step, _ in curve) >= 12


def test_run_leaves_the_process_as_it_was(settings, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    hear_signals()
    process = lambda: (  # noqa: E731
        os.getcwd(),
        logging.getLogger().handlers[:],
        logging.getLogger().level,
        sys.excepthook,
        kernels.enabled(),
        warnings.filters[:],
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    )
    before = process()
    for _ in range(2):
        tiny_gpt.train(*settings, kernels=False, **{"trainer.max_steps": 2})
        assert process() == before


def test_settings_are_text_or_keyword_arguments(composed):
    tiny_gpt.train("model=llama", "model.num_heads=8", "seed=1", budget="20s")
    tiny_gpt.train(model="llama", seed=1, budget="20s", **{"model.num_heads": 8})
    one, two = (replace(config, overrides=()) for config in composed)
    assert one == two and one.seed == 1 and one.model.num_heads == 8


def test_setting_without_an_equals_sign_is_the_text_to_train_on(composed, tmp_path):
    tiny_gpt.train("my.txt", **{"data.val_tokens": None})
    tiny_gpt.train(tmp_path / "a=b, c.txt")
    assert composed[0].data.corpus == "my.txt" and composed[0].data.val_tokens is None
    assert composed[1].data.corpus == str(tmp_path / "a=b, c.txt")


def test_training_uses_one_device(composed):
    tiny_gpt.train()
    assert composed[0].trainer["devices"] == 1
    with pytest.raises(tiny_gpt.UserError, match=r"trainer\.devices is 2.*python train\.py"):
        tiny_gpt.train(**{"trainer.devices": 2})


@pytest.mark.parametrize(
    "settings, message",
    [
        (["model.nun_heads=3"], "Did you mean model.num_heads"),
        (["missing.txt"], "missing.txt"),
        (["model.num_heads=7"], "num_heads"),
        (["seed=1,2"], "seed"),
        (["hydra.run.dir=x"], "hydra.run.dir"),
    ],
)
def test_mistake_raises_user_error_and_makes_no_directory(settings, message, tmp_path):
    hook = sys.excepthook
    with pytest.raises(tiny_gpt.UserError, match=re.escape(message)):
        tiny_gpt.train(*settings, runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists() and sys.excepthook is hook


def test_run_in_another_thread_ignores_signals(settings):
    runs = []
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=lambda: runs.append(tiny_gpt.train(*settings, **{"trainer.max_steps": 2})))
    thread.start()
    thread.join()
    assert runs[0].summary["steps"] == 2 and signal.getsignal(signal.SIGINT) is before


def test_interrupt_saves_everything_and_the_run_resumes_to_the_same_result(settings, monkeypatch):
    whole = tiny_gpt.train(*settings, **{"trainer.max_steps": 12})
    step = GPTLightning.training_step

    def interrupt_at_5(self, *args):
        if self.trainer.global_step == 5:
            signal.raise_signal(signal.SIGINT)
        return step(self, *args)

    hear_signals()
    with monkeypatch.context() as patch:
        patch.setattr(GPTLightning, "training_step", interrupt_at_5)
        with pytest.raises(tiny_gpt.TrainingInterrupted) as caught:
            tiny_gpt.train(*settings, **{"trainer.max_steps": 12})
    assert isinstance(caught.value, KeyboardInterrupt) and f"resume={str(caught.value.run_dir)!r}" in str(caught.value)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = tiny_gpt.train(resume=caught.value.run_dir)
    assert resumed.run_dir == caught.value.run_dir
    assert resumed.summary["val_nats_per_token"] == whole.summary["val_nats_per_token"]


# Loading, generating, scoring


def test_load_takes_a_run_a_directory_or_a_file(tiny_run):
    run = tiny_gpt.Run(tiny_run.path)
    paths = {tiny_gpt.load(source).path for source in (run, run.run_dir, str(run.run_dir), run.checkpoint)}
    assert paths == {run.checkpoint}
    with pytest.raises(tiny_gpt.UserError, match="nowhere"):
        tiny_gpt.load("nowhere.ckpt")


def test_generate_continues_the_prompt_as_sample_does(gpt):
    expected = list(generate_text(gpt, "the king", SamplingConfig(max_new_tokens=20, seed=3)))[-1][0].text
    assert tiny_gpt.generate(gpt, "the king", max_new_tokens=20, seed=3) == "the king" + expected


def test_several_samples_are_a_list_and_stop_takes_a_list(gpt):
    texts = tiny_gpt.generate(gpt, "the", num_samples=3, max_new_tokens=60, stop=[".", "\n"])
    assert len(texts) == len(set(texts)) == 3 and not any("." in text or "\n" in text for text in texts)


# Attention


def test_attention_is_that_of_the_network(gpt):
    attention = tiny_gpt.attention(gpt, "the king and queen")
    ids = torch.tensor([gpt.tokenizer.encode_ordinary("the king and queen")])
    assert attention.labels[0] == "the"[: len(attention.labels[0])] and len(attention.labels) == ids.size(1)
    np.testing.assert_allclose(attention.maps.sum(-1), 1, atol=1e-5)
    np.testing.assert_array_equal(attention.maps, torch.cat(gpt.network.attention_maps(ids)).numpy())


def test_attention_shows_itself_in_a_notebook_and_saves(gpt, tmp_path):
    attention = tiny_gpt.attention(gpt, "the <b>king</b>")
    assert attention._repr_png_().startswith(b"\x89PNG")
    frame = attention.page()._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and "<script" not in frame and "&lt;script" in frame
    for name, start in (("maps.png", b"\x89PNG"), ("maps.html", b"<!")):
        attention.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(tiny_gpt.UserError, match="png"):
        attention.save("maps.jpg")


@pytest.mark.parametrize("text, tokens", [("", "0 tokens"), ("the king " * 50, "must have 1 to 16")])
def test_text_that_does_not_fit_is_a_user_error(gpt, text, tokens):
    with pytest.raises(tiny_gpt.UserError, match=tokens):
        tiny_gpt.attention(gpt, text)


# The page


def test_examples_of_the_page_run(tiny, tmp_path, monkeypatch, capsys):
    """In the order of the page, with a tiny network and a few steps in place of seconds."""
    original = tiny_gpt.train

    def tiny_train(*settings, budget=None, model=None, **keys):
        settings = [setting for setting in settings if not setting.startswith("model")]
        keys.pop("model.num_heads", None)
        return original(*tiny, *settings, **{"trainer.max_steps": 4, **keys})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiny_gpt, "train", tiny_train)
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 7
    names: dict = {}
    for example in examples:
        exec(compile(example, "library.md", "exec"), names)
    assert names["before"] != names["after"] and len(names["texts"]) == 3
    assert names["attention"].head_dim == 16
    assert {"maps.png", "maps.html", "runs"} <= set(os.listdir(tmp_path))
    assert "with the head" in capsys.readouterr().out


def test_page_names_every_public_function():
    assert re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE) == [name for name in tiny_gpt.__all__ if name.islower()]
