"""The dial `budget=5m`: what is picked for how long, what stays as it was given, and when a run ends."""

import math
import random
import re
from datetime import timedelta

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from configs.compose import compose
from data.tokenizers.bpe import DEFAULT_VOCAB_SIZES
from model.config import GPTConfig
from system.errors import UserError
from training import budget as module
from training.budget import (
    DEFAULT_TIME,
    HEAD_DIM,
    RECIPES,
    Recipe,
    apply_recipe,
    measured_speed,
    recipe_for,
    total_budget,
    training_time,
)

SMALL = Recipe(0.0, num_layers=1, d_model=64, vocab_size=1024, bigram_dropout=0.1, learning_rates=2.0)
LARGE = Recipe(10.0, num_layers=3, d_model=192, vocab_size=4096, bigram_dropout=0.5, dropout=0.1)
PICKED = ("model.num_layers", "model.d_model", "model.num_heads", "model.dropout", "model.bigram_dropout")
PICKED += ("tokenizer.vocab_size",)
RATES = ("optimizer.lr", "optimizer.embedding_lr", "optimizer.muon_lr")


@pytest.fixture
def two_rows(monkeypatch):
    """RECIPES of our own: what they are used for does not depend on what measurements put there."""
    monkeypatch.setattr(module, "RECIPES", (SMALL, LARGE))
    monkeypatch.setattr(module, "_first_run_seconds", {})


@pytest.fixture
def pick(two_rows):
    """pick(min_tflop, *overrides): the config for so much training, and the line that is said."""

    def picked(min_tflop: float, *overrides: str, spent: float = 0.0, seconds: float = 100.0):
        speed = min_tflop * 1e12 / seconds
        return apply_recipe(compose("train", list(overrides)), timedelta(seconds=seconds), spent, speed)

    return picked


def values(config, keys=PICKED):
    return {key: config.get(key) for key in keys}


def saved_values(run_dir, keys):
    return {key: OmegaConf.select(OmegaConf.load(run_dir / "config.yaml"), key) for key in keys}


def network_config(config) -> GPTConfig:
    """What train.py makes of it; raises UserError for heads that do not divide."""
    return config.model


# Which row


@pytest.mark.parametrize("row", range(len(RECIPES)))
def test_row_is_picked_from_its_border_on(row):
    border = RECIPES[row].min_tflop
    assert recipe_for(border) == recipe_for(math.nextafter(border, math.inf)) == RECIPES[row]
    assert recipe_for(math.nextafter(border, -math.inf)) == RECIPES[max(0, row - 1)]


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_more_time_never_picks_less(one, other):
    less, more = (recipe_for(min_tflop) for min_tflop in sorted((one, other)))
    for size in ("num_layers", "d_model", "vocab_size"):
        assert getattr(less, size) <= getattr(more, size)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_row_is_a_network_with_heads_of_one_width(recipe):
    shape = GPTConfig(
        vocab_size=recipe.vocab_size,
        num_layers=recipe.num_layers,
        d_model=recipe.d_model,
        num_heads=recipe.d_model // HEAD_DIM,
        dropout=recipe.dropout,
        positions="rope",
    )
    assert shape.head_dim == HEAD_DIM
    assert type(recipe.vocab_size) is int and recipe.vocab_size >= 257


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_more_time_never_takes_larger_steps(one, other):
    less, more = (recipe_for(min_tflop) for min_tflop in sorted((one, other)))
    assert less.learning_rates >= more.learning_rates >= 1


# What is picked, and what stays


def test_short_run_gets_the_learning_rates_of_its_row_and_says_so(pick):
    config, line = pick(1.0)
    assert (config.optimizer.lr, config.optimizer.embedding_lr, config.optimizer.muon_lr) == (0.006, 0.04, 0.028)
    assert "optimizer.lr=0.006 optimizer.embedding_lr=0.04 optimizer.muon_lr=0.028" in line
    config, line = pick(10.0)
    assert config.optimizer == compose("train", []).optimizer and "optimizer" not in line


@pytest.mark.parametrize("name, value", [("lr", "0.003"), ("embedding_lr", "0.02"), ("muon_lr", "0.5")])
def test_given_learning_rate_stays(pick, name, value):
    config, line = pick(1.0, f"optimizer.{name}={value}")
    assert str(config.get(f"optimizer.{name}")) == value
    assert f"optimizer.{name}=" not in line and line.count("optimizer.") == 2


