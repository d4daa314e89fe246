"""A run that was stopped goes on as if nothing had happened, and nothing else is taken for it."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from analysis.recording import load_curve, load_validations
from checkpoint.checkpoint import load_checkpoint
from checkpoint.io import read_checkpoint
from tests.conftest import write_text
from training.lightning_module import GPTLightning

CURVES = ("Loss/train", "Optimizer/grad_norm", "Progress/tokens", "Loss/validation", "Loss/validation_bits_per_byte")


def content_of(run, name="last.ckpt"):
    return torch.load(run.path / "checkpoints" / name, map_location="cpu", weights_only=True)


def curves(events, run):
    log = events(run.path)
    rates = [tag for tag in log.Tags()["scalars"] if tag.startswith("Optimizer/lr_")]
    return {tag: [(event.step, event.value) for event in log.Scalars(tag)] for tag in (*CURVES, *rates)}


def recorded(run):
    """What the report shows, without the times: of every validation, and of the training curve."""
    validations, notes = load_validations(run.path)
    rows, more_notes = load_curve(run.path)
    arrays = [[getattr(each, name).tolist() for name in each.ARRAYS] for each in validations]
    facts = [(each.step, each.tokens, each.nats_per_token, each.text, each.labels) for each in validations]
    return arrays, facts, [(row["step"], row["tokens"], row["loss"]) for row in rows], notes, more_notes


def equal(a, b):
    """The same plain values and the same bits, in whatever they are nested."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.fixture
def stopped_after(train_here, monkeypatch):
    """stopped_after(batches, *overrides) is a run that gets Ctrl-C while it trains on its batches + 1st batch."""

    def stopped(batches, *overrides, number=signal.SIGINT, **options):
        step = GPTLightning.training_step

        def interrupted(self, batch, batch_idx):
            if self.batches_done == batches:
                os.kill(os.getpid(), number)
            return step(self, batch, batch_idx)

        with monkeypatch.context() as patch:
            patch.setattr(GPTLightning, "training_step", interrupted)
            finished = train_here(*overrides, **options)
        assert finished.returncode == 128 + number, finished
        assert (finished.path / "report.html").is_file() == any(finished.path.glob("recording/step-*.npz"))
        return finished

    return stopped


def assert_same_run(events, one, other):
    a, b = content_of(one), content_of(other)
    for key in ("state_dict", "optimizer_states", "gpt", "global_step", "epoch"):
        assert equal(a[key], b[key]), key
    assert curves(events, one) == curves(events, other)
    assert recorded(one) == recorded(other) and (other.path / "report.html").is_file()
    best, other_best = (load_checkpoint(run.path / "checkpoints/best.ckpt") for run in (one, other))
    assert best.step == other_best.step and best.validation == other_best.validation
    assert equal(best.network.state_dict(), other_best.network.state_dict())
    figures = ("val_nats_per_token", "val_bits_per_byte", "steps", "tokens", "best_step")
    assert all(one.summary[name] == other.summary[name] for name in figures)


EPOCHS = ("tokenizer=byte", "tokenizer.vocab_size=null", "data.batch_size=24", "trainer.max_epochs=3")  # of 11 batches
ADAMW = ("optimizer=adamw", "model.dropout=0.2")
BFLOAT16 = "trainer.precision=bf16-matmul"  # on machines without units for it too
ACCUMULATING = ("trainer.max_steps=8", "trainer.accumulate_grad_batches=4", "trainer.val_check_interval=6")


