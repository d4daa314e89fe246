"""A sweep is one directory of runs, and a sweep over context lengths draws one curve."""

import csv
import json
import os
import signal
import time
from importlib.util import find_spec

import pytest
import yaml

import train
from system.errors import UserError
from system.files import relative
from training.final_metrics import FINAL_METRICS
from training.lightning_module import GPTLightning
from training.sweep import recorded_arguments


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


def results_of(sweep_dir):
    with open(sweep_dir / "results.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_sweep_ends_in_a_table_in_its_order_with_the_best_run_marked_and_in_the_same_as_a_csv(train_here):
    finished = train_here("-m", "seed=2,1", "trainer.max_steps=2", "num_validations=1")
    rows = results_of(finished.path)
    summaries = [json.loads((finished.path / row["run"] / "summary.json").read_text()) for row in rows]
    assert [row["seed"] for row in rows] == ["2", "1"] and {row["status"] for row in rows} == {"finished"}
    for row, summary in zip(rows, summaries, strict=True):
        for name in (*FINAL_METRICS, "parameters", "seconds", "steps"):
            assert float(row[name]) == pytest.approx(summary[name], nan_ok=True)
    losses = [summary["val_bits_per_byte"] for summary in summaries]
    assert [row["best"] for row in rows] == [str(int(loss == min(losses))) for loss in losses]
    heading, first, second = finished.stdout.split("\n\nas a file:")[0].splitlines()[-3:]
    assert heading.split()[0] == "seed" and "bits per byte" in heading and "seconds" in heading
    assert [line.split()[0] for line in (first, second)] == ["2", "1"]
    assert [line.endswith("best") for line in (first, second)] == [loss == min(losses) for loss in losses]
    assert f"{losses[0]:.3f}" in first
    assert "results.csv" in finished.stdout


def test_value_that_hydra_cannot_compose_fails_alone_and_is_named_at_the_end(train_here):
    finished = train_here("-m", "model.num_heads=two,4", "trainer.max_steps=2", "num_validations=1")
    assert "model.num_heads=two" in finished.error
    assert [row["status"].partition(":")[0] for row in results_of(finished.path)] == ["failed", "finished"]


def test_bug_in_one_run_leaves_the_others_and_the_exit_code_says_so(train_here, monkeypatch):
    train_as_before = train.train

    def fails_for_the_first(config, *args):
        if config.seed == 1:
            raise ZeroDivisionError("a bug")
        return train_as_before(config, *args)

    monkeypatch.setattr(train, "train", fails_for_the_first)
    finished = train_here("-m", "seed=1,2", "trainer.max_steps=2", "num_validations=1")
    assert finished.returncode == 2 and "error: seed=1: ZeroDivisionError: a bug" in finished.stderr
    assert "Traceback" in finished.stderr  # a bug, not a mistake
    assert [row["status"].partition(":")[0] for row in results_of(finished.path)] == ["failed", "finished"]


@pytest.fixture
def interrupted(train_here, monkeypatch):
    """A sweep over three seeds that Ctrl-C has stopped in the second run, at its third step."""

    def stop(settings=("seed=1,2,3",)):
        training_step = GPTLightning.training_step

        def interrupting(module, *args):
            if module.trainer.global_step == 2 and module.seed == 2:
                signal.raise_signal(signal.SIGINT)
            return training_step(module, *args)

        with monkeypatch.context() as patch:
            patch.setattr(GPTLightning, "training_step", interrupting)
            return train_here("-m", *settings, "trainer.max_steps=6", "num_validations=1")

    return stop


@pytest.mark.parametrize("choice", ["the sweep", "true"])
def test_interrupted_sweep_resumes_its_run_starts_the_others_and_skips_finished_ones(interrupted, train_here, choice):
    stopped = interrupted()
    assert stopped.returncode == 130 and "the sweep was interrupted after 1 finished run" in stopped.stderr
    assert f"resume={stopped.path}" in stopped.stderr.replace(str(relative(stopped.path)), str(stopped.path))
    first = stopped.path / "00_seed_1"
    before = {path: path.stat().st_mtime_ns for path in first.rglob("*")}
    resume = str(stopped.path) if choice == "the sweep" else "true"
    finished = train_here(f"resume={resume}", settings=())
    assert finished.returncode == 0 and finished.stderr == "", finished
    assert finished.path == stopped.path  # no other directory
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*")} == before
    assert sorted(path.name for path in stopped.path.iterdir() if path.is_dir()) == [
        "00_seed_1",
        "01_seed_2",
        "02_seed_3",
    ]
    log = (stopped.path / "01_seed_2" / "train.log").read_text()
    assert "stopped at step 3" in log and "step 6 of 6" in log
    assert [(row["seed"], row["steps"], row["status"]) for row in results_of(stopped.path)] == [
        (seed, "6", "finished") for seed in "123"
    ]
    assert "finished or in use" in train_here("resume=true", settings=()).error


def test_failed_run_of_an_interrupted_sweep_is_tried_again(interrupted, train_here):
    stopped = interrupted(("model.num_heads=5,2", "seed=1,2"))  # 5 heads do not divide the width
    assert stopped.returncode == 130 and "seed=1" in stopped.stderr
    finished = train_here(f"resume={stopped.path}", settings=())
    assert finished.returncode == 2 and "num_heads 5" in finished.stderr
    statuses = [row["status"].partition(":")[0] for row in results_of(stopped.path)]
    assert statuses == ["failed", "failed", "finished", "finished"]


def test_resumed_sweep_accepts_no_other_settings(interrupted, train_here):
    stopped = interrupted()
    error = train_here(f"resume={stopped.path}", "trainer.max_steps=9", settings=()).error
    assert "trainer.max_steps=9 cannot be set for a sweep that is resumed" in error


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"arguments": [1]}', '{"arguments": "seed=1"}', "[" * 9999])
def test_damaged_record_of_a_sweep_is_named(tmp_path, content):
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(UserError, match="sweep.json is not the record of a sweep"):
        recorded_arguments(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-m"], "List some, for example model.num_heads=2,4, or leave out -m"),
        (["-m", "seed=1"], "List some, for example model.num_heads=2,4, or leave out -m"),
        (["seed=1,2"], "add -m"),
        (["seed=range(1,3)"], "add -m"),
        (["hydra.sweeper.max_batch_size=2"], "Add -m"),
        (["-m", "optimizer.lr=interval(0.1,0.2)"], "hydra/sweeper=optuna"),
        (["-m", "seed=1,2", "hydra/launcher=nonsense"], "Choose from: basic, joblib"),
        (["-m", "seed=1,2", "hydra/sweeper=nonsense"], "Choose from: basic, optuna"),
    ],
)
def test_mistakes_around_sweeps_are_answered_in_one_line(refuse, arguments, expected):
    assert expected in refuse("train", *arguments)


