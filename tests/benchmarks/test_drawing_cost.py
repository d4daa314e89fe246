"""The cost of drawing is that of what a run draws, at each of its validations, and its share is of a default run."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import drawing_cost
from benchmarks.drawing_cost import TimedDrawing
from configs.compose import compose
from training.callbacks.validation_images import ValidationImages

PROJECT = Path(__file__).resolve().parents[2]
TINY = [
    "model.num_layers=1", "model.num_heads=2", "model.d_model=16", "model.context_length=16",
    "tokenizer=byte", "data.batch_size=2", "data.val_tokens=64", "num_validations=3",
]  # fmt: skip


@pytest.fixture
def measured(monkeypatch, tmp_path, capsys):
    """What the command prints, and the training steps at which ValidationImages drew; each drawing takes 0.2 s more."""
    corpus, drawn_at = tmp_path / "text.txt", []
    corpus.write_text("to be or not to be\n" * 200, encoding="utf-8")
    draw = ValidationImages.on_validation_end

    def slowly(self, trainer, module):
        drawn_at.append(trainer.global_step)
        time.sleep(0.2)
        draw(self, trainer, module)

    monkeypatch.setattr(ValidationImages, "on_validation_end", slowly)
    monkeypatch.setattr(drawing_cost, "STEPS", 6)
    drawing_cost.main(compose("train", [*TINY, f"data.corpus={corpus}"]))
    return capsys.readouterr().out, drawn_at


def test_every_validation_of_the_run_is_timed_whole(measured):
    out, drawn_at = measured
    result = json.loads(out.splitlines()[-1])
    assert drawn_at == [2, 4, 6]
    assert len(result["drawing_s"]) == 3 and min(result["drawing_s"]) > 0.2
    assert sum(result["drawing_s"]) < result["run_s"]
    rows = [line.split() for line in out.splitlines()[1:4]]
    assert [int(step) for _, step, _ in rows] == drawn_at
    assert [float(seconds) for *_, seconds in rows] == pytest.approx(result["drawing_s"], abs=0.001)


def test_share_is_that_of_ninety_seconds(measured):
    out, _ = measured
    result = json.loads(out.splitlines()[-1])
    assert result["share_of_default_run"] == pytest.approx(sum(result["drawing_s"]) / 90, abs=1e-4)
    (percent,) = re.findall(r"([\d.]+)% of a default run of 90 s; promised: at most 2%", out)
    # Both are rounded, each from the exact share: the one from the other might be rounded twice.
    assert float(percent) / 100 == pytest.approx(result["share_of_default_run"], abs=6e-5)


# lightning_overhead, as a user starts it, gets a signal at step 3 of its training.
STOPPED = """
import os, runpy, signal
from benchmarks import default_run

train = default_run.train

def stopped(*arguments, first, **options):
    begin = first.on_train_batch_start

    def with_signal(trainer, *rest):
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        begin(trainer, *rest)

    first.on_train_batch_start = with_signal
    train(*arguments, first=first, **options)

default_run.train = stopped
runpy.run_module("benchmarks.lightning_overhead", run_name="__main__", alter_sys=True)
"""


def test_benchmark_that_is_stopped_while_it_trains_ends_quietly_and_leaves_nothing(clean_environment, tmp_path):
    corpus, folder = tmp_path / "text.txt", tmp_path / "temporary"
    corpus.write_text("to be or not to be\n" * 200, encoding="utf-8")
    folder.mkdir()
    command = [sys.executable, "-c", STOPPED, *TINY, f"data.corpus={corpus}"]
    env = clean_environment | {"TMPDIR": str(folder)}
    finished = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=120)
    assert (finished.returncode, finished.stderr) == (128 + signal.SIGTERM, ""), finished
    assert not list(folder.glob("tmp*"))


def test_what_tensorboard_still_has_to_write_counts_only_if_it_is_ours():
    order = []

    class Recorder:
        """Stands for the trainer, its logger, its writer, and ValidationImages."""

        global_step, logger = 5, None

        def flush(self):
            order.append("flush")

        def on_validation_end(self, trainer, module):
            order.append("draw")

    recorder = Recorder()
    recorder.logger = recorder.experiment = recorder
    TimedDrawing(recorder).on_validation_end(recorder, None)
    assert order == ["flush", "draw", "flush"]