@pytest.mark.parametrize("shape", [("model.d_model=256", "model.num_heads=4"), ("model.num_layers=6",)])
def test_learning_rates_are_picked_for_the_shape_of_the_row_alone(pick, shape):
    config, line = pick(1.0, *shape)
    assert config.optimizer == compose("train", []).optimizer and "optimizer." not in line


def test_shape_of_the_row_given_by_hand_gets_its_learning_rates(pick):
    config, _ = pick(1.0, f"model.d_model={SMALL.d_model}", "model.num_heads=2", f"model.num_layers={SMALL.num_layers}")
    assert config.optimizer.muon_lr == 0.028


def test_another_optimizer_keeps_its_learning_rates(pick):
    config, line = pick(1.0, "optimizer=adamw")
    assert config.optimizer == compose("train", ["optimizer=adamw"]).optimizer and "optimizer." not in line


def test_all_that_is_not_given_is_picked_and_said_in_one_line(pick):
    for min_tflop, recipe in ((1.0, SMALL), (10.0, LARGE)):
        config, line = pick(min_tflop, seconds=50.0 + min_tflop)
        heads = recipe.d_model // HEAD_DIM
        sizes = (recipe.num_layers, recipe.d_model, heads, recipe.dropout, recipe.bigram_dropout, recipe.vocab_size)
        assert values(config) == dict(zip(PICKED, sizes, strict=True))
        assert all(f" {key}={value}" in line for key, value in values(config).items())
        assert f"{50 + min_tflop:.0f} s" in line and "GFLOP/s" in line and "\n" not in line


def test_a_short_run_validates_less_often_but_never_less_than_asked_for(pick):
    for seconds, validations in ((2.0, 1), (12.0, 2), (24.9, 4), (25.0, 5), (1000.0, 5)):
        config, line = pick(1.0, seconds=seconds)
        assert config.num_validations == validations
        assert ("num_validations=" in line) == (validations < 5)
    assert pick(1.0, "num_validations=7", seconds=2.0)[0].num_validations == 7


@pytest.mark.parametrize("key", PICKED)
def test_given_key_stays_also_where_it_is_the_default(pick, key):
    default = compose("train", []).get(key)
    other = "0.3" if key.endswith("dropout") else "512"
    for value in ("512" if key == "tokenizer.vocab_size" else default, other):
        overrides = (f"{key}={value}", *(["model.num_heads=4"] if key == "model.d_model" else []))
        if key == "model.num_heads" and value == "512":
            continue
        config, line = pick(10.0, *overrides)
        assert str(config.get(key)) == str(value)
        assert f"{key}=" not in line and line.count("=") >= 3


@pytest.mark.parametrize("model", ["gpt2", "llama", "nanochat", "tiny"])
def test_given_family_stays_and_gets_the_picked_size(pick, model):
    config, _ = pick(10.0, f"model={model}")
    family = compose("train", [f"model={model}"]).model
    changed = {key.removeprefix("model.") for key in PICKED}
    assert {key for key, value in vars(family).items() if getattr(config.model, key) != value} <= changed
    assert config.model.num_layers == LARGE.num_layers


def test_what_a_chosen_file_sets_stays(pick):
    given_by_file = compose("train", ["experiment=baby_gpt"])
    for seconds in (2.0, 100.0):  # in the first a validation would come every tenth of a second
        config, line = pick(1.0, "experiment=baby_gpt", "trainer.max_steps=-1", seconds=seconds)
        assert values(config) == values(given_by_file) and config.num_validations == given_by_file.num_validations == 20
        assert "nothing" in line


@pytest.mark.parametrize("tokenizer", ["byte", "tiktoken"])
def test_no_vocabulary_is_picked_for_a_tokenizer_that_has_its_own(pick, tokenizer):
    config, line = pick(10.0, f"tokenizer={tokenizer}")
    assert config.tokenizer.vocab_size is None and "vocab_size" not in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.d_model=96"],
        ["model.d_model=104"],
        ["model.num_heads=64"],
        ["model.num_heads=128", "model.positions=learned"],
        ["model.num_kv_heads=4"],
        ["model.num_heads=8", "model.num_kv_heads=2"],
        ["model.d_model=80", "model.num_heads=5"],
    ],
    ids=" ".join,
)
def test_heads_always_divide(pick, overrides):
    for min_tflop, recipe in ((1.0, SMALL), (10.0, LARGE)):
        config, _ = pick(min_tflop, *overrides)
        shape = network_config(config)
        assert shape.d_model % shape.num_heads == 0 and shape.num_layers == recipe.num_layers
        for override in overrides:
            key, _, value = override.partition("=")
            assert str(config.get(key)) == value