@pytest.mark.parametrize(
    ("settings", "stops"),
    [
        (("trainer.max_steps=20",), (0, 9)),
        (("trainer.max_steps=20", "trainer.precision=32-true"), (3,)),  # a validation is due after this step
        pytest.param(("trainer.max_steps=20",), (4,), marks=pytest.mark.soak),  # has just been done
        (("trainer.max_steps=20", *ADAMW), (7, 8)),
        (("trainer.max_steps=20", "model=llama", "trainer.gradient_clip_val=0.5", BFLOAT16), (13,)),
        ((*ACCUMULATING, *ADAMW), (5, 14)),  # in the middle of a step
        (ACCUMULATING, (11, 17)),  # in a step's last batch, a validation after it; in the middle, a validation after it
        (EPOCHS, (10, 16)),  # in the last batch of an epoch, and within one
        pytest.param((*EPOCHS, "trainer.accumulate_grad_batches=4"), (9, 15, 35), marks=pytest.mark.soak),
        (("trainer.max_epochs=4", "trainer.limit_train_batches=5", "num_validations=3"), (4, 7, 12)),
        pytest.param(
            *(("trainer.max_steps=12", "trainer.overfit_batches=3", "trainer.val_check_interval=0.7"), (1, 6)),
            marks=pytest.mark.soak,
        ),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(train_here, stopped_after, events, settings, stops):
    settings = (*settings, "trainer.log_every_n_steps=3")
    whole = train_here(*settings)
    stopped = stopped_after(stops[0], *settings)
    for batches in stops[1:]:
        stopped_after(batches, f"resume={stopped.dir}", settings=())
    resumed = train_here(f"resume={stopped.dir}", settings=())
    assert resumed.returncode == 0 and resumed.stderr == "", resumed
    assert resumed.dir == stopped.dir
    assert_same_run(events, whole, resumed)


def constant(*settings):
    """A learning rate that does not know how long the run is."""
    return (*settings, "optimizer.warmup_fraction=0", "optimizer.cooldown_fraction=0", "trainer.log_every_n_steps=1")


@pytest.mark.parametrize(
    ("bound", "interval"),
    [(("trainer.max_steps=12", "trainer.max_steps=23"), 5), (("trainer.max_epochs=1", "trainer.max_epochs=2"), 4)],
)
def test_extended_run_is_the_longer_one_bit_for_bit(train_here, events, bound, interval):
    settings = constant(
        "tokenizer=byte", "tokenizer.vocab_size=null", "data.batch_size=24", f"trainer.val_check_interval={interval}"
    )
    short, long = bound
    whole = train_here(*settings, long)
    finished = train_here(*settings, short)
    extended = train_here(f"resume={finished.dir}", long, settings=())
    assert extended.returncode == 0, extended
    assert f"changed: {short.replace('=', ' ')} -> {long.partition('=')[2]}" in extended.stdout.replace("\n", " ")
    a, b = content_of(whole), content_of(extended)
    assert equal(a["state_dict"], b["state_dict"]) and equal(a["optimizer_states"], b["optimizer_states"])
    expected, found = curves(events, whole), curves(events, extended)
    for name in ("Loss/train", "Optimizer/grad_norm", "Optimizer/lr_muon"):
        assert found[name] == expected[name], name
    steps = {step for step, _ in found["Loss/validation"]}
    assert steps >= {step for step, _ in expected["Loss/validation"]}  # and where the short run ended
    assert [event.step for event in events(extended.path).Scalars("final/val_nats_per_token")] == [max(steps)]
    assert extended.summary["steps"] == whole.summary["steps"] and extended.summary["tokens"] == whole.summary["tokens"]


def test_finished_run_says_what_to_raise(train_here):
    finished = train_here("trainer.max_steps=2")
    error = train_here(f"resume={finished.dir}", settings=()).error
    assert "is finished: trainer.max_steps=2 is reached" in error and "larger trainer.max_steps" in error
    assert "has done 2" in train_here(f"resume={finished.dir}", "trainer.max_steps=1", settings=()).error
    assert finished.summary["steps"] == 2  # still finished


@pytest.mark.parametrize(
    ("ended_by", "also", "expected"),
    [
        (
            "max_steps=6",
            "max_epochs=9",
            ["max_steps=6 is reached", "6 steps", "max_steps=-1 so that only trainer.max_"],
        ),
        (
            "max_steps=6",
            "max_time=5m",
            ["max_steps=6 is reached", "larger trainer.max_steps", "only trainer.max_time"],
        ),
        ("max_epochs=1", "max_steps=900", ["max_epochs=1 is reached", "1 epoch ", "trainer.max_epochs=-1"]),
        ("max_time=0.1s", "max_steps=90000", ["max_time=0.1s is reached", "s of training", "trainer.max_time=auto"]),
        ("max_epochs=2", "max_epochs=1", ["max_epochs=1 is reached", "2 epochs", "larger trainer.max_epochs."]),
        ("max_time=0.2s", "max_time=0.1s", ["max_time=0.1s is reached", "larger trainer.max_time."]),
    ],
)
def test_bound_that_was_reached_is_named_where_another_one_is_given(train_here, ended_by, also, expected):
    finished = train_here(f"trainer.{ended_by}", "trainer.limit_train_batches=4", "num_validations=1")
    before = {path: path.stat().st_mtime_ns for path in finished.path.rglob("*")}
    error = train_here(f"resume={finished.dir}", f"trainer.{also}", settings=()).error
    assert all(part in error for part in ["nothing is left to train", *expected]), error
    assert {path: path.stat().st_mtime_ns for path in finished.path.rglob("*")} == before  # still finished


def test_bound_that_was_reached_can_be_replaced_by_another_one(train_here):
    finished = train_here("trainer.max_steps=6", "trainer.limit_train_batches=4")
    resumed = train_here(f"resume={finished.dir}", "trainer.max_steps=-1", "trainer.max_epochs=2", settings=())
    assert resumed.returncode == 0 and resumed.summary["steps"] == 8, resumed


@pytest.mark.parametrize("bound", ["trainer.max_time=20s", "budget=26s"])
def test_time_already_used_counts_and_the_schedule_goes_on_from_its_share(
    train_here, stopped_after, tiny, events, clock, bound
):
    settings = (bound, "optimizer.warmup_fraction=0", "optimizer.cooldown_fraction=1", "trainer.log_every_n_steps=1")
    stopped = stopped_after(30, *settings, settings=tuple(setting for setting in tiny if "vocab" not in setting))
    used = content_of(stopped)["run"]
    before = events(stopped.path).Scalars("Optimizer/lr_muon")[-2:]  # in steps of 0.25 s
    resumed = train_here(f"resume={stopped.dir}", settings=())
    assert resumed.returncode == 0, resumed
    rates = {event.step: event.value for event in events(resumed.path).Scalars("Optimizer/lr_muon")}
    fall = before[0].value - before[1].value
    assert rates[before[1].step + 1] == pytest.approx(before[1].value - fall, abs=fall)  # goes on falling from there
    assert rates[max(rates)] < 2 * fall
    after = content_of(resumed)["run"]
    assert 0 < used["train_seconds"] < 10 and after["train_seconds"] == pytest.approx(20, abs=1.5)
    assert resumed.summary["seconds"] == pytest.approx(clock.now, abs=1)


def test_budget_that_is_used_up_is_refused_and_a_larger_one_adds_the_difference(train_here, tiny, clock):
    settings = tuple(setting for setting in tiny if "vocab" not in setting)
    finished = train_here("budget=20s", settings=settings)
    assert finished.returncode == 0, finished
    before = content_of(finished)["run"]
    error = train_here(f"resume={finished.dir}", "budget=15s", settings=()).error
    assert "budget=15s is used up" in error
    extended = train_here(f"resume={finished.dir}", "budget=24s", settings=())
    after = content_of(extended)["run"]
    assert after["max_time"] == pytest.approx(before["max_time"] + 4, abs=0.5)
    assert after["train_seconds"] == pytest.approx(before["train_seconds"] + 4, abs=0.5)


# Which run, and where


def test_resume_true_goes_on_with_the_newest_unfinished_run(train_here, stopped_after):
    stopped_after(3, "trainer.max_steps=9")
    newer = stopped_after(2, "trainer.max_steps=6")
    finished = train_here("trainer.max_steps=2")
    resumed = train_here("resume=true", settings=())
    assert resumed.returncode == 0 and f"resuming {newer.dir} at step 3" in resumed.stdout
    summary = newer.summary
    assert summary["steps"] == 6 and finished.summary["steps"] == 2
    train_here("resume=true", settings=())
    error = train_here("resume=true", settings=()).error
    assert "finished or in use" in error and "train.py, or extend" in error


def test_resume_true_rather_takes_a_run_that_saved_something(train_here, stopped_after, tmp_path):
    saved = stopped_after(3, "trainer.max_steps=6")
    failed = tmp_path / "runs" / "failed before its first checkpoint"
    failed.mkdir()
    shutil.copy(saved.path / "config.yaml", failed)
    for run_dir in (saved.path, failed):
        resumed = train_here("resume=true", settings=())
        assert resumed.returncode == 0 and (run_dir / "summary.json").is_file(), resumed


def test_run_directory_that_was_moved_goes_on_and_keeps_its_best(
    train_here, stopped_after, tiny_run, tmp_path, monkeypatch
):
    rising = (
        "optimizer.lr=1.0",
        "optimizer.muon_lr=1.0",
        "optimizer.warmup_fraction=1",
        "optimizer.cooldown_fraction=0",
    )
    settings = (f"init_from={tiny_run.dir}", *rising, "trainer.max_steps=12", "trainer.val_check_interval=4")
    stopped = stopped_after(5, *settings)  # with such rates the first validation is the best
    moved = tmp_path / "elsewhere" / "a=b"
    moved.parent.mkdir()
    shutil.move(stopped.dir, moved)
    monkeypatch.chdir(tmp_path)
    resumed = train_here("resume=elsewhere/a=b", settings=())
    assert resumed.returncode == 0 and not list((tmp_path / "runs").iterdir()), resumed
    best, last = (load_checkpoint(moved / "checkpoints" / name) for name in ("best.ckpt", "last.ckpt"))
    assert best.step == 4 and last.step == 12
    assert sorted(path.name for path in moved.iterdir())[0] == "checkpoints" and (moved / "summary.json").is_file()


def test_run_that_was_stopped_before_its_first_checkpoint_begins_anew_in_its_directory(train_here, events, tmp_path):
    whole = train_here("trainer.max_steps=6")
    begun = tmp_path / "runs" / "begun"
    (begun / "checkpoints").mkdir(parents=True)
    shutil.copy(whole.path / "config.yaml", begun)
    shutil.copy(next(whole.path.glob("events*")), begun)
    (begun / "checkpoints" / "half.tmp").write_bytes(b"half")
    resumed = train_here(f"resume={begun}", settings=())
    assert resumed.returncode == 0 and resumed.dir == str(begun), resumed
    assert_same_run(events, whole, resumed)
    assert not list(begun.rglob("*.tmp"))


def test_resume_is_neither_swept_nor_a_new_beginning(refuse, tiny_run):
    assert "Leave out -m" in refuse("train", "-m", f"resume={tiny_run.dir}", "trainer.max_steps=50,60")
    assert "Leave one out" in refuse("train", f"resume={tiny_run.dir}", f"init_from={tiny_run.dir}")


@pytest.mark.parametrize("choice", ["nowhere", "."])
def test_what_is_no_run_directory_is_refused(refuse, choice):
    error = refuse("train", f"resume={choice}")
    assert f"resume={choice}" in error and "config.yaml" in error


# A run directory that came from elsewhere


@pytest.fixture
def received(tiny_run, tmp_path):
    """A copy of a finished run's directory, which a test may spoil."""
    return Path(shutil.copytree(tiny_run.dir, tmp_path / "received"))


@pytest.mark.parametrize("value", ["${new_sweep_dir:PLACE}", "a ${oc.env:HOME}", "\\\\${seed}", ["${oc.env:HOME}"]])
@pytest.mark.parametrize("key", ["budget", "data.corpus", "trainer.precision", "model.d_model"])
def test_config_of_a_run_is_never_computed(train_here, received, tmp_path, key, value):
    place = tmp_path / "made"
    value = [value[0]] if isinstance(value, list) else value.replace("PLACE", str(place))
    config = yaml.safe_load((received / "config.yaml").read_text())
    node = config
    for name in key.split(".")[:-1]:
        node = node[name]
    node[key.split(".")[-1]] = value
    (received / "config.yaml").write_text(yaml.safe_dump(config))
    before = {path: path.stat().st_mtime_ns for path in received.rglob("*")}
    error = train_here(f"resume={received}", "trainer.max_steps=50", settings=()).error
    assert "which is an interpolation" in error and "config.yaml" in error
    assert {path: path.stat().st_mtime_ns for path in received.rglob("*")} == before and not place.exists()


def test_saved_config_has_values_and_text_that_looks_like_a_computation_stays_text(train_here, tmp_path, tiny):
    text = write_text(tmp_path / "a ${oc.env:HOME} b.txt", 120)
    settings = (*(s for s in tiny if not s.startswith(("data.corpus", "data.batch"))), f"data.corpus={text}")
    run = train_here("data.batch_size=${model.num_heads}", "trainer.max_steps=2", settings=settings)
    assert run.returncode == 0, run
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    assert config["data"]["batch_size"] == 2
    resumed = train_here(f"resume={run.dir}", "trainer.max_steps=4", settings=())
    assert resumed.returncode == 0 and resumed.summary["steps"] == 4, resumed
    assert OmegaConf.load(run.path / "config.yaml").data.corpus == str(text)


def test_config_in_which_the_vocabulary_is_a_gap_resumes(train_here, received):
    path = received / "config.yaml"  # as earlier versions wrote it
    assert "vocab_size: null" in path.read_text().partition("context_length")[0]
    path.write_text(path.read_text().replace("vocab_size: null", "vocab_size: ???", 1))
    resumed = train_here(f"resume={received}", "trainer.max_steps=42", settings=())
    assert resumed.returncode == 0 and "resuming" in resumed.stdout, resumed
    assert "vocab_size: null" in path.read_text().partition("context_length")[0]


def test_a_change_is_checked_with_the_runs_other_values_and_not_with_the_defaults(train_here):
    run = train_here("trainer.max_steps=2", "optimizer.cooldown_fraction=0.1")
    error = train_here(f"resume={run.path}", "optimizer.warmup_fraction=0.95", "trainer.max_steps=4", settings=()).error
    assert "optimizer.warmup_fraction 0.95 and optimizer.cooldown_fraction 0.1" in error
    resumed = train_here(f"resume={run.path}", "optimizer.warmup_fraction=0.9", "trainer.max_steps=4", settings=())
    assert resumed.returncode == 0 and resumed.stderr == "", resumed  # with the default's 0.5 it would be too much


def test_few_lines_that_would_fill_the_memory_are_refused(train_here, received):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    (received / "config.yaml").write_text("\n".join(lines))
    assert "aliases" in train_here(f"resume={received}", settings=()).error
    (received / "config.yaml").write_text("# " + "x" * (1 << 20))
    assert "bytes" in train_here(f"resume={received}", settings=()).error


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 30_000, "- " * 30_000, "? " * 30_000, "a: " + "{a: " * 15_000], ids=lambda text: text[:6]
)
def test_config_of_a_run_that_is_nested_deep_is_refused_at_once(train_here, received, text):
    (received / "config.yaml").write_text(text)
    refused = train_here(f"resume={received}", settings=())
    assert "deep" in refused.error and refused.seconds < 20


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("data.batch_size", 8, "data.batch_size is 8, was 4"),
        ("data.val_fraction", 0.2, "data.val_fraction is 0.2, was 0.1"),
        ("seed", 5, "seed is 5, was 0"),
        ("optimizer.name", "adamw", "optimizer.name is 'adamw', was 'muon'"),
        ("tokenizer.kind", "byte", "tokenizer.kind is 'byte', was 'bpe'"),
        ("model.num_layers", 3, "model.num_layers is 3, in the checkpoint 2"),
        ("model.d_model", 64, "model.d_model is 64, in the checkpoint 32"),
        ("model", None, "model"),
        ("trainer", None, "trainer"),
        ("data", 5, "data"),
        ("seed", None, "seed"),
        ("trainer.max_steps", "???", "trainer.max_steps"),
        ("data.corpus", "x" * 20_000, "a text of 20,000 characters"),
        ("optimizer.beta1", "many", "many"),
    ],
)
def test_config_of_a_run_that_was_edited_is_refused_by_name_and_nothing_is_touched(
    train_here, received, key, value, named
):
    config = yaml.safe_load((received / "config.yaml").read_text())
    group, _, name = key.rpartition(".")
    (config[group] if group else config)[name] = value
    (received / "config.yaml").write_text(yaml.safe_dump(config))
    before = {path: path.stat().st_mtime_ns for path in received.rglob("*")}
    longer = () if "trainer" in key else ("trainer.max_steps=50",)
    error = train_here(f"resume={received}", *longer, settings=()).error
    assert named in error and len(error) < 1000
    assert {path: path.stat().st_mtime_ns for path in received.rglob("*")} == before


