"""What TensorBoard shows of a run, read by TensorBoard itself."""

import io
import json
import os
import re
import urllib.request

import pytest
from omegaconf import OmegaConf
from PIL import Image

VALIDATIONS = [8, 16, 24, 32, 40]
READINGS = [5, 10, 15, 20, 25, 30, 35, 40]


@pytest.fixture
def log(tiny_run, events):
    return events(tiny_run.path)


def test_every_curve_is_there_at_its_steps(log):
    steps = {tag: [event.step for event in log.Scalars(tag)] for tag in log.Tags()["scalars"]}
    for tag in ("train/loss", "train/grad_norm", "train/tokens", "memory/mb", "lr/adamw", "lr/embeddings", "lr/muon"):
        assert steps.pop(tag) == READINGS, tag
    for tag in ("speed/step_ms", "speed/tokens_per_second"):
        assert steps.pop(tag) == READINGS[1:], tag  # the first five steps are warm-up
    heads = ("entropy_min", "distance_max", "previous_max", "first_max", "induction_max")
    for tag in ("val/loss", "val/bits_per_byte", *(f"heads/{name}" for name in heads)):
        assert steps.pop(tag) == VALIDATIONS, tag
    for tag in ("final/val_loss", "final/val_bits_per_byte", "final/step_ms", "final/tokens_per_second"):
        assert steps.pop(tag) == [40], tag
    assert steps.pop("by_context_length/step_ms") == [16]  # x is the context length
    assert steps == {}


def test_learning_rates_are_those_of_the_optimizer_config_on_one_schedule(log, tiny_run):
    config = OmegaConf.load(tiny_run.path / "config.yaml").optimizer
    curves = {name: [event.value for event in log.Scalars(f"lr/{name}")] for name in ("adamw", "embeddings", "muon")}
    peaks = {"adamw": config.lr, "embeddings": config.embedding_lr, "muon": config.muon_lr}
    assert len({peaks["adamw"], peaks["embeddings"]}) == 2
    shares = [[value / peaks[name] for value in curve] for name, curve in curves.items()]
    assert max(shares[0]) == pytest.approx(1) and shares[0][-1] < 0.1
    assert shares[1] == pytest.approx(shares[0]) and shares[2] == pytest.approx(shares[0])


def test_steps_of_every_tag_grow(log):
    for kind, read in (("scalars", log.Scalars), ("images", log.Images), ("tensors", log.Tensors)):
        for tag in log.Tags()[kind]:
            steps = [event.step for event in read(tag)]
            assert steps == sorted(set(steps)), tag


def test_final_figures_are_those_of_the_summary(log, tiny_run):
    summary = tiny_run.summary
    for tag, key in (
        ("final/val_loss", "val_nats_per_token"),
        ("final/val_bits_per_byte", "val_bits_per_byte"),
        ("final/step_ms", "step_ms"),
        ("final/tokens_per_second", "tokens_per_second"),
    ):
        assert log.Scalars(tag)[-1].value == pytest.approx(summary[key], rel=1e-3), tag
    assert log.Scalars("train/tokens")[-1].value == summary["tokens"]
    assert min(event.value for event in log.Scalars("val/loss")) == pytest.approx(summary["val_nats_per_token"])


def test_pictures_and_writing_are_at_the_training_steps_of_validations(log):
    assert [event.step for event in log.Images("attention")] == VALIDATIONS
    assert [event.step for event in log.Tensors("writing/text_summary")] == VALIDATIONS


def test_picture_of_attention_is_a_png_one_can_see(log):
    for event in log.Images("attention"):
        image = Image.open(io.BytesIO(event.encoded_image_string))
        image.load()
        assert image.format == "PNG" and image.size == (event.width, event.height)
        assert 300 < image.width < 3000 and 300 < image.height < 3000
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50  # not blank


def test_image_tags_are_few_and_the_printed_command_asks_for_all_images(log, tiny_run):
    assert sorted(log.Tags()["images"]) == ["attention", "heads"]
    assert int(re.search(r"--samples_per_plugin images=(\d+)", tiny_run.stdout)[1]) >= 100


def test_logs_and_checkpoints_are_in_one_directory(tiny_run):
    (file,) = tiny_run.path.parents[1].rglob("events.out.tfevents.*")
    assert file.parent == tiny_run.path == (file.parent / "checkpoints" / "best.ckpt").parents[1]