def test_given_width_keeps_its_heads_whatever_the_row_has(pick):
    for min_tflop in (1.0, 10.0):
        assert pick(min_tflop, "model.d_model=96")[0].model.num_heads == GPTConfig.num_heads


def test_small_text_gets_a_small_vocabulary(pick, text_file):
    large = pick(10.0)[0].tokenizer.vocab_size
    small = pick(10.0, f"data.corpus={text_file}")[0].tokenizer.vocab_size
    assert small < large == LARGE.vocab_size
    assert small <= 2 * DEFAULT_VOCAB_SIZES[0]


def test_all_runs_of_a_sweep_get_one_recipe(pick):
    first = pick(10.5, spent=10.0)[0]  # this one had to import: 90 of 100 s are left, less than the border asks
    second = pick(10.5, spent=0.0)[0]
    assert values(first) == values(second) and first.model.num_layers == SMALL.num_layers


# How long


def test_default_is_ninety_seconds_unless_the_trainer_has_a_bound():
    assert total_budget(compose("train", [])) == DEFAULT_TIME == timedelta(seconds=90)
    for bound in ("max_time=5m", "max_steps=10", "max_epochs=1"):
        assert total_budget(compose("train", [f"trainer.{bound}"])) is None
    for recipe in ("context_sweep", "heads_sweep", "nanogpt_cpu"):
        assert total_budget(compose("train", [f"experiment={recipe}"])) is None


@pytest.mark.parametrize(("text", "seconds"), [("30", 30), ("45s", 45), ("5m", 300), ("1h30m", 5400)])
def test_budget_is_a_time_written_as_any_other(text, seconds):
    assert total_budget(compose("train", [f"budget={text}"])) == timedelta(seconds=seconds)


@pytest.mark.parametrize("bound", ["max_steps=10", "max_time=20s", "max_epochs=2"])
def test_budget_beside_another_bound_is_refused_naming_both(refuse, bound):
    error = refuse("train", "budget=30s", f"trainer.{bound}")
    assert "budget=30s" in error and f"trainer.{bound}" in error and "Use one of them" in error


def test_bound_of_a_recipe_makes_way_for_a_budget_as_the_refusal_says(refuse):
    error = refuse("train", "experiment=heads_sweep", "budget=30s")
    (fix,) = re.findall(r"unset it with (trainer\.\S+)\.", error)
    assert "trainer.max_steps=500" in error
    assert total_budget(compose("train", ["experiment=heads_sweep", "budget=30s", fix])) == timedelta(seconds=30)


@pytest.mark.parametrize("value", ["banana", "0s", "-5", "0", "null", "5x", "inf", "true", "[5]"])
def test_budget_that_is_no_time_is_refused_with_examples(refuse, value):
    error = refuse("train", f"budget={value}")
    assert "budget is" in error and "such as 60s, 5m" in error


def test_budget_too_short_to_train_is_refused_with_both_times(refuse, text_file, cache_dir, clock):
    error = refuse("train", "budget=2s", f"data.corpus={text_file}", f"data.cache_dir={cache_dir}")
    assert "budget of 2 s" in error and re.search(r"Use at least budget=\d+s", error)


@given(st.floats(0, 60), st.floats(0, 60), st.floats(0, 200), st.floats(1, 60))
def test_budget_that_the_refusal_names_leaves_time_to_train(spent, processor_s, whole_seconds, budget):
    try:
        training_time(timedelta(seconds=budget), spent, processor_s, whole_seconds)
    except UserError as refusal:
        (least,) = re.findall(r"budget=(\d+)s", str(refusal))
        assert int(least) > budget
        idle = min(spent, processor_s)
        assert training_time(timedelta(seconds=int(least)), idle, idle, whole_seconds) >= timedelta(seconds=1)


def test_time_to_train_is_what_the_start_and_the_last_validation_leave():
    whole = timedelta(seconds=60)
    little = training_time(whole, 10.0, 10.0, 1.0)
    assert timedelta(seconds=40) < little < timedelta(seconds=50)
    assert training_time(whole, 20.0, 20.0, 1.0) == little - timedelta(seconds=10)
    assert training_time(whole, 10.0, 10.0, 5.0) == little - timedelta(seconds=4)
    assert training_time(whole, 10.0, 10.0, 500.0) > timedelta(seconds=30)  # then the last validation is cut


def test_start_that_only_a_busy_machine_makes_too_long_is_not_refused():
    assert training_time(timedelta(seconds=20), 60.0, 5.0, 500.0) < timedelta()
    with pytest.raises(UserError, match="starting takes 19 s of processor time"):
        training_time(timedelta(seconds=20), 60.0, 19.0, 1.0)


