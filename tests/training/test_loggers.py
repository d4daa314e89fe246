"""Loggers of a run: the same names and steps in all of them, also after a run is resumed."""

import csv
import importlib.util
import time

import pytest
from tensorboard.plugins.hparams import metadata

from system.errors import UserError
from training.loggers import LOGGERS, check_loggers

SETTINGS = ("trainer.max_steps=6", "trainer.log_every_n_steps=2", "num_validations=2")


def rows(run_dir) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def points(run_dir) -> dict[str, list[tuple[int, float]]]:
    """Metric -> its (step, value), from metrics.csv."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows(run_dir):
        for name, value in row.items():
            if value and name != "step":
                found.setdefault(name, []).append((int(row["step"]), float(value)))
    return found


def test_csv_has_the_same_names_and_steps_as_tensorboard(train_here, events):
    run = train_here(*SETTINGS, "logger=[tensorboard,csv]")
    assert run.returncode == 0, run
    log, table = events(run.path), points(run.path)
    assert set(table) == set(log.Tags()["scalars"])
    for tag, values in table.items():
        expected = [(event.step, pytest.approx(event.value, rel=1e-5)) for event in log.Scalars(tag)]
        assert values == expected, tag


def test_csv_alone_writes_no_events_and_is_named_at_the_end(train_here):
    run = train_here(*SETTINGS, "logger=csv")
    assert run.returncode == 0 and not list(run.path.glob("events.*"))
    assert "metrics.csv" in run.stdout and "tensorboard" not in run.stdout


def test_no_logger_at_all_still_trains(train_here):
    run = train_here(*SETTINGS, "logger=null")
    assert run.returncode == 0 and run.summary["steps"] == 6
    assert not list(run.path.glob("events.*")) and not (run.path / "metrics.csv").exists()


def test_resumed_run_continues_metrics_csv_without_doubled_rows(train_here):
    first = train_here(*SETTINGS, "logger=csv")
    with (first.path / "metrics.csv").open("a", newline="", encoding="utf-8") as file:  # as if it had come further
        csv.DictWriter(file, list(rows(first.path)[0])).writerow({"Loss/train": 1.0, "step": 8})
    resumed = train_here(f"resume={first.path}", "trainer.max_steps=10", settings=())
    assert resumed.returncode == 0, resumed
    for name, values in points(first.path).items():
        steps = [step for step, _ in values]
        assert steps == sorted(set(steps)), name
    assert [step for step, _ in points(first.path)["Loss/train"]] == [2, 4, 6, 8, 10]
    assert [step for step, _ in points(first.path)["final/val_nats_per_token"]] == [10]


def test_resumed_run_keeps_its_loggers_unless_others_are_set(train_here):
    first = train_here(*SETTINGS, "logger=csv")
    train_here(f"resume={first.path}", "trainer.max_steps=8", settings=())
    assert not list(first.path.glob("events.*"))
    changed = train_here(f"resume={first.path}", "trainer.max_steps=10", "logger=tensorboard", settings=())
    assert changed.returncode == 0 and list(first.path.glob("events.*"))
    assert points(first.path)["Loss/train"][-1][0] == 8


def test_loggers_can_be_swept_over(train_here):
    sweep = train_here(*SETTINGS, "-m", "logger=csv,tensorboard")
    assert sweep.returncode == 0, sweep
    assert [len(list(sweep.path.glob(pattern))) for pattern in ("*/metrics.csv", "*/events.*")] == [1, 1]


@pytest.mark.parametrize("argument", ["logger=nonsense", "logger=[csv,nonsense]", "logger=true"])
def test_unknown_logger_is_rejected_with_the_known_ones(refuse, argument):
    error = refuse("train", argument)
    assert "logger" in error and ("csv, mlflow, tensorboard, wandb" in error or "configs/logger/" in error)


def test_logger_that_is_not_installed_is_answered_with_the_install_command(refuse, monkeypatch):
    monkeypatch.setattr("training.loggers.find_spec", lambda name: None)
    assert "pip install wandb" in refuse("train", "logger=wandb")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"nonsense": {}}, "logger='nonsense' is unknown"),
        ({"csv": {"file": "x"}}, "unknown key logger.csv.file"),
        ({"wandb": {"offline": "no"}}, "logger.wandb.offline is 'no'"),
        ("csv", "must be one or more"),
    ],
)
def test_invalid_logger_config_is_one_line(config, named, monkeypatch):
    monkeypatch.setattr("training.loggers.find_spec", lambda name: name)
    with pytest.raises(UserError, match=named):
        check_loggers(config)


def test_option_of_the_trainer_names_the_key_to_use(refuse):
    assert "Use logger=csv" in refuse("train", "trainer.logger=false")


def hparam_columns(events, run_dir) -> list[str]:
    """The columns that TensorBoard's HParams shows: the first five, those that differ between runs before others."""
    data = events(run_dir).SummaryMetadata(metadata.EXPERIMENT_TAG).plugin_data.content
    infos = metadata.parse_experiment_plugin_data(data).hparam_infos
    return [info.name for info in sorted(infos, key=lambda info: (not info.differs, info.name))][:5]


