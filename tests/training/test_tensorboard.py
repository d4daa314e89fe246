"""What TensorBoard shows of a run, also of one that is resumed or damaged, read by TensorBoard itself."""

import io
import itertools
import json
import os
import re
import struct
import time
import urllib.request

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from PIL import Image
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from torch.utils.tensorboard import SummaryWriter

from training.final_metrics import FINAL_METRICS
from training.loggers.event_file import rewind_events

VALIDATIONS = [8, 16, 24, 32, 40]
IMAGES = ["attention/heads", "attention/heads_ablated", "attention/maps"]
READINGS = [5, 10, 15, 20, 25, 30, 35, 40]


@pytest.fixture
def log(tiny_run, events):
    return events(tiny_run.path)


def test_every_curve_is_there_at_its_steps(log):
    steps = {tag: [event.step for event in log.Scalars(tag)] for tag in log.Tags()["scalars"]}
    for tag in (
        "Loss/train",
        "Optimizer/grad_norm",
        "Progress/tokens",
        "System/memory_mb",
        "Optimizer/lr_adamw",
        "Optimizer/lr_embeddings",
        "Optimizer/lr_muon",
    ):
        assert steps.pop(tag) == READINGS, tag
    for tag in ("Speed/step_ms", "Speed/tokens_per_second"):
        assert steps.pop(tag) == READINGS[1:], tag  # the first five steps are warm-up
    heads = ("entropy_min", "distance_max", "previous_max", "first_max", "induction_max", "duplicate_max")
    for tag in ("Loss/validation", "Loss/validation_bits_per_byte", *(f"attention/{name}" for name in heads)):
        assert steps.pop(tag) == VALIDATIONS, tag
    parts = ("ablation/head_max", "ablation/mlp_max", *(f"by_layer/lens_loss_{layer}" for layer in range(3)))
    for tag in parts:
        assert steps.pop(tag) == VALIDATIONS, tag
    for name in FINAL_METRICS:
        assert steps.pop(f"final/{name}") == [40], name
    assert steps == {}


def test_loss_is_the_first_group_and_single_points_are_the_last(log):
    groups = sorted({tag.split("/")[0] for tag in log.Tags()["scalars"] + log.Tags()["images"]})  # capitals first
    assert groups[0] == "Loss" and groups[-1] == "final"


def test_learning_rates_are_those_of_the_optimizer_config_on_one_schedule(log, tiny_run):
    config = OmegaConf.load(tiny_run.path / "config.yaml").optimizer
    curves = {
        name: [event.value for event in log.Scalars(f"Optimizer/lr_{name}")] for name in ("adamw", "embeddings", "muon")
    }
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
    for name in FINAL_METRICS:
        assert log.Scalars(f"final/{name}")[-1].value == pytest.approx(summary[name], rel=1e-3), name
    assert log.Scalars("Progress/tokens")[-1].value == summary["tokens"]
    assert min(event.value for event in log.Scalars("Loss/validation")) == pytest.approx(summary["val_nats_per_token"])


def test_pictures_and_writing_are_at_the_training_steps_of_validations(log):
    assert [event.step for event in log.Images("attention/maps")] == VALIDATIONS
    assert [event.step for event in log.Tensors("sample/text_summary")] == VALIDATIONS


def test_picture_of_attention_is_a_png_one_can_see(log):
    for event in log.Images("attention/maps"):
        image = Image.open(io.BytesIO(event.encoded_image_string))
        image.load()
        assert image.format == "PNG" and image.size == (event.width, event.height)
        assert 300 < image.width < 3000 and 300 < image.height < 3000
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50  # not blank


def test_image_tags_are_few_and_the_printed_command_asks_for_all_images(log, tiny_run):
    assert sorted(log.Tags()["images"]) == IMAGES
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
        ("model.sliding_window=8", "trainer.gradient_clip_val=1.0", "trainer.devices=1", "compile=false"),
        ("trainer.precision=32-true", "trainer.val_check_interval=1"),
    )
    for kind in kinds:
        assert train_here(*kind, "trainer.max_steps=1", "num_validations=1").returncode == 0, kind
    ask = asked_of(board(tmp_path / "runs"))
    infos = json.loads(ask("plugin/hparams/experiment", {"experimentName": ""}))["hparamInfos"]
    types = {info["name"]: info["type"] for info in infos}
    assert types["model.sliding_window"] == types["model.bigram_table_size"] == "DATA_TYPE_FLOAT64"
    assert types["trainer.precision"] == types["compile"] == "DATA_TYPE_STRING"
    for name, kind in types.items():
        number = kind == "DATA_TYPE_FLOAT64"
        anything = (
            {"filterInterval": {"minValue": "-Infinity", "maxValue": "Infinity"}} if number else {"filterRegexp": ".*"}
        )
        for order in ("ORDER_ASC", "ORDER_DESC"):
            assert len(rows_of_table(ask, {"hparam": name, "order": order, **anything})) == len(kinds), name
    windows = [row["hparams"].get("model.sliding_window") for row in rows_of_table(ask)]
    assert sorted(windows, key=str) == [8, None, None]
    few = {"hparam": "model.sliding_window", "filterInterval": {"minValue": 1, "maxValue": 9}}
    assert len(rows_of_table(ask, {**few, "excludeMissingValues": True})) == 1