def test_two_devices_with_a_budget_are_refused_by_name(refuse, text_file, cache_dir):
    places = (f"data.corpus={text_file}", f"data.cache_dir={cache_dir}", "tokenizer=byte")
    error = refuse("train", "budget=1m", "trainer.devices=2", "trainer.accelerator=cpu", *places)
    assert "2 devices" in error and "budget" in error and "trainer.max_steps" in error


@pytest.mark.parametrize("precision", ["32-true", "bf16-matmul"])
def test_measuring_the_speed_leaves_the_random_state_alone(precision):
    states = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert 0 < measured_speed.__wrapped__(torch.device("cpu"), precision) < math.inf
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


# Whole runs


@pytest.fixture
def unsized(text_file, cache_dir):
    """A short run's overrides that leave open what the budget picks."""
    places = (f"data.corpus={text_file}", f"data.cache_dir={cache_dir}")
    return (*places, "data.batch_size=4", "model.context_length=16", "num_validations=2", "trainer.accelerator=cpu")


def test_run_tells_and_keeps_what_its_budget_picked(train_here, unsized, clock):
    finished = train_here("budget=10s", settings=unsized)
    assert finished.returncode == 0 and finished.stderr == "", finished
    assert finished.summary["steps"] > 0 and 9 < finished.summary["seconds"] < 11
    log = (finished.path / "train.log").read_text(encoding="utf-8")
    (line,) = re.findall("^budget: .*", log, re.MULTILINE)
    picked = dict(pair.split("=") for pair in re.findall(r"\S+=\S+", line))
    keys = {*PICKED, *RATES}
    assert keys - set(RATES) <= set(picked) <= keys  # a fast machine's row has the rates of the config
    assert {key: str(value) for key, value in saved_values(finished.path, picked).items()} == picked
    assert saved_values(finished.path, ["budget"]) == {"budget": "10s"}


def test_picked_keys_with_as_many_steps_repeat_the_network_without_the_budget(train_here, unsized, two_rows, clock):
    finished = train_here("budget=8s", settings=unsized)
    keys = [f"{key}={value}" for key, value in saved_values(finished.path, PICKED + RATES).items()]
    networks = []
    for _ in range(2):
        again = train_here(*keys, "trainer.max_steps=5", settings=unsized)
        networks.append(torch.load(again.path / "checkpoints/last.ckpt", weights_only=True))
    weights = [network["state_dict"] for network in networks]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    of_budget = torch.load(finished.path / "checkpoints/last.ckpt", weights_only=True)
    assert networks[0]["gpt"]["model"] == of_budget["gpt"]["model"]
    assert networks[0]["gpt"]["tokenizer"] == of_budget["gpt"]["tokenizer"]


def test_runs_of_a_budget_start_as_those_of_as_many_steps(train_here, unsized, events, two_rows, clock):
    """The first losses tell: the same weights, batches and dropping, whatever was measured before."""
    keys = (
        "optimizer.warmup_fraction=0",
        "trainer.log_every_n_steps=1",
    )  # rates are constant in the first half of a run
    timed = train_here("budget=8s", *keys, settings=unsized)
    picked = saved_values(timed.path, PICKED + RATES)
    counted = train_here(
        *keys, *(f"{key}={value}" for key, value in picked.items()), "trainer.max_steps=20", settings=unsized
    )
    timed, counted = (events(run.path).Scalars("Loss/train")[:5] for run in (timed, counted))
    assert [(point.step, point.value) for point in timed] == [(point.step, point.value) for point in counted]


def test_every_run_of_a_sweep_has_the_budget_and_its_own_given_keys(train_here, unsized, two_rows, clock):
    finished = train_here("-m", "budget=8s", "model.num_layers=2,1", settings=unsized)
    assert finished.returncode == 0 and finished.stderr == "", finished
    configs = [OmegaConf.load(path) for path in sorted(finished.path.glob("*/config.yaml"))]
    assert [config.model.num_layers for config in configs] == [2, 1]
    assert {config.model.d_model for config in configs} == {SMALL.d_model}
    assert len(list(finished.path.glob("*/summary.json"))) == 2
    for log in finished.path.glob("*/train.log"):
        assert "model.num_layers=" not in log.read_text(encoding="utf-8").partition("\n")[0]


# A busy machine