def asked_of(address):
    """asked_of(address)(path, content) is what that TensorBoard answers."""

    def ask(path: str, content: dict | None = None) -> bytes:
        data = None if content is None else json.dumps(content).encode()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        headers = {"Content-Type": "application/json"}
        with opener.open(urllib.request.Request(f"{address}/data/{path}", data, headers), timeout=30) as answer:
            return answer.read()

    return ask


def rows_of_table(ask, *columns):
    """Rows of the table of hyperparameters, sorted and filtered by these columns."""
    request = {
        "experimentName": "",
        "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"],
        "colParams": columns,
        "startIndex": 0,
        "sliceSize": 10,
    }
    return json.loads(ask("plugin/hparams/session_groups", request)).get("sessionGroups", [])


def test_table_of_hyperparameters_sorts_and_filters_by_every_column(train_here, board, tmp_path):
    """Runs that differ in whether a value is given, a number or a word: each column has one type all the same."""
    kinds = (
        ("model=llama", "optimizer=adamw", "data.val_tokens=null"),
        ("model.attention_window=8", "trainer.gradient_clip_val=1.0", "trainer.devices=1", "compile=false"),
        ("trainer.precision=32-true", "trainer.val_check_interval=1"),
    )
    for kind in kinds:
        assert train_here(*kind, "trainer.max_steps=1", "validations=1").returncode == 0, kind
    ask = asked_of(board(tmp_path / "runs"))
    infos = json.loads(ask("plugin/hparams/experiment", {"experimentName": ""}))["hparamInfos"]
    types = {info["name"]: info["type"] for info in infos}
    assert types["model.attention_window"] == types["model.bigram_rows"] == "DATA_TYPE_FLOAT64"
    assert types["trainer.precision"] == types["compile"] == "DATA_TYPE_STRING"
    for name, kind in types.items():
        number = kind == "DATA_TYPE_FLOAT64"
        anything = (
            {"filterInterval": {"minValue": "-Infinity", "maxValue": "Infinity"}} if number else {"filterRegexp": ".*"}
        )
        for order in ("ORDER_ASC", "ORDER_DESC"):
            assert len(rows_of_table(ask, {"hparam": name, "order": order, **anything})) == len(kinds), name
    windows = [row["hparams"].get("model.attention_window") for row in rows_of_table(ask)]
    assert sorted(windows, key=str) == [8, None, None]
    few = {"hparam": "model.attention_window", "filterInterval": {"minValue": 1, "maxValue": 9}}
    assert len(rows_of_table(ask, {**few, "excludeMissingValues": True})) == 1


def test_server_shows_scalars_pictures_text_and_hyperparameters(tiny_run, board):
    ask = asked_of(board(tiny_run.path.parent))
    (run,) = json.loads(ask("runs"))
    assert run == os.path.basename(tiny_run.dir)
    scalars = json.loads(ask("plugin/scalars/tags"))[run]
    assert {"train/loss", "val/loss", "val/bits_per_byte", "lr/muon", "speed/step_ms"} < set(scalars)
    values = json.loads(ask(f"plugin/scalars/scalars?run={run}&tag=val/loss"))
    assert [step for _, step, _ in values] == VALIDATIONS
    assert sorted(json.loads(ask("plugin/images/tags"))[run]) == ["attention", "heads"]
    images = json.loads(ask(f"plugin/images/images?run={run}&tag=attention&sample=0"))
    assert [image["step"] for image in images] == VALIDATIONS
    png = ask("plugin/images/individualImage?" + images[-1]["query"])
    assert Image.open(io.BytesIO(png)).format == "PNG"
    (tag,) = json.loads(ask("plugin/text/tags"))[run]
    writing = json.loads(ask(f"plugin/text/text?run={run}&tag={tag}"))
    assert [entry["step"] for entry in writing] == VALIDATIONS and "<code>" in writing[-1]["text"]
    experiment = json.loads(ask("plugin/hparams/experiment", {"experimentName": ""}))
    names = {info["name"] for info in experiment["hparamInfos"]}
    assert {"model.num_heads", "model.context_length", "optimizer.lr", "seed", "parameters"} <= names
    (group,) = rows_of_table(ask)
    assert group["hparams"]["model.num_heads"] == 2 and group["hparams"]["model.positions"] == "rope"
    shown = {value["name"]["tag"]: value["value"] for value in group["metricValues"]}
    assert shown["final/val_loss"] == pytest.approx(tiny_run.summary["val_nats_per_token"])
