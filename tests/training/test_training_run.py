"""A training run from the command line to its files: what it promises, end to end."""

import base64
import math
import re
import subprocess
from importlib import metadata

import pytest
import tiktoken
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

from checkpoint.checkpoint import find_checkpoint, load_checkpoint
from model import kernels
from model.config import GPTConfig
from model.gpt import GPT
from system.errors import UserError
from training.callbacks.progress_bar import RunProgressBar
from training.lightning_module import GPTLightning
from training.summary import final_report


def checkpoint_of(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def curve(events, run, tag):
    """Pairs of step and value."""
    return [(event.step, event.value) for event in events(run.path).Scalars(tag)]


# What a run leaves


def test_run_leaves_its_files_in_one_directory_and_no_others(tiny_run):
    assert tiny_run.returncode == 0, tiny_run
    files = sorted(str(path.relative_to(tiny_run.path)) for path in tiny_run.path.rglob("*") if path.is_file())
    assert files[:3] == ["checkpoints/best.ckpt", "checkpoints/last.ckpt", "config.yaml"]
    assert files[3].startswith("events.out.tfevents.")
    recorded = [f"step-{step:08d}.npz" for step in (8, 16, 24, 32, 40)]
    assert files[4:-3] == [f"recording/{name}" for name in ("curve.jsonl", "run.json", *recorded)]
    assert files[-3:] == ["report.html", "summary.json", "train.log"]
    assert [path.name for path in tiny_run.path.parent.iterdir()] == [tiny_run.path.name]


def test_summary_has_every_figure_of_the_run(tiny_run):
    summary = tiny_run.summary
    assert {"val_nats_per_token", "val_bits_per_byte", "seconds", "steps", "tokens", "tokens_per_second"} < set(summary)
    assert summary["steps"] == 40 and summary["tokens"] == 40 * 4 * 16
    assert summary["tokens_per_second"] > 0 and summary["step_ms"] > 0
    assert summary["checkpoint"] == "checkpoints/best.ckpt"
    gpt = checkpoint_of(tiny_run.path / "checkpoints/best.ckpt")["gpt"]
    assert summary["parameters"] == GPT(GPTConfig(**gpt["model"])).num_parameters()
    assert summary["best_step"] == gpt["step"]
    assert summary["versions"]["torch"] == metadata.version("torch")
    assert re.fullmatch(r"3\.\d+\.\d+", summary["versions"]["python"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", summary["versions"]["tiny_gpt"])


def test_what_there_is_one_of_is_said_in_the_singular(tiny_run, train_here):
    assert "parameters: 2 layers, 2 heads, width 32" in tiny_run.stdout
    finished = train_here("model.num_layers=1", "model.num_heads=1", "trainer.max_steps=1")
    assert "parameters: 1 layer, 1 head, width 32" in finished.stdout


def test_seconds_are_those_a_clock_outside_shows(tiny_run):
    # The last moments, when the process ends, it cannot know.
    assert 0.6 * tiny_run.seconds - 1 < tiny_run.summary["seconds"] <= tiny_run.seconds + 0.1


def test_bits_per_byte_are_those_of_the_whole_validation_split(tiny_run):
    text = (tiny_run.path.parents[1] / "words.txt").read_bytes()
    gpt = checkpoint_of(tiny_run.path / "checkpoints/best.ckpt")
    saved = gpt["gpt"]["tokenizer"]
    pairs = (line.split() for line in saved["merges"].splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    encoding = tiktoken.Encoding("mine", pat_str=saved["pattern"], mergeable_ranks=ranks, special_tokens={})
    ids = encoding.encode(text[round(0.9 * len(text)) :].decode())
    network = GPT(GPTConfig(**gpt["gpt"]["model"])).eval()
    network.load_state_dict({k.removeprefix("network."): v for k, v in gpt["state_dict"].items()})
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 16):  # windows side by side: each token but the first is a target once
            window = torch.tensor(ids[start : start + 17])
            nats += F.cross_entropy(network(window[None, :-1])[0].double(), window[1:], reduction="sum").item()
    num_bytes = len(encoding.decode_bytes(ids[1:]))
    assert tiny_run.summary["val_nats_per_token"] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    assert tiny_run.summary["val_bits_per_byte"] == pytest.approx(nats / num_bytes / math.log(2), rel=1e-5)


def test_loss_starts_at_the_uniform_guess_and_falls(tiny_run, events):
    losses = [value for _, value in curve(events, tiny_run, "Loss/train")]
    assert losses[0] <= math.log(300) + 0.1 and losses[-1] < losses[0] - 1
    assert tiny_run.summary["val_nats_per_token"] < math.log(300) - 1


# What a run says


def test_nothing_from_third_parties_is_on_the_screen(tiny_run):
    assert tiny_run.stderr == ""
    assert "warn" not in tiny_run.stdout.lower() and "lightning" not in tiny_run.stdout.lower()


def test_log_holds_what_the_screen_showed(tiny_run):
    log = (tiny_run.path / "train.log").read_text(encoding="utf-8")
    assert len(log) > 500 and log.strip() in tiny_run.stdout


def test_run_picks_the_device_that_is_there_and_says_which(tiny_run):
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert re.search(rf"; on {device}(:0)? in (32-true|bf16-matmul|bf16-mixed)\n", tiny_run.stdout)


def test_log_says_what_loss_to_expect_at_the_start(tiny_run):
    assert f"a uniform guess over 300 tokens costs {math.log(300):.3f} nats per token" in tiny_run.stdout


def test_text_far_too_short_for_network_and_batch_is_warned_of_with_all_numbers(train_here, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("To be, or not to be, that is the question. " * 9, encoding="utf-8")
    finished = train_here(f"data.corpus={text}", "model.d_model=64", "data.batch_size=32", "trainer.max_steps=1")
    (line,) = [line for line in finished.stdout.splitlines() if "far too short" in line]
    parameters, tokens = finished.summary["parameters"], int(re.search(r"(\d+) tokens to train", line)[1])
    assert parameters > 1000 * tokens and f"{tokens} tokens to train on for {parameters:,} parameters" in line
    assert re.search(r"\d+ windows? of 16 tokens for a batch of 32", line) and "Use a longer text" in line
    assert finished.stdout.index(line) < finished.stdout.index("best checkpoint")
    assert "far too short" not in train_here("trainer.max_steps=1").stdout  # the tiny run's own text is long enough


@pytest.mark.parametrize(
    ("nats", "bits", "said"),
    [(5.71, 7.0, "over 300 tokens (5.704 nats per token)"), (5.0, 8.82, "over bytes (8 bits per byte)")],
)
def test_checkpoint_no_better_than_guessing_is_called_that(tmp_path, nats, bits, said):
    summary = {"best_step": 1, "steps": 2, "seconds": 3.0, "tokens_per_second": 4.0}
    summary |= {"val_tokens": 9, "val_tokens_in_split": 9}
    figures = {"val_nats_per_token": nats, "val_bits_per_byte": bits}
    told = final_report(summary | figures, "text", tmp_path, vocab_size=300, prompt="To be")
    assert f"warning: no better than a uniform guess {said}" in told
    assert "learned nothing that helps" in told and "Train longer" in told
    figures = {"val_nats_per_token": 5.0, "val_bits_per_byte": 7.9}
    assert "warning" not in final_report(summary | figures, "text", tmp_path, vocab_size=300, prompt="To be")


def test_printed_commands_name_the_run(tiny_run):
    assert f"sample.py checkpoint={tiny_run.path}" in tiny_run.stdout
    assert f"--logdir {tiny_run.path.parent} --samples_per_plugin images=100" in tiny_run.stdout


# Same seed, same run


def test_same_seed_gives_the_same_losses_bit_for_bit(train_here, events, tiny_run):
    figures = []
    for seed in (0, 0, 1):
        finished = train_here("trainer.max_steps=40", f"seed={seed}")
        figures.append(
            [curve(events, finished, tag) for tag in ("Loss/train", "Loss/validation", "Optimizer/grad_norm")]
        )
        figures[-1].append(finished.summary["val_bits_per_byte"])
    assert figures[0] == figures[1]
    assert figures[0][-1] != figures[2][-1]
    if not (torch.cuda.is_available() or torch.backends.mps.is_available()):  # in another process too
        assert figures[0][-1] == tiny_run.summary["val_bits_per_byte"]


@pytest.mark.parametrize("off", ["off", "false", "0"])
def test_run_without_kernels_has_the_same_losses_and_says_once_that_they_are_off(train_here, monkeypatch, off):
    steps = ("trainer.max_steps=3", "num_validations=1")
    on = train_here(*steps, "trainer.precision=32-true", "kernels=on")
    if off == "0":  # the environment sets the default
        monkeypatch.setenv("TINY_GPT_KERNELS", off)
        without = train_here(*steps)
    else:
        without = train_here(*steps, f"kernels={off}")
    assert (on.stdout.count("kernels are off"), without.stdout.count("kernels are off")) == (0, 1)
    assert " in 32-true\n" in without.stdout  # what precision=auto picks then
    losses = [run.summary["val_nats_per_token"] for run in (on, without)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert [OmegaConf.load(run.path / "config.yaml").kernels for run in (on, without)] == [True, False]
    assert kernels.enabled()  # what the run of a test sets is set back


def test_sampling_without_kernels_gives_the_same_text(sample_here, tiny_run):
    arguments = (f"checkpoint={tiny_run.dir}", "prompt=the king", "max_new_tokens=12", "temperature=0")
    on, off = sample_here(*arguments, "kernels=on"), sample_here(*arguments, "kernels=off")
    assert on.returncode == off.returncode == 0 and on.stdout == off.stdout


def test_accumulated_batches_give_the_losses_of_one_large_batch(train_here, events):
    settings = ("trainer.max_steps=10", "trainer.log_every_n_steps=1", "optimizer=adamw")
    large = train_here(*settings, "data.batch_size=8")
    small = train_here(*settings, "data.batch_size=2", "trainer.accumulate_grad_batches=4")
    for tag in ("Loss/train", "Loss/validation", "Optimizer/grad_norm", "Optimizer/lr_adamw", "Progress/tokens"):
        (steps, values), (other_steps, other_values) = (
            zip(*curve(events, run, tag), strict=True) for run in (large, small)
        )
        assert steps == other_steps
        assert values == pytest.approx(other_values, rel=1e-3), tag


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_accumulated_batches_are_one_large_batch_at_the_end_of_an_epoch_too(train_here, events, text_file, optimizer):
    settings = ("tokenizer=byte", "tokenizer.vocab_size=null", "data.val_fraction=0.9", "trainer.max_epochs=3")
    settings += ("trainer.log_every_n_steps=1", f"optimizer={optimizer}", "trainer.precision=32-true")
    runs = [
        train_here(*settings, f"data.batch_size={batch_size}", f"trainer.accumulate_grad_batches={accumulated}")
        for batch_size, accumulated in ((12, 1), (4, 3), (2, 6))
    ]
    windows = (round(0.1 * text_file.stat().st_size) - 16) // 16
    assert windows % 12 and windows % 4  # an epoch ends within a step
    (steps, losses), *others = [zip(*curve(events, run, "Loss/train"), strict=True) for run in runs]
    assert steps == tuple(range(1, 3 * -(-windows // 12) + 1))
    for run, (other_steps, other_losses) in zip(runs[1:], others, strict=True):
        assert other_steps == steps and other_losses == pytest.approx(losses, rel=2e-3)
        assert run.summary["tokens"] == runs[0].summary["tokens"]


def test_first_step_learns(train_here, tiny_run):
    finished = train_here("trainer.max_steps=1", "optimizer=adamw", "optimizer.lr=0.01", "data.batch_size=64")
    assert finished.summary["val_nats_per_token"] < math.log(300) - 0.05


def test_overfitting_to_one_batch_brings_its_loss_near_zero(train_here, events):
    settings = ("trainer.max_steps=200", "num_validations=1", "model.dropout=0", "model.bigram_dropout=0")
    finished = train_here("trainer.overfit_batches=1", *settings)
    assert "each epoch trains on the same batch" in finished.stdout
    assert curve(events, finished, "Loss/train")[-1][1] < 0.1


# Validations


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (("num_validations=4", "trainer.max_epochs=4", "trainer.limit_train_batches=5"), [5, 10, 15, 20]),
        (("num_validations=2", "trainer.max_epochs=4", "trainer.limit_train_batches=0.2"), [10, 20]),
        (("trainer.max_epochs=2", "trainer.limit_train_batches=10", "trainer.val_check_interval=0.5"), [5, 10, 15, 20]),
        (("num_validations=5", "trainer.max_steps=12"), [3, 5, 8, 10, 12]),
        (("num_validations=5", "trainer.max_steps=3"), [1, 2, 3]),
        (("num_validations=3", "trainer.max_steps=6", "trainer.accumulate_grad_batches=3"), [2, 4, 6]),
        (
            ("num_validations=2", "trainer.max_steps=1000", "trainer.max_epochs=2", "trainer.limit_train_batches=3"),
            [3, 6],
        ),
        (("num_validations=2", "trainer.max_steps=6", "trainer.max_time=1h"), [3, 6]),
        (("trainer.val_check_interval=4", "trainer.max_steps=10"), [4, 8, 10]),
        (("num_validations=3", "trainer.max_time=0.001s", "trainer.min_steps=12"), [4, 8, 12]),
        (
            ("trainer.max_time=0.001s", "trainer.min_epochs=2", "trainer.limit_train_batches=5", "num_validations=2"),
            [5, 10],
        ),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_validations_are_evenly_spread_and_the_last_is_at_the_end(train_here, events, settings, steps):
    finished = train_here(*settings)
    assert finished.returncode == 0, finished
    assert [step for step, _ in curve(events, finished, "Loss/validation")] == steps
    assert finished.summary["steps"] == steps[-1]


def test_limited_validations_are_named_and_the_final_one_is_over_the_whole_split(train_here, events):
    settings = ("trainer.max_steps=4", "num_validations=1")
    whole, limited = train_here(*settings), train_here(*settings, "trainer.limit_val_batches=1")
    line = "validations during training use 64 of these tokens (trainer.limit_val_batches); the last one uses all"
    assert line in limited.stdout and "validations during training" not in whole.stdout
    assert curve(events, limited, "Loss/validation") != curve(events, whole, "Loss/validation")
    assert limited.summary["val_nats_per_token"] == whole.summary["val_nats_per_token"]


def test_time_that_is_over_before_the_least_steps_stretches_the_learning_rates(train_here, events):
    settings = ("trainer.max_time=0.001s", "trainer.min_steps=40", "trainer.log_every_n_steps=1", "optimizer=adamw")
    finished = train_here(*settings)
    rates = [value for _, value in curve(events, finished, "Optimizer/lr_adamw")]
    assert len(rates) == 40 and all(rate == max(rates) for rate in rates[1:20])
    assert learning_rate_is_cooled(events, finished) and rates[-1] > 0


# What is shown on request


def test_progress_is_shown_unless_it_is_switched_off(train_here, monkeypatch):
    monkeypatch.setattr(RunProgressBar, "SECONDS_BETWEEN_LINES", 0.0)
    assert "tokens/s" in train_here("trainer.max_steps=2").stdout
    finished = train_here("trainer.max_steps=2", "trainer.enable_progress_bar=false")
    assert finished.returncode == 0 and "tokens/s" not in finished.stdout and "step 2: validation" in finished.stdout


# Ends


def test_non_finite_loss_stops_the_run_at_that_step_and_keeps_the_last_good_checkpoint(train_here, monkeypatch):
    loss, calls = GPT.loss, []

    def broken(self, ids, targets):
        calls.append(ids)
        return loss(self, ids, targets) * (math.nan if len(calls) == 8 else 1)

    monkeypatch.setattr(GPT, "loss", broken)
    finished = train_here("trainer.max_steps=20")  # validates every 4 steps
    assert "loss is nan at step 7" in finished.error
    assert all(f"optimizer.{rate}" in finished.error for rate in ("lr", "embedding_lr", "muon_lr"))
    for name in ("best.ckpt", "last.ckpt"):
        checkpoint = load_checkpoint(finished.path / "checkpoints" / name)
        assert checkpoint.step == 4
        assert all(weight.isfinite().all() for weight in checkpoint.network.parameters())


@pytest.mark.parametrize("validate", ["trainer.val_check_interval=100000", "num_validations=1"])
def test_interval_larger_than_the_run_still_validates_and_logs(train_here, events, validate):
    finished = train_here("trainer.max_steps=6", "trainer.log_every_n_steps=1000", validate)
    assert finished.returncode == 0, finished
    for tag in ("Loss/train", "Loss/validation", "Loss/validation_bits_per_byte", "Progress/tokens", "Speed/step_ms"):
        assert [step for step, _ in curve(events, finished, tag)] == [6], tag


def test_share_of_an_epoch_is_an_interval_too(train_here, events):
    finished = train_here(
        "tokenizer=byte", "tokenizer.vocab_size=null", "trainer.max_epochs=1", "trainer.val_check_interval=0.25"
    )
    assert [step for step, _ in curve(events, finished, "Loss/validation")] == [16, 32, 48, 64]


def test_best_checkpoint_of_a_run_that_overfits_is_kept_and_used(train_here, tmp_path, sample_here):
    text = tmp_path / "short.txt"
    text.write_text("Thou art the king of night and day, sweet queen, and no more my lord than what we are. " * 3)
    settings = ("data.val_fraction=0.3", "data.batch_size=16", "optimizer=adamw", "optimizer.lr=0.02")
    shuffled = "Wert no; kind of quiet lads, many were not here! Zounds? Quack. " * 2
    text.write_text(text.read_text() + shuffled)
    finished = train_here(
        f"data.corpus={text}",
        "tokenizer=byte",
        "tokenizer.vocab_size=null",
        *settings,
        "trainer.max_steps=100",
        "num_validations=20",
    )
    summary, checkpoints = finished.summary, finished.path / "checkpoints"
    best, last = (load_checkpoint(checkpoints / name) for name in ("best.ckpt", "last.ckpt"))
    assert best.step == summary["best_step"] < last.step == summary["steps"] == 100
    assert best.validation["nats_per_token"] < last.validation["nats_per_token"] - 0.2
    assert find_checkpoint(None, str(tmp_path)) == find_checkpoint(finished.dir, "") == checkpoints / "best.ckpt"
    assert f"step {best.step}," in sample_here(f"runs_dir={tmp_path}", "max_new_tokens=1").stderr


def learning_rate_is_cooled(events, run):
    rates = [value for _, value in curve(events, run, "Optimizer/lr_adamw")]
    return rates[-1] < 0.06 * max(rates)  # the last of 40 steps is taken at a twentieth


def test_run_bounded_by_time_ends_near_it_with_the_learning_rate_cooled(train_here, events, clock):
    finished = train_here("trainer.max_time=10s")
    assert finished.summary["steps"] == curve(events, finished, "Loss/train")[-1][0]
    assert 10 <= checkpoint_of(finished.path / "checkpoints/last.ckpt")["run"]["train_seconds"] < 11
    assert learning_rate_is_cooled(events, finished)
    assert len(curve(events, finished, "Loss/validation")) == 5


def test_run_bounded_by_steps_takes_them_with_the_learning_rate_cooled(tiny_run, events):
    assert tiny_run.summary["steps"] == 40
    assert learning_rate_is_cooled(events, tiny_run)
    assert [step for step, _ in curve(events, tiny_run, "Loss/validation")] == [8, 16, 24, 32, 40]


def test_run_bounded_by_epochs_takes_them_with_the_learning_rate_cooled(train_here, text_file, events):
    finished = train_here("tokenizer=byte", "tokenizer.vocab_size=null", "trainer.max_epochs=2")
    num_tokens = round(0.9 * text_file.stat().st_size)
    batches = -(-((num_tokens - 16) // 16) // 4)
    assert finished.summary["steps"] == 2 * batches
    assert learning_rate_is_cooled(events, finished)
    assert len(curve(events, finished, "Loss/validation")) == 5


# Whatever the machine


def test_compilation_that_cannot_work_is_one_warning_and_then_eager(call, tiny, tmp_path):
    env = {"CXX": "/nonexistent/c++", "CC": "/nonexistent/cc", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    settings = ("compile=true", "trainer.max_steps=3", f"runs_dir={tmp_path / 'runs'}")
    finished = call("train.py", *tiny, *settings, env=env, runs=tmp_path / "runs")
    assert finished.returncode == 0, finished
    lines = [line for line in (finished.stdout + finished.stderr).splitlines() if "warn" in line.lower()]
    assert len(lines) == 1 and "torch.compile does not work here" in lines[0], finished
    assert finished.summary["steps"] == 3


def test_compilation_leaves_the_names_of_weights_alone(train_here, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)  # its speed is no matter here
    finished = train_here("compile=true", "trainer.max_steps=2")
    names = set(checkpoint_of(finished.path / "checkpoints/best.ckpt")["state_dict"])
    assert not any("_orig_mod" in name for name in names)


def test_cpu_gets_no_pinned_memory_and_no_gradient_scaler(train_here, monkeypatch):
    step, seen = GPTLightning.training_step, []

    def looking(self, batch, batch_idx):
        seen.append((batch.is_pinned(), getattr(self.trainer.precision_plugin, "scaler", None)))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(GPTLightning, "training_step", looking)
    assert train_here("trainer.max_steps=2").returncode == 0
    assert seen == [(False, None)] * 2


NO_NETWORK = """
import socket
def refuse(*args, **kwargs):
    raise OSError("the network was asked")
socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse
"""


def test_default_run_needs_no_network(call, tiny, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    (tmp_path / "empty").mkdir()
    env = {"PYTHONPATH": str(tmp_path), "TIKTOKEN_CACHE_DIR": str(tmp_path / "empty")}
    try:
        permitted = subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0
    except OSError:
        permitted = False
    finished = call(
        "train.py",
        *tiny,
        "trainer.max_steps=2",
        f"data.cache_dir={tmp_path / 'cold'}",
        f"runs_dir={tmp_path / 'runs'}",
        env=env,
        prefix=("unshare", "-rn") if permitted else (),
        runs=tmp_path / "runs",
    )
    assert finished.returncode == 0 and finished.stderr == "", finished


@pytest.mark.parametrize(("text", "tokenizer"), [("abracadabra simsalabim", "byte"), ("to be or " * 12, "bpe")])
def test_tiny_text_trains(train_here, tmp_path, text, tokenizer):
    path = tmp_path / "tiny.txt"
    path.write_text(text)
    finished = train_here(
        f"data.corpus={path}", f"tokenizer={tokenizer}", "tokenizer.vocab_size=null", "model.context_length=4",
        "trainer.max_steps=3",
    )  # fmt: skip
    assert finished.returncode == 0, finished
    assert math.isfinite(finished.summary["val_bits_per_byte"])


def test_text_too_short_for_the_context_is_refused_with_what_works(refuse, tmp_path):
    path = tmp_path / "tiny.txt"
    path.write_text("a" * 50)
    error = refuse("train", f"data.corpus={path}", "tokenizer=byte")
    assert "context_length 64 needs at least 65 tokens" in error and "45" in error and "≤ 44" in error


@pytest.mark.parametrize(
    ("model", "optimizer", "tokenizer"),
    [
        ("gpt2", "adamw", "byte"),
        ("gpt2", "muon", "bpe"),
        ("llama", "adamw", "bpe"),
        ("llama", "muon", "byte"),
        ("nanochat", "adamw", "byte"),
        ("nanochat", "muon", "bpe"),
        ("tiny", "adamw", "byte"),
        ("tiny", "muon", "bpe"),
    ],
)
def test_every_family_trains_with_every_optimizer_and_tokenizer(train_here, model, optimizer, tokenizer):
    choices = (f"model={model}", f"optimizer={optimizer}", f"tokenizer={tokenizer}", "tokenizer.vocab_size=null")
    finished = train_here(*choices, "trainer.max_steps=3", "num_validations=1", "model.dropout=0.1")
    assert finished.returncode == 0 and finished.stderr == "", finished
    checkpoint = load_checkpoint(finished.path / "checkpoints/best.ckpt")
    assert checkpoint.step == 3 and checkpoint.validation["bits_per_byte"] == finished.summary["val_bits_per_byte"]
    assert math.isfinite(checkpoint.validation["nats_per_token"])


def test_run_that_fails_before_it_trains_leaves_no_directory(train_here, monkeypatch, tmp_path):
    def failing(self):
        raise RuntimeError("a fault of the code")

    monkeypatch.setattr(GPTLightning, "configure_optimizers", failing)
    with pytest.raises(RuntimeError, match="a fault of the code"):
        train_here("trainer.max_steps=2")
    assert not list(tmp_path.glob("runs/*"))


def test_run_that_cannot_write_is_refused_by_name(refuse, text_file):
    error = refuse("train", "runs_dir=/dev/null/runs", f"data.corpus={text_file}", "tokenizer=byte")
    assert "/dev/null/runs" in error


def test_checkpoint_that_is_none_is_refused(text_file):
    with pytest.raises(UserError, match="not a checkpoint written by train.py"):
        load_checkpoint(text_file)