def test_server_shows_scalars_pictures_text_and_hyperparameters(tiny_run, board):
    ask = asked_of(board(tiny_run.path.parent))
    (run,) = json.loads(ask("runs"))
    assert run == os.path.basename(tiny_run.dir)
    scalars = json.loads(ask("plugin/scalars/tags"))[run]
    assert {
        "Loss/train",
        "Loss/validation",
        "Loss/validation_bits_per_byte",
        "Optimizer/lr_muon",
        "Speed/step_ms",
    } < set(scalars)
    values = json.loads(ask(f"plugin/scalars/scalars?run={run}&tag=Loss/validation"))
    assert [step for _, step, _ in values] == VALIDATIONS
    assert sorted(json.loads(ask("plugin/images/tags"))[run]) == [
        "attention/heads",
        "attention/heads_ablated",
        "attention/maps",
    ]
    images = json.loads(ask(f"plugin/images/images?run={run}&tag=attention/maps&sample=0"))
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
    assert shown == {f"final/{name}": pytest.approx(tiny_run.summary[name]) for name in FINAL_METRICS}


# A run that is resumed


READERS = {"one file after the other": None, "several files at once": lambda timestamp: True}  # --reload_multifile


@pytest.fixture
def clock(monkeypatch):
    """Every look at the clock is a second later: names of event files have the time in them."""
    seconds = itertools.count(1_700_000_000)
    monkeypatch.setattr(time, "time", lambda: float(next(seconds)))


def open_reader(directory, kind):
    """What TensorBoard without its data server keeps of a run, and reads on from."""
    return EventAccumulator(str(directory), event_file_active_filter=READERS[kind])


def curves(reader):
    """Steps and values of each tag that has any, as the reader has them after it looked again."""
    reader.Reload()
    points = {tag: reader.Tensors(tag) for tag in reader.Tags()["tensors"]}
    return {
        tag: [(event.step, round(float(event.tensor_proto.float_val[0]), 4)) for event in points[tag]]
        for tag in points
        if points[tag] and points[tag][0].tensor_proto.float_val
    }


def log_steps(directory, steps, value, final=None):
    with SummaryWriter(str(directory)) as writer:
        for step in steps:
            writer.add_scalar("Loss/train", value, step)
        if final is not None:
            writer.add_scalar("final/val_nats_per_token", value, final)


@pytest.mark.parametrize("kind", READERS)
def test_tensorboard_that_stays_open_follows_a_run_that_is_resumed_again_and_again(tmp_path, clock, kind):
    reader = open_reader(tmp_path, kind)
    log_steps(tmp_path, range(1, 11), 1.0, final=10)
    assert [step for step, _ in curves(reader)["Loss/train"]] == list(range(1, 11))
    expected = [(step, 1.0) for step in range(1, 7)]
    for begin, end, value in ((6, 12, 2.0), (9, 30, 3.0), (20, 21, 4.0)):
        rewind_events(tmp_path, begin)
        curves(reader)  # it may look at any moment
        log_steps(tmp_path, range(begin + 1, end + 1), value, final=end)
        expected = [point for point in expected if point[0] <= begin]
        expected += [(step, value) for step in range(begin + 1, end + 1)]
        seen = curves(reader)
        assert seen["Loss/train"] == expected
        assert seen["final/val_nats_per_token"] == [(end, value)]
        assert seen == curves(open_reader(tmp_path, kind))  # as one that is opened now
    assert len(list(tmp_path.iterdir())) == 3  # the file that was open, empty; what was kept; what came


def test_tensorboard_that_stays_open_sees_all_of_a_real_run_that_is_resumed(train_here):
    first = train_here("trainer.max_steps=10", "num_validations=2")
    reader = open_reader(first.path, "one file after the other")
    assert [step for step, _ in curves(reader)["Loss/validation"]] == [5, 10]
    resumed = train_here(f"resume={first.dir}", "trainer.max_steps=20", settings=())
    assert resumed.returncode == 0 and resumed.stderr == "", resumed
    seen = curves(reader)
    assert [step for step, _ in seen["Loss/train"]] == [5, 10, 15, 20]
    assert seen == curves(open_reader(first.path, "one file after the other"))