LOADS = {
    "idle": lambda now: 1.0,
    "always busy": lambda now: 3.0,
    "always very busy": lambda now: 8.0,
    "busy at the start": lambda now: 5.0 if now < 20 else 1.0,
    "busy from the middle on": lambda now: 1.0 if now < 30 else 6.0,
    "busy at the end": lambda now: 1.0 if now < 50 else 8.0,
    "busy now and then": lambda now: 8.0 if now % 10 < 3 else 1.0,
}
# The last validation sees 8 batches, those in training 2.
LONG_VALIDATION = ("data.val_tokens=128", "num_validations=4", "trainer.log_every_n_steps=1", "tokenizer=byte")


@pytest.fixture
def on_a_machine(train_here, unsized, two_rows, clock):
    """on_a_machine(load, *overrides) is a run of 60 seconds whose last validation takes 2 on an idle machine."""
    clock.validation_batch = 2 / 8

    def trained(load, *overrides):
        clock.load = load
        return train_here(*LONG_VALIDATION, *(overrides or ("budget=60s",)), settings=unsized)

    return trained


@pytest.mark.parametrize("load", LOADS)
def test_budget_is_kept_whatever_else_the_machine_does(on_a_machine, events, load):
    finished = on_a_machine(LOADS[load])
    assert finished.returncode == 0 and finished.stderr == "", finished
    summary = finished.summary
    assert 0.9 * 60 <= summary["seconds"] <= 1.1 * 60
    assert summary["steps"] > 5
    rates = [event.value for event in events(finished.path).Scalars("Optimizer/lr_muon")]
    assert rates[-1] < 0.21 * max(rates)  # of 10 steps, the last is taken at a tenth of the run from its end
    falling = rates[rates.index(max(rates)) :]
    assert all(earlier >= later for earlier, later in zip(falling, falling[1:], strict=False))
    seen, whole = summary["val_tokens"], summary["val_tokens_in_split"]
    assert whole == 453 and 0 < seen <= whole  # a tenth of the text's bytes, but the first
    assert (f"over {seen:,} of {whole:,} tokens" in finished.stdout) == (seen < whole)
    assert ("no time for" in finished.stdout) == (seen < whole)


def test_idle_machine_validates_on_the_whole_split_just_within_the_budget(on_a_machine, events):
    finished = on_a_machine(LOADS["idle"])
    assert 59 < finished.summary["seconds"] <= 60.3  # the last batch is padded: it costs a token more
    assert finished.summary["val_tokens"] == finished.summary["val_tokens_in_split"]
    steps = [event.step for event in events(finished.path).Scalars("Loss/validation")]
    apart = np.diff([0, *steps])
    assert len(steps) == 4 and max(apart) - min(apart) < 0.1 * steps[-1]


def test_last_validation_is_cut_where_it_would_take_too_long_and_its_figure_is_over_what_it_saw(on_a_machine):
    finished = on_a_machine(lambda now: 1.0 if now < 57 else 8.0)
    seen = finished.summary["val_tokens"]
    assert 0 < seen < finished.summary["val_tokens_in_split"]
    checkpoint = torch.load(finished.path / "checkpoints/best.ckpt", weights_only=True)["gpt"]["validation"]
    assert checkpoint["tokens"] == seen and checkpoint["nats_per_token"] == finished.summary["val_nats_per_token"]


def test_start_that_takes_all_of_the_budget_still_trains_a_few_steps(on_a_machine):
    finished = on_a_machine(lambda now: 8.0, "budget=20s")  # which has 32 s of start alone
    assert finished.returncode == 0, finished
    assert 10 <= finished.summary["steps"] < 20
    assert "the start took 32 s, of which this process used a processor for 4 s: the machine is busy" in finished.stdout


def test_budget_that_an_idle_machine_cannot_keep_is_refused(refuse, clock, text_file, cache_dir):
    clock.start = 12.0
    error = refuse("train", "budget=10s", f"data.corpus={text_file}", f"data.cache_dir={cache_dir}")
    assert "starting takes 12 s" in error and "budget=16s" in error


def test_validations_that_would_eat_the_budget_are_fewer_and_said_to_be(on_a_machine, clock, events):
    clock.pictures = 6.0
    finished = on_a_machine(LOADS["idle"], "budget=60s", "num_validations=8")
    assert 54 <= finished.summary["seconds"] <= 66
    assert len(events(finished.path).Scalars("Loss/validation")) < 6
    assert re.search(r"validations are at least 1\d s apart, because one takes 6\.\d s", finished.stdout)


def test_pictures_are_left_out_where_there_is_no_time_for_them(on_a_machine, events):
    finished = on_a_machine(lambda now: 1.0 if now < 55 else 30.0)
    step = finished.summary["steps"]
    assert f"no pictures at step {step:,}" in finished.stdout
    assert events(finished.path).Images("attention/maps")[-1].step < step
