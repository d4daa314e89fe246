"""The last lines of a run name what to do next, for one's own text and from any directory, and hint at overfitting."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.corpus import Corpus
from system.process import script_path
from training.report import suggested_prompt
from training.summary import final_report

FIGURES = {"val_nats_per_token": 3.0, "val_bits_per_byte": 2.0, "val_tokens": 9, "val_tokens_in_split": 9}
SUMMARY = FIGURES | {"steps": 120, "best_step": 120, "seconds": 1.0, "tokens_per_second": 1.0}


def run_on(tmp_path: Path, text: str, corpus: str | None = "mine.txt") -> SimpleNamespace:
    file = tmp_path / "mine.txt"
    file.write_text(text, encoding="utf-8")
    config = SimpleNamespace(data=SimpleNamespace(corpus=corpus))
    return SimpleNamespace(config=config, data=SimpleNamespace(corpus=Corpus([file], 0.5)))


def test_the_suggested_prompt_begins_a_line_of_the_validation_text(tmp_path):
    text = "training text\n" * 10 + 'it\'s a "fine" $HOME; rm -rf\n' * 5
    assert suggested_prompt(run_on(tmp_path, text)) == 'it\'s a "fine" $HOME;'
    assert suggested_prompt(run_on(tmp_path, text, corpus=None)) == "To be, or not"
    assert suggested_prompt(run_on(tmp_path, "x" * 10_000)) == ""  # no line starts in it


@pytest.mark.parametrize("prompt", ["To be, or not", "it's $HOME; `ls` !", "", "漢字"])
def test_the_printed_command_is_safe_in_a_shell_and_works_from_here(tmp_path, monkeypatch, prompt):
    monkeypatch.chdir(tmp_path)
    told = final_report(SUMMARY, "text", tmp_path / "my runs" / "a", 300, prompt)
    (line,) = [line for line in told.splitlines() if line.startswith("generate more text:")]
    words = shlex.split(line.partition(":")[2])
    assert words[1:] == [shlex.split(script_path("sample.py"))[0], "checkpoint=my runs/a", f"prompt={prompt}"]
    assert Path(words[1]).is_file()


@pytest.mark.parametrize(("best_step", "hint"), [(48, True), (79, True), (80, False), (120, False)])
def test_a_best_step_long_before_the_end_is_called_overfitting(tmp_path, best_step, hint):
    told = final_report(SUMMARY | {"best_step": best_step}, "text", tmp_path, 300, "x")
    assert ("overfitting: " in told) is hint


def test_only_new_weights_start_at_a_uniform_guess(train_here):
    first = train_here("trainer.max_steps=4")
    assert "nats per token: the loss starts there" in first.stdout
    for setting in (f"resume={first.dir}", f"init_from={first.dir}"):
        again = train_here("trainer.max_steps=8", setting)
        assert again.returncode == 0 and "starts there" not in again.stdout, again