def test_number_too_long_to_be_written_is_refused_in_few_characters(train_here, received):
    path = received / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 0x" + "f" * 10_000))
    error = train_here(f"resume={received}", settings=()).error
    assert "a number of 40,000 bits" in error and len(error) < 1000


def test_checkpoint_of_an_earlier_version_without_settings_is_resumed(train_here, received):
    path = received / "checkpoints" / "last.ckpt"
    content = read_checkpoint(path)
    assert content["run"].pop("settings")["data.batch_size"] == 4
    torch.save(content, path)
    resumed = train_here(f"resume={received}", "trainer.max_steps=42", settings=())
    assert resumed.returncode == 0 and load_checkpoint(path).step == 42, resumed


@pytest.mark.parametrize("name", ["train.log", "config.tmp", "checkpoints", "summary.tmp", "checkpoints/last.tmp"])
def test_links_out_of_a_run_directory_are_refused_and_what_they_lead_to_stays(train_here, received, tmp_path, name):
    outside = tmp_path / "outside"
    shutil.copytree(received / "checkpoints", outside / "checkpoints")
    (outside / "checkpoints" / "mine.tmp").write_text("mine")
    (outside / "mine").write_text("mine")
    link = received / name
    shutil.rmtree(link) if link.is_dir() else link.unlink(missing_ok=True)
    link.symlink_to(outside / "checkpoints" if name == "checkpoints" else outside / "mine")
    error = train_here(f"resume={received}", "trainer.max_steps=50", settings=()).error
    assert str(link) in error and "not a regular file" in error
    assert (outside / "mine").read_text() == (outside / "checkpoints" / "mine.tmp").read_text() == "mine"


