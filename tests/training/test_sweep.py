"""A sweep is one directory of runs, and a sweep over context lengths draws one curve."""

import json

import pytest
import yaml

from training.final_metrics import FINAL_METRICS


@pytest.fixture
def sweep(call, tiny, tmp_path):
    """The directory of a sweep over two context lengths, and what it said, from a process of its own."""
    settings = ("model.context_length=16,8", "trainer.max_steps=10", "num_validations=1", f"runs_dir={tmp_path}")
    finished = call("train.py", "-m", *tiny, *settings, runs=tmp_path)
    assert finished.returncode == 0 and finished.stderr == "", finished
    return finished


def test_sweep_over_context_lengths_is_one_directory_with_a_curve_by_context_length(sweep, events, tmp_path):
    assert [path.name for path in tmp_path.iterdir()] == [sweep.path.name]
    runs = sorted(path.parent for path in sweep.path.glob("*/summary.json"))
    assert [run.name for run in runs] == ["00_model.context_length_16", "01_model.context_length_8"]  # what differs
    summaries = {}
    for run in runs:
        for name in ("config.yaml", "train.log", "checkpoints/best.ckpt", "checkpoints/last.ckpt"):
            assert (run / name).is_file()
        assert len(list(run.glob("events.out.tfevents.*"))) == 1
        summary = json.loads((run / "summary.json").read_text())
        config = yaml.safe_load((run / "config.yaml").read_text())
        assert config["model"]["context_length"] == summary["context_length"]
        assert summary["tokens"] == 10 * 4 * summary["context_length"]
        assert summary["seconds"] < sweep.seconds
        summaries[summary["context_length"]] = summary
    log = events(sweep.path / "by_context_length")
    for name in FINAL_METRICS:
        points = log.Scalars(f"by_context_length/{name}")
        assert [point.step for point in points] == [8, 16]
        assert [point.value for point in points] == pytest.approx([summaries[8][name], summaries[16][name]], rel=1e-5)


def test_sweep_over_something_else_has_no_curve_by_context_length(train_here):
    finished = train_here("-m", "seed=1,2", "trainer.max_steps=1", "num_validations=1")
    assert finished.returncode == 0 and finished.stderr == "", finished
    assert len(list(finished.path.glob("*/summary.json"))) == 2
    assert not (finished.path / "by_context_length").exists()


def test_recipe_of_a_sweep_sweeps_and_can_be_narrowed(train_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finished = train_here(
        "experiment=context_sweep", "model.context_length=4,8", "trainer.max_time=null", "trainer.max_steps=1"
    )
    assert finished.returncode == 0, finished
    summaries = [json.loads(path.read_text()) for path in sorted(finished.path.glob("*/summary.json"))]
    assert [summary["context_length"] for summary in summaries] == [4, 8]
    logdir = finished.stdout.splitlines()[-1].partition("--logdir ")[2].split()[0]
    assert logdir == f"runs/{finished.path.name}"  # as one would type it here
    assert list((tmp_path / logdir / "by_context_length").glob("events.*"))


@pytest.mark.parametrize("heads", ["2,5,4", "5,2"])
def test_run_of_a_sweep_that_is_refused_is_named_at_the_end_and_the_others_run(train_here, heads):
    finished = train_here("-m", f"model.num_heads={heads}", "trainer.max_steps=2", "num_validations=1")
    assert "model.num_heads=5: d_model 32 is not divisible by num_heads 5" in finished.error
    done = {path.parent.name.partition("_")[2] for path in finished.path.glob("*/summary.json")}
    assert done == {f"model.num_heads_{number}" for number in heads.split(",") if number != "5"}


def test_sweep_with_a_run_that_is_refused_still_draws_its_curves(train_here):
    finished = train_here("-m", "model.context_length=4,100000,8", "trainer.max_steps=2", "num_validations=1")
    assert finished.returncode == 2 and "model.context_length=100000: " in finished.stderr, finished
    assert (finished.path / "by_context_length").is_dir() and "by_context_length" in finished.stdout


def test_sweep_of_which_every_run_is_refused_leaves_nothing(train_here):
    finished = train_here("-m", "model.num_heads=5,7", "trainer.max_steps=2")
    lines = finished.stderr.splitlines()
    assert finished.returncode == 2 and len(lines) == 2 and finished.dir == ""
    assert lines[0].startswith("error: model.num_heads=5: ") and lines[1].startswith("error: model.num_heads=7: ")
