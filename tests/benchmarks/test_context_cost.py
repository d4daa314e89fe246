"""The cost on paper is what PyTorch counts, the memory measured is that on paper, and fits find what was put in."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import context_cost
from benchmarks.growth import fit_growth, where_equal
from benchmarks.memory_of import measure_memory
from benchmarks.workload import EagerAttention, attention_pass
from configs.compose import compose
from model.attention import eager_attention
from model.config import GPTConfig
from model.flops import (
    IMPLEMENTATIONS,
    attention_flops,
    attention_pairs,
    crossover_length,
    forward_flops,
    matmul_parameters,
    non_attention_flops,
    saved_activation_bytes,
    score_matrix_bytes,
    train_step_flops,
)
from model.gpt import GPT
from system.errors import UserError
from tests.conftest import FOREGROUND

PROJECT = Path(__file__).resolve().parents[2]
T, SEQUENCES = 24, 3
SHAPES = {
    "gpt2": {},
    "grouped": {"num_kv_heads": 2, "positions": "rope", "qk_norm": True},
    "swiglu": {"mlp": "swiglu", "norm": "rmsnorm", "bias": False, "tied_embeddings": False},
    "relu2": {"mlp": "relu2", "mlp_hidden": 40, "logit_soft_cap": 15.0},
    "bigrams": {"bigram_table_size": 64, "mlp": "relu2", "bias": False, "tied_embeddings": False},
}


def config(**fields) -> GPTConfig:
    return GPTConfig(**{"vocab_size": 70, "context_length": T, "num_layers": 3, "num_heads": 4, "d_model": 32} | fields)


def eager(c: GPTConfig) -> GPT:
    """A network whose attention is two plain matrix products, which PyTorch counts on a CPU too."""
    network = GPT(c)
    for block in network.blocks:
        block.attention = EagerAttention(block.attention)
    return network


# Operations


@pytest.fixture
def counted(monkeypatch):
    """PyTorch counts its own matrix products only, not those of oneDNN."""
    monkeypatch.setattr("model.kernels.onednn.onednn_is_faster", lambda: False)


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_operations_are_those_that_torch_counts(counted, shape):
    c = config(**SHAPES[shape])
    network, ids = eager(c), torch.randint(c.vocab_size, (SEQUENCES, T))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(ids)
    assert SEQUENCES * forward_flops(c, T, "eager") == counter.get_total_flops()


@pytest.mark.parametrize("shape", SHAPES)
def test_training_step_operations_are_those_that_torch_counts(counted, shape):
    c = config(**SHAPES[shape])
    network, ids = eager(c), torch.randint(c.vocab_size, (SEQUENCES, T + 1))
    with FlopCounterMode(display=False) as counter:
        network.loss(ids[:, :-1], ids[:, 1:]).backward()
    assert SEQUENCES * train_step_flops(c, T, "eager") == counter.get_total_flops()


def test_attention_operations_are_those_that_torch_counts():
    c = config(num_layers=1)
    q, k, v = (torch.randn(1, c.num_heads, T, c.head_dim) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        eager_attention(q, k, v)
    assert attention_flops(c, T, "eager") == counter.get_total_flops()


@pytest.mark.parametrize("tied", [True, False])
def test_step_is_six_operations_a_weight_and_token_and_attention_beside_it(tied):
    c = config(d_model=128, vocab_size=1000, tied_embeddings=tied)
    N = GPT(c).num_parameters()
    looked_up = c.context_length * c.d_model + (0 if tied else c.vocab_size * c.d_model)  # embeddings: no product
    rest = train_step_flops(c, T, "eager") - 3 * attention_flops(c, T, "eager")
    assert rest == 6 * matmul_parameters(c) * T
    assert rest == pytest.approx(6 * (N - looked_up) * T, rel=0.01)  # biases and norms are all that is left
    # PaLM's term beside 6 N: 12 L H Q T a token.
    assert 3 * attention_flops(c, T, "eager") == 12 * c.num_layers * c.num_heads * c.head_dim * T * T


@pytest.mark.parametrize("length", [1, 7, 30])
@pytest.mark.parametrize("window", [1, 5, 30, 100])
def test_pairs_are_the_ones_of_the_mask(length, window):
    causal = torch.ones(length, length).tril()
    assert attention_pairs(length, "eager") == causal.numel()
    assert attention_pairs(length, "sdpa") == causal.sum()
    assert attention_pairs(length, "sliding_window", window) == causal.triu(1 - window).sum()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_and_rest_take_equal_operations_where_they_cross(implementation):
    c = config(d_model=32, vocab_size=300, sliding_window=400)
    crossing = crossover_length(c, implementation)
    assert attention_flops(c, crossing - 1, implementation) < non_attention_flops(c, crossing - 1)
    assert attention_flops(c, crossing, implementation) >= non_attention_flops(c, crossing)


def test_a_pattern_of_layers_costs_what_its_layers_cost():
    local, mixed = (config(num_layers=4, sliding_window=5, window_pattern=pattern) for pattern in (("S", "SSSL")))
    full = attention_flops(mixed, T, "sdpa") // 4
    assert attention_flops(mixed, T, "sliding_window") == 3 * attention_flops(local, T, "sliding_window") // 4 + full


def test_a_narrow_window_never_costs_as_much_as_the_rest():
    assert crossover_length(config(d_model=128, sliding_window=8), "sliding_window") is None


# Memory


def test_measured_memory_of_the_score_matrix_agrees_with_the_formula_to_ten_percent():
    c, length, sequences = config(d_model=64), 1024, 2
    options = {"config": c, "context_length": length, "sequences": sequences}
    MB = score_matrix_bytes(length, c.num_heads, sequences=sequences) / 2**20
    matrix = measure_memory("attention_pass", "cpu", 1, options | {"implementation": "eager"})
    sdpa = measure_memory("attention_pass", "cpu", 1, options | {"implementation": "sdpa"})
    rest = saved_activation_bytes(c, length, sequences) / 2**20 - MB  # K, V, output and mask
    assert MB == 32
    assert matrix["kept"] - rest == pytest.approx(MB, rel=0.1)
    assert 3 * MB < matrix["peak"] < 3.6 * MB  # the weights, their gradient and that of the scores, at once
    assert sdpa["kept"] < 0.1 * MB and sdpa["peak"] < 0.5 * MB  # SDPA never stores it


def test_a_child_that_dies_has_no_memory_figure():
    options = {"config": config(), "implementation": "sdpa", "context_length": 32, "sequences": 0}
    assert measure_memory("attention_pass", "no such device", 1, options) is None


def test_ctrl_c_ends_a_child_silently(clean_environment, tmp_path):
    (tmp_path / "interrupted.py").write_text(
        """