def test_directory_of_a_run_in_progress_is_not_taken(start, train_here, tiny, tmp_path):
    process = start("train.py", *tiny, "trainer.max_time=60s", f"runs_dir={tmp_path / 'runs'}")
    try:
        for line in process.stdout:
            if line.startswith(b"a uniform guess"):
                break
        (run_dir,) = (tmp_path / "runs").iterdir()
        assert "another process is training" in train_here(f"resume={run_dir}", settings=()).error
        assert "in use" in train_here("resume=true", settings=()).error
    finally:
        process.kill()
        process.communicate()


# What can change


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("model.num_layers=3", "model.num_layers 2 -> 3"),
        ("model=llama", "model.positions learned -> rope"),
        ("tokenizer=byte", "tokenizer.kind bpe -> byte"),
        ("tokenizer.vocab_size=400", "tokenizer.vocab_size 300 -> 400"),
        ("data.batch_size=8", "data.batch_size 4 -> 8"),
        ("seed=5", "seed 0 -> 5"),
        ("optimizer=adamw", "optimizer.name muon -> adamw"),
    ],
)
def test_what_can_not_change_is_refused_by_name_with_both_values(train_here, tiny_run, tmp_path, setting, named):
    run_dir = tmp_path / "run"
    shutil.copytree(tiny_run.dir, run_dir)
    before = sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*"))
    if setting == "model=llama":
        named = named.replace("learned", OmegaConf.load(run_dir / "config.yaml").model.positions)
        named = "model." if "rope -> rope" in named else named
    error = train_here(f"resume={run_dir}", setting, settings=()).error
    assert named in error and "cannot be resumed with" in error
    assert before == sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*"))