def test_hparams_show_swept_keys_first(train_here, events):
    sweep = train_here(*SETTINGS, "-m", "model.num_heads=1,2", "optimizer.weight_decay=0.0,0.1")
    first = sorted(sweep.path.glob("*/summary.json"))[0].parent
    assert hparam_columns(events, first)[:2] == ["model.num_heads", "optimizer.weight_decay"]


def test_hparams_of_a_single_run_show_the_keys_that_were_set(train_here, events):
    run = train_here(*SETTINGS, "model.num_heads=1", "optimizer.weight_decay=0.3")
    infos = metadata.parse_experiment_plugin_data(
        events(run.path).SummaryMetadata(metadata.EXPERIMENT_TAG).plugin_data.content
    ).hparam_infos
    assert {"model.num_heads", "optimizer.weight_decay"} <= {info.name for info in infos if info.differs}


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow: pip install mlflow")
def test_mlflow_has_the_same_names_and_steps_and_a_resumed_run_keeps_its_id(train_here, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = train_here(*SETTINGS, "logger=[csv,mlflow]")
    assert run.returncode == 0, run
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run.path.parent / 'mlflow.db'}")
    run_id = (run.path / "mlflow_run_id").read_text(encoding="utf-8")
    for name, values in points(run.path).items():
        history = [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]
        assert [step for step, _ in history] == [step for step, _ in values], name
    logged = client.get_run(run_id)
    assert logged.info.status == "FINISHED" and logged.info.run_name == run.path.name
    assert logged.data.params["model.num_layers"] == "2.0"
    assert {"images", "sample"} <= {artifact.path for artifact in client.list_artifacts(run_id)}
    resumed = train_here(f"resume={run.path}", "trainer.max_steps=8", settings=())
    assert resumed.returncode == 0, resumed
    assert client.get_metric_history(run_id, "Loss/train")[-1].step == 8
    assert len(client.search_runs([logged.info.experiment_id])) == 1


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb: pip install wandb")
def test_wandb_offline_has_the_same_names_and_steps_and_a_resumed_run_keeps_its_id(train_here, monkeypatch, tmp_path):
    import wandb

    logged, log = [], wandb.Run.log

    def spy(run, data, *args, **kwargs):
        logged.append(dict(data))
        return log(run, data, *args, **kwargs)

    monkeypatch.setattr(wandb.Run, "log", spy)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = train_here(*SETTINGS, "logger=[csv,wandb]", "logger.wandb.offline=true")
    assert run.returncode == 0, run
    for name, values in points(run.path).items():
        assert [data["trainer/global_step"] for data in logged if name in data] == [step for step, _ in values], name
    assert sum("sample" in data for data in logged) == 2
    run_id = (run.path / "wandb_run_id").read_text(encoding="utf-8")
    (folder,) = tmp_path.glob(f"wandb/offline-run-*-{run_id}")
    assert len(list(folder.glob("files/media/images/attention/*.png"))) == 6
    time.sleep(1)  # the names of wandb's folders have seconds
    resumed = train_here(f"resume={run.path}", "trainer.max_steps=8", settings=())
    assert resumed.returncode == 0, resumed
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{run_id}"))) == 2


def test_every_logger_has_a_file_with_its_options():
    from omegaconf import OmegaConf

    from configs.defaults import CONFIG_DIR

    for name, registered in LOGGERS.items():
        (options,) = OmegaConf.load(CONFIG_DIR / "logger" / f"{name}.yaml").values()
        assert set(options) == set(registered.options), name