import signal
class Device(str):
    def partition(self, separator):
        signal.raise_signal(signal.SIGINT)
"""
    )
    code = """
from benchmarks.memory_of import measure_memory
from interrupted import Device
print(measure_memory("attention_pass", Device("cpu"), 1, {}))
"""
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PROJECT,
        env=clean_environment | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        **FOREGROUND,
    )
    assert (finished.stdout, finished.stderr) == ("None\n", "")


# How it grows


@pytest.mark.parametrize(("a", "b"), [(3.0, 0.01), (0.5, 0.05), (20.0, 1e-4)])
def test_fit_finds_the_coefficients_within_their_errors(a, b):
    lengths = np.array([2.0**n for n in range(6, 14)])
    draw, found = np.random.default_rng(0), []
    for _ in range(200):
        noisy = (a * lengths + b * lengths**2) * (1 + 0.03 * draw.standard_normal(len(lengths)))
        found.append(fit_growth(lengths.tolist(), noisy.tolist()))
    for name, true in (("a", a), ("b", b)):
        values = np.array([getattr(growth, name) for growth in found])
        errors = np.array([getattr(growth, name + "_error") for growth in found])
        assert values.mean() == pytest.approx(true, rel=0.05)
        assert errors.mean() == pytest.approx(values.std(), rel=0.3)  # the error stated is the scatter there is
        assert 0.55 < (abs(values - true) < errors).mean() < 0.8  # about two thirds lie within one


@pytest.mark.parametrize("exponent", [1.0, 1.5, 2.0])
def test_fit_finds_the_exponent_of_the_longest_lengths(exponent):
    lengths = [2.0**n for n in range(6, 14)]
    draw = np.random.default_rng(0)
    times = [max(T, 1024) ** exponent * (1 + 0.02 * draw.standard_normal()) for T in lengths]  # flat when short
    growth = fit_growth(lengths, times)
    assert growth.exponent_from == 1024
    assert growth.exponent == pytest.approx(exponent, abs=4 * growth.exponent_error)
    assert 0 < growth.exponent_error < 0.05


def test_fit_of_few_lengths_states_no_error_it_cannot_know():
    assert fit_growth([64], [1.0]) is None
    two = fit_growth([64, 128], [64.0, 256.0])
    assert two.exponent == pytest.approx(2) and two.exponent_error is two.a_error is two.b_error is None


def test_overtaking_is_found_between_two_lengths():
    lengths = [64, 128, 256, 512]
    assert where_equal(lengths, [T**2 for T in lengths], [200 * T for T in lengths]) == pytest.approx(200)
    assert where_equal(lengths, [T for T in lengths], [T + 1 for T in lengths]) is None
    assert where_equal(lengths, [T + 1 for T in lengths], [T for T in lengths]) is None


# The command

TINY = ("model.num_layers=1", "model.num_heads=2", "model.d_model=16", "model.vocab_size=50", "tokens_per_batch=64")


@pytest.fixture
def quick(monkeypatch):
    """Few runs and no child processes: what the command does with figures, not the figures."""
    monkeypatch.setattr(context_cost, "SECONDS_A_TIMING", 0.0)
    monkeypatch.setattr(context_cost, "matmul_gflops_per_second", lambda device: 100.0)
    monkeypatch.setattr(context_cost, "measure_memory", lambda *arguments: {"peak": 10.0, "kept": 1.0})


def test_command_measures_prints_draws_and_logs(clean_environment, events, tmp_path):
    settings = (
        *TINY,
        "lengths=[32,16]",
        "model.sliding_window=8",
        f"png={tmp_path / 'cost.png'}",
        f"logdir={tmp_path}",
    )
    command = [sys.executable, "-m", "benchmarks.context_cost", *settings]
    finished = subprocess.run(command, cwd=PROJECT, env=clean_environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0 and finished.stderr == "", finished
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["skipped"] == []
    for name in IMPLEMENTATIONS:
        readings = [reading for reading in result["readings"] if reading["implementation"] == name]
        assert [reading["context_length"] for reading in readings] == [16, 32]
        for reading in readings:
            assert reading["context_length"] * reading["sequences"] == 64
            for part in ("attention", "step"):
                assert 0 < reading[part]["low_ms"] <= reading[part]["ms"] <= reading[part]["high_ms"]
            assert reading["step_peak_mb"] > 0
        assert set(result["fits"][name]) == {"attention", "step"}
        for tag in ("attention_ms", "step_ms", "step_peak_mb", "step_gflops"):
            points = events(tmp_path / name).Scalars(f"cost_by_context_length/{tag}")
            assert [point.step for point in points] == [16, 32]
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert "Attention of all layers takes as long as the rest" in finished.stdout


@pytest.mark.parametrize(("lengths", "stated"), [("16,32", False), ("16,32,64", True)])
def test_standard_error_that_cannot_be_known_is_left_out_and_null_in_json(quick, capsys, lengths, stated):
    context_cost.main(compose("context_cost", [*TINY, f"lengths=[{lengths}]", "model.sliding_window=8"]))
    out = capsys.readouterr().out
    fits = json.loads(out.splitlines()[-1], parse_constant=pytest.fail)["fits"]  # NaN is no JSON
    assert (" ± " in out) == stated and "± nan" not in out
    for fit in (part for parts in fits.values() for part in parts.values()):
        for name in ("a_error", "b_error", "exponent_error"):
            assert (fit[name] is not None) == stated


def test_time_budget_stops_and_says_what_was_skipped(quick, monkeypatch, capsys):
    clock = iter(range(0, 100_000, 20))  # every look at the clock is 20 seconds later
    monkeypatch.setattr(context_cost.time, "perf_counter", lambda: float(next(clock)))
    with pytest.raises(UserError, match="nothing fitted into the budget"):
        context_cost.main(compose("context_cost", [*TINY, "lengths=[16,32]", "seconds=10"]))
    assert "skipped: eager at 16 and longer: needs about 0 s, 0 of 10 s left (seconds)" in (capsys.readouterr().out)


def test_memory_budget_stops_the_eager_matrix_alone_and_says_so(quick, capsys):
    # 64 x 64 scores a head, 2 heads, 3 at once: 0.09 MB above the 10 MB that were measured at 32.
    context_cost.main(compose("context_cost", [*TINY, "lengths=[16,32,64,128]", "memory_mb=10.03"]))
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert len(result["skipped"]) == 1 and result["skipped"][0] in out
    assert result["skipped"][0].startswith("eager at 64 and longer: needs about 10 MB, the limit is 10 MB")
    longest = {
        name: max(r["context_length"] for r in result["readings"] if r["implementation"] == name)
        for name in IMPLEMENTATIONS
    }
    assert longest.pop("eager") == 32
    assert set(longest.values()) == {128}


@pytest.mark.parametrize("setting", ["lengths=[]", "lengths=[8]", "tokens_per_batch=0", "seconds=0", "png=cost.bmp"])
def test_what_cannot_be_measured_is_refused(setting):
    with pytest.raises(UserError, match=setting.partition("=")[0]):
        context_cost.main(compose("context_cost", [*TINY, setting]))


def test_every_implementation_gives_the_same_attention_where_the_window_holds_all():
    outputs = []
    for name in IMPLEMENTATIONS:
        torch.manual_seed(0)
        outputs.append(attention_pass(config(sliding_window=T), name, T, 2, "cpu").forward())
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])


def test_eager_step_is_the_sdpa_step():
    torch.manual_seed(0)
    network, ids = GPT(config(positions="rope")), torch.randint(70, (2, T))
    fast = network(ids)
    for block in network.blocks:
        block.attention = EagerAttention(block.attention)
    torch.testing.assert_close(network(ids), fast)