def test_what_changes_is_said_and_done(train_here, stopped_after, events):
    stopped = stopped_after(7, *constant("trainer.max_steps=12"))
    changed = ("optimizer.lr=0.001", "optimizer.weight_decay=0.5", "trainer.gradient_clip_val=1.0")
    resumed = train_here(f"resume={stopped.dir}", *changed, settings=())
    assert "changed: optimizer.lr 0.003 -> 0.001, optimizer.weight_decay 0.1 -> 0.5, " in resumed.stdout
    assert "trainer.gradient_clip_val null -> 1.0" in resumed.stdout
    rates = dict(curves(events, resumed)["Optimizer/lr_adamw"])
    assert rates[8] == pytest.approx(0.003) and rates[9] == pytest.approx(0.001)
    groups = content_of(resumed)["optimizer_states"][0]["param_groups"]
    assert {group["weight_decay"] for group in groups} == {0.5}
    assert OmegaConf.load(resumed.path / "config.yaml").optimizer.weight_decay == 0.5


def test_text_is_compared_by_what_it_says(train_here, stopped_after, tmp_path, text_file):
    stopped = stopped_after(3, "trainer.max_steps=5")
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text().replace("king", "kong"))
    error = train_here(f"resume={stopped.dir}", f"data.corpus={other}", settings=()).error
    assert "data.corpus is not the text the run was trained on" in error and error.count("…") == 2
    shutil.copy(text_file, other)
    assert train_here(f"resume={stopped.dir}", f"data.corpus={other}", settings=()).returncode == 0