def test_clock_that_went_back_costs_no_point(tmp_path, clock, monkeypatch):
    log_steps(tmp_path, range(1, 6), 1.0)
    monkeypatch.setattr(time, "time", lambda: 1_600_000_000.0)
    rewind_events(tmp_path, 4)
    log_steps(tmp_path, range(5, 8), 2.0)
    points = curves(open_reader(tmp_path, "one file after the other"))["Loss/train"]
    assert points == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0), (7, 2.0)]


# Damaged files


def record(data: bytes, size: int | None = None) -> bytes:
    header = struct.pack("<Q", len(data) if size is None else size)
    return b"".join((header, struct.pack("<I", masked_crc32c(header)), data, struct.pack("<I", masked_crc32c(data))))


def events_file(directory):
    (file,) = directory.glob("events.out.tfevents.*")
    return file


def where_records_begin(content: bytes) -> list[int]:
    starts = [0]
    while starts[-1] < len(content):
        starts.append(starts[-1] + 16 + struct.unpack("<Q", content[starts[-1] : starts[-1] + 8])[0])
    return starts


@pytest.mark.parametrize("place", [0, 3, 9, 14, -2])  # in a record: two in its length, its checksum, the data, its end
def test_flipped_bit_in_an_event_costs_that_event_alone_and_is_said(tmp_path, clock, caplog, place):
    caplog.set_level("INFO")
    log_steps(tmp_path, range(1, 21), 1.0)
    file = events_file(tmp_path)
    content = bytearray(file.read_bytes())
    starts = where_records_begin(content)
    content[(starts[8] if place >= 0 else starts[9]) + place] ^= 4  # the version is record 0, so step n is record n
    file.write_bytes(content)
    rewind_events(tmp_path, 18)
    seen = curves(open_reader(tmp_path, "one file after the other"))["Loss/train"]
    assert [step for step, _ in seen] == [step for step in range(1, 19) if step != 8]
    assert f"{file} is damaged in one place" in caplog.text
    (kept,) = tmp_path.glob("damaged.*")
    assert kept.read_bytes() == content and kept.name in caplog.text and "tfevents" not in kept.name


@pytest.mark.parametrize(
    "garbage", [record(b"\xff" * 50), record(b"", size=1 << 63), record(b"", size=1 << 30), bytes(500), b"x" * 99]
)
@pytest.mark.parametrize("index", [0, 5])  # before the version, too
def test_garbage_between_events_costs_none_of_them(tmp_path, clock, caplog, garbage, index):
    caplog.set_level("INFO")
    log_steps(tmp_path, range(1, 11), 1.0)
    content = events_file(tmp_path).read_bytes()
    at = where_records_begin(content)[index]
    events_file(tmp_path).write_bytes(content[:at] + garbage + content[at:])
    rewind_events(tmp_path, 10)
    seen = curves(open_reader(tmp_path, "one file after the other"))["Loss/train"]
    assert [step for step, _ in seen] == list(range(1, 11))
    assert "is damaged in one place" in caplog.text


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_event_that_a_kill_cut_off_is_no_damage(tmp_path, clock, caplog, cut):
    caplog.set_level("INFO")
    log_steps(tmp_path, range(1, 6), 1.0)
    events_file(tmp_path).write_bytes(events_file(tmp_path).read_bytes()[:-cut])
    rewind_events(tmp_path, 5)
    seen = curves(open_reader(tmp_path, "one file after the other"))["Loss/train"]
    assert [step for step, _ in seen] == [1, 2, 3, 4][: len(seen)] and len(seen) >= 3
    assert not list(tmp_path.glob("damaged.*")) and "damaged" not in caplog.text


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_bytes_in_an_event_file_stop_a_run_from_being_resumed(tmp_path_factory, clock, data):
    directory = tmp_path_factory.mktemp("events")
    log_steps(directory, range(1, 8), 1.0)
    file = events_file(directory)
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(content)))
        piece = data.draw(st.binary(max_size=30) | st.builds(bytes, st.integers(0, 40)))
        content[at : at + data.draw(st.integers(0, 40))] = piece
    file.write_bytes(content)
    rewind_events(directory, 100)
    log_steps(directory, range(101, 103), 2.0)
    steps = [step for step, _ in curves(open_reader(directory, "one file after the other"))["Loss/train"]]
    assert steps == sorted(set(steps)) and steps[-2:] == [101, 102] and set(steps[:-2]) <= set(range(1, 8))
