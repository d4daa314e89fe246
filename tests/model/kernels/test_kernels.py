"""Kernels change the speed and nothing else: one switch, and the same numbers with it off."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import benchmarks.kernels
from configs.compose import compose
from model import kernels
from model.config import GPTConfig
from model.gpt import GPT
from model.kernels.bfloat16 import bf16_matmul
from model.layers import linear
from tests.model.test_gpt import FAMILIES, family

SHAPE = {"vocab_size": 300, "context_length": 96, "num_layers": 2, "num_heads": 4, "d_model": 32}
NETWORKS = {name: family(name, **SHAPE) for name in FAMILIES}
NETWORKS["grouped"] = family("llama", **SHAPE, num_kv_heads=2)
NETWORKS["capped"] = family("tiny", **SHAPE, logit_soft_cap=9.0)
NETWORKS["sliding_window"] = family("tiny", **SHAPE, sliding_window=20, window_pattern="SL")
NETWORKS["long"] = family("gpt2", **SHAPE | {"context_length": 520})


@pytest.fixture(autouse=True)
def restored():
    """Kernels are on before and after each test."""
    kernels.set_enabled(True)
    yield
    kernels.set_enabled(True)


@pytest.mark.parametrize("config", NETWORKS.values(), ids=NETWORKS)
def test_logits_loss_and_gradients_are_the_same_without_kernels(config):
    torch.manual_seed(0)
    gpt = GPT(dataclasses.replace(config, bigram_dropout=0.0, dropout=0.0))
    for parameter in gpt.parameters():
        nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(config.vocab_size, (3, config.context_length + 1))
    found = []
    for on in (True, False):
        kernels.set_enabled(on)
        loss = gpt.loss(ids[:, :-1], ids[:, 1:])
        gradients = torch.autograd.grad(loss, list(gpt.parameters()))
        found.append([gpt(ids[:, :-1]).detach(), loss.detach(), *gradients])
    for with_kernels, without in zip(*found, strict=True):
        assert_close(with_kernels, without, atol=2e-5 * without.abs().max().item(), rtol=1e-4)


def test_switched_off_no_kernel_runs(monkeypatch):
    def runs(*args, **options):
        raise AssertionError("a kernel ran")

    monkeypatch.setattr(torch.autograd.Function, "apply", runs)  # all kernels that train are such functions
    gpt = GPT(GPTConfig(**SHAPE, sliding_window=10, qk_norm=True, positions="rope", norm="rmsnorm", mlp="relu2"))
    ids = torch.zeros(2, 80, dtype=torch.long)
    with pytest.raises(AssertionError, match="a kernel ran"):
        gpt.loss(ids, ids)
    kernels.set_enabled(False)
    gpt.loss(ids, ids).backward()


def test_kernels_are_for_plain_float32_on_a_cpu_outside_of_compile_and_autocast():
    x = torch.ones(2)
    assert kernels.enabled() and kernels.enabled(x, x)
    assert not kernels.enabled(x, x.double()) and not kernels.enabled(x.bfloat16())
    assert not kernels.enabled(torch.ones(2, device="meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels.enabled() and not kernels.enabled(x)
    kernels.set_enabled(False)
    assert not kernels.enabled() and not kernels.enabled(x)


def test_matrix_products_in_bfloat16_follow_the_switch():
    x, weight = torch.randn(3, 16), torch.randn(8, 16)
    with bf16_matmul():
        rounded = linear(x, weight)
        kernels.set_enabled(False)
        assert torch.equal(linear(x, weight), nn.functional.linear(x, weight))
    assert not torch.equal(rounded, linear(x, weight))


def test_a_run_trains_with_kernels_off_by_the_environment(call, tiny, tmp_path):
    off = {"TINY_GPT_KERNELS": "0"}
    done = call("train.py", *tiny, f"runs_dir={tmp_path}", "trainer.max_steps=12", runs=tmp_path, env=off)
    assert done.returncode == 0, done.stderr
    assert "in 32-true" in done.stdout  # and not in a precision that is a kernel
    assert done.path.joinpath("summary.json").is_file()


def test_asking_for_a_precision_that_is_a_kernel_is_refused_where_kernels_are_off(refuse, tiny):
    error = refuse("train", *tiny, "trainer.max_steps=1", "trainer.precision=bf16-matmul", "kernels=off")
    assert "kernels are off" in error and "32-true" in error


def test_a_precision_by_its_former_name_is_refused_with_its_new_name(refuse, tiny):
    error = refuse("train", *tiny, "trainer.max_steps=1", "trainer.precision=bf16-products")
    assert "now called bf16-matmul" in error


def test_the_benchmark_takes_each_kernel_away_and_gives_it_back(capsys):
    before = [(module, name, getattr(importlib.import_module(module), name)) for module, name, _ in replaced()]
    benchmarks.kernels.main(compose("kernels", ["pairs=1", "vocab_size=300"]))
    rows = capsys.readouterr().out
    assert "(family" in rows.splitlines()[0]  # the processor's generation
    for name in benchmarks.kernels.KERNELS:
        assert f"\n{name} " in rows
    result = json.loads(rows.splitlines()[-1])["step_time_without"]
    assert result["norm.py"]["default"] > 0 and result["norm.py"]["gpt2"] is None  # GPT-2 has LayerNorm
    assert kernels.enabled()
    assert all(getattr(importlib.import_module(module), name) is function for module, name, function in before)


def replaced():
    return [each for some in benchmarks.kernels.KERNELS.values() for each in some]


def test_every_file_of_kernels_is_a_row_of_the_benchmark():
    files = {path.name for path in Path(kernels.__file__).parent.glob("*.py")} - {"__init__.py", "linear.py"}
    local = {"sliding_window.py", "flex_attention.py"}  # no part of either step: benchmarks.attention_speed has them
    assert files - local == {name.split(",")[0] for name in benchmarks.kernels.KERNELS}