# Old weights, new run


def test_new_run_begins_with_old_weights(train_here, tiny_run, events):
    begun = train_here(f"init_from={tiny_run.dir}", *constant("trainer.max_steps=3"))
    assert begun.returncode == 0 and begun.dir != tiny_run.dir, begun
    (step, loss), *_ = curves(events, begun)["Loss/train"]
    assert step == 1 and loss < curves(events, tiny_run)["Loss/train"][0][1] - 1
    assert begun.summary["steps"] == 3


def test_new_run_takes_network_and_tokenizer_of_the_old_weights(train_here, tiny_run, tmp_path):
    text = tmp_path / "new.txt"
    text.write_text("Now is the winter of our discontent made glorious summer by this sun of York. " * 20)
    settings = (f"data.corpus={text}", "trainer.max_steps=2", "data.batch_size=2", "trainer.accelerator=cpu")
    begun = train_here(f"init_from={tiny_run.path / 'checkpoints/best.ckpt'}", *settings, settings=())
    assert begun.returncode == 0, begun
    old, new = (content_of(run, "best.ckpt")["gpt"] for run in (tiny_run, begun))
    assert old["model"] == new["model"] and old["tokenizer"] == new["tokenizer"]


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("model.num_layers=3", "model.num_layers is 3, in the checkpoint 2"),
        ("tokenizer=byte tokenizer.vocab_size=null", "model.vocab_size is 256, in the checkpoint 300"),
    ],
)
def test_old_weights_of_another_network_are_refused_by_name(refuse, tiny, tiny_run, setting, named):
    assert named in refuse("train", *tiny, f"init_from={tiny_run.dir}", *setting.split(), "trainer.max_steps=2")