@pytest.mark.skipif(find_spec("optuna") is not None, reason="hydra-optuna-sweeper is installed")
@pytest.mark.skipif(find_spec("joblib") is not None, reason="hydra-joblib-launcher is installed")
@pytest.mark.parametrize(
    ("arguments", "package"),
    [
        (["experiment=tune"], "hydra-optuna-sweeper"),
        (["-m", "seed=1,2", "hydra/sweeper=optuna"], "hydra-optuna-sweeper"),
        (["-m", "seed=1,2", "hydra/launcher=joblib"], "hydra-joblib-launcher"),
    ],
)
def test_plugin_that_is_not_installed_is_answered_with_the_command_that_installs_it(refuse, arguments, package):
    assert f"pip install {package}" in refuse("train", *arguments)


def test_joblib_runs_two_jobs_at_once_with_divided_threads_and_marked_lines(call, tiny, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs hydra-joblib-launcher")
    settings = ("seed=1,2,3", "model.num_heads=2,5", "trainer.max_steps=3", "num_validations=1")
    finished = call(
        "train.py",
        *("-m", *tiny, *settings, f"runs_dir={tmp_path}", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
        runs=tmp_path,
        timeout=300,
    )
    assert finished.returncode == 2 and finished.stderr.count("\n") == 1, finished
    assert "num_heads=5" in finished.stderr and "Traceback" not in finished.stderr
    rows = results_of(finished.path)
    assert [row["status"].partition(":")[0] for row in rows] == ["finished"] * 3 + ["failed"] * 3
    assert len({row["run"] for row in rows if row["run"]}) == 3
    for number in range(3):
        assert f"[{number:02d}] run {number}: model.num_heads=2, seed={number + 1}" in finished.stdout
        assert f"[{number:02d}] step 3: validation" in finished.stdout


def test_interrupted_joblib_sweep_saves_every_run_and_is_resumed(start, call, tiny, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs hydra-joblib-launcher")
    launcher = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    process = start(
        "train.py",
        *("-m", *tiny, "seed=1,2,3", "trainer.max_steps=400000", "num_validations=1", f"runs_dir={tmp_path}"),
        *("trainer.val_check_interval=50", *launcher),
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("*/0[01]*/checkpoints/last.ckpt"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors.decode()
    assert "Traceback" not in errors.decode() and "the sweep was interrupted after 0 finished runs" in errors.decode()
    (sweep_dir,) = tmp_path.iterdir()
    for name in ("00_seed_1", "01_seed_2"):
        assert "; saved; resume with" in (sweep_dir / name / "train.log").read_text()
    assert not (sweep_dir / "02_seed_3").exists()


def test_optuna_proposes_the_same_runs_when_an_interrupted_sweep_is_resumed(train_here, monkeypatch):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs hydra-optuna-sweeper")
    few = ("experiment=tune", "trainer.max_steps=2", "hydra.sweeper.n_trials=3")
    fit = train.fit

    def interrupting(run, trainer):
        if "01_" in str(trainer.default_root_dir):
            signal.raise_signal(signal.SIGINT)
        fit(run, trainer)

    with monkeypatch.context() as patch:
        patch.setattr(train, "fit", interrupting)
        stopped = train_here(*few)
    assert stopped.returncode == 130
    finished = train_here("resume=true", settings=())
    assert finished.returncode == 0 and finished.path == stopped.path, finished
    rows = results_of(finished.path)
    assert [row["status"] for row in rows] == 3 * ["finished"]
    assert sum(path.is_dir() for path in finished.path.iterdir()) == 3
    best = yaml.safe_load((finished.path / "optimization_results.yaml").read_text())
    assert best["best_value"] == min(float(row["val_bits_per_byte"]) for row in rows)


def test_optuna_sweep_without_any_finished_run_is_answered_with_its_error(refuse):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs hydra-optuna-sweeper")
    error = refuse("train", "experiment=tune", "hydra.sweeper.n_trials=2", "model.num_heads=5", "model.d_model=32")
    assert "num_heads 5" in error