def test_file_with_only_weights_is_not_resumed(train_here, tiny_run):
    best = tiny_run.path / "checkpoints/best.ckpt"
    error = train_here(f"resume={best}", "trainer.max_steps=50", settings=()).error
    assert "only has weights" in error and f"init_from={best}" in error


# The curves


def test_every_tag_grows_and_hyperparameters_are_there_once(train_here, stopped_after, events):
    settings = ("trainer.max_steps=10", "trainer.log_every_n_steps=2")
    stopped = stopped_after(3, *settings)
    stopped_after(6, f"resume={stopped.dir}", settings=())
    train_here(f"resume={stopped.dir}", settings=())
    extended = train_here(f"resume={stopped.dir}", "trainer.max_steps=14", settings=())
    log = events(extended.path)
    for kind, read in (("scalars", log.Scalars), ("images", log.Images), ("tensors", log.Tensors)):
        for tag in log.Tags()[kind]:
            steps = [event.step for event in read(tag)]
            assert steps == sorted(set(steps)), tag
    assert [event.step for event in log.Scalars("Loss/train")] == [2, 4, 6, 8, 10, 12, 14]
    rows = b"".join(path.read_bytes() for path in extended.path.glob("events*")).count(b"_hparams_/session_start_info")
    assert rows == 1
