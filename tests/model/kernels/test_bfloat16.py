"""Training's products in bfloat16: rounded as promised, in training steps alone, on machines that have units for it."""

import logging

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch.testing import assert_close
from torch.utils.data import DataLoader

import training.setup
import training.trainer
from model.config import GPTConfig
from model.gpt import GPT
from model.kernels.bfloat16 import BF16_MATMUL, bf16_matmul, bf16_matmul_enabled, matmul_precision
from model.layers import Linear
from system.errors import UserError
from training.trainer import best_precision, build_trainer, resolve_trainer_options

TINY = dict(num_layers=2, num_heads=2, d_model=32, context_length=16, positions="rope", norm="rmsnorm", mlp="relu2")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def loss_and_gradients(network: GPT, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    network.zero_grad()
    loss = network.loss(ids[:, :-1], ids[:, 1:])
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in network.named_parameters()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 16), (7, 16), (16,)])
def test_a_layer_rounds_what_it_multiplies_and_nothing_else(shape, bias):
    torch.manual_seed(0)
    layer, x = Linear(16, 24, bias=bias), torch.randn(shape, requires_grad=True)
    with bf16_matmul():
        y = layer(x)
    expected = F.linear(x.bfloat16(), layer.weight.bfloat16()).float()
    assert_close(y, expected + layer.bias if bias else expected, atol=0, rtol=0)

    grad = torch.randn_like(y)
    grad_x, grad_weight = torch.autograd.grad(y, (x, layer.weight), grad)
    rounded = grad.bfloat16().reshape(-1, 24).double()
    exact_x = (rounded @ layer.weight.bfloat16().double()).view(shape)
    exact_weight = rounded.T @ x.bfloat16().reshape(-1, 16).double()
    for ours, exact in ((grad_x, exact_x), (grad_weight, exact_weight)):
        assert ours.dtype == torch.float32
        assert_close(ours.double(), exact, atol=1e-6, rtol=2**-8)  # only the result is rounded once more


@pytest.mark.parametrize("family", [dict(bias=False), dict(mlp="swiglu", num_kv_heads=1, tied_embeddings=False)])
def test_every_matrix_of_a_network_takes_part_and_stays_close_to_float32(family):
    torch.manual_seed(0)
    network = GPT(GPTConfig(vocab_size=50, **{**TINY, **family}))
    ids = torch.randint(50, (4, 17))
    exact_loss, exact = loss_and_gradients(network, ids)
    with bf16_matmul():
        loss, gradients = loss_and_gradients(network, ids)
    assert_close(loss, exact_loss, atol=0, rtol=5e-3)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        error = ((gradient - exact[name]).norm() / exact[name].norm()).item()
        assert 1e-5 < error < 0.05, name


def test_outside_of_the_context_nothing_changes():
    torch.manual_seed(0)
    network, ids = GPT(GPTConfig(vocab_size=50, **TINY)), torch.randint(50, (4, 17))
    before = loss_and_gradients(network, ids)
    with pytest.raises(KeyError), bf16_matmul():
        raise KeyError
    after = loss_and_gradients(network, ids)
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])


def test_other_types_are_left_alone():
    with bf16_matmul():
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            x = torch.randn(4, 16, dtype=dtype)
            layer = Linear(16, 8).to(dtype)
            assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_second_derivative_is_refused_and_never_wrong():
    layer, x = Linear(16, 16), torch.randn(2, 3, 16, requires_grad=True)
    with bf16_matmul():
        y = layer(x)
    (grad,) = torch.autograd.grad(y.tanh().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


@pytest.mark.parametrize("has_units", [True, False])
def test_auto_takes_it_where_the_processor_has_units(monkeypatch, has_units):
    monkeypatch.setattr(training.trainer, "has_bf16_units", lambda: has_units)
    assert best_precision(CPU) == (BF16_MATMUL if has_units else "32-true")
    options = {"precision": "auto", "max_steps": 1, "accelerator": "cpu"}
    assert resolve_trainer_options(options)["precision"] == best_precision(CPU)
    assert resolve_trainer_options(options | {"precision": "32-true"})["precision"] == "32-true"


def test_elsewhere_than_on_a_cpu_it_is_refused(monkeypatch):
    monkeypatch.setattr(training.trainer, "expected_device", lambda options: CUDA)
    with pytest.raises(UserError, match=r"bf16-matmul.*32-true"):
        resolve_trainer_options({"precision": BF16_MATMUL, "max_steps": 1})


def test_a_precision_that_does_not_exist_is_refused_with_all_that_do(refuse, tiny):
    error = refuse("train", *tiny, "trainer.max_steps=1", "trainer.precision=bf16_products")
    assert all(name in error for name in ("'bf16_products'", "32-true", "bf16-mixed", "auto", BF16_MATMUL))


@pytest.mark.parametrize("options", [{}, {"precision": None}])
def test_where_no_precision_is_given_it_is_float32(options):
    precision = resolve_trainer_options(options | {"max_steps": 1})["precision"]
    assert precision == "32-true"


def test_compiled_a_network_trains_in_float32(train_here, monkeypatch):
    monkeypatch.setattr(training.trainer, "has_bf16_units", lambda: True)
    monkeypatch.setattr(training.setup, "maybe_compile", lambda *args: None)  # it takes a minute
    assert "in 32-true" in train_here("compile=true", "trainer.max_steps=1").stdout


def test_compiled_and_in_bf16_matmul_is_refused(refuse, tiny):
    error = refuse("train", *tiny, "compile=true", "trainer.max_steps=1", f"trainer.precision={BF16_MATMUL}")
    assert "compile=false" in error and "trainer.precision=auto" in error


class Watching(LightningModule):
    """Notes in which type training and validation multiply."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = Linear(8, 8, bias=False), {}

    def note(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.seen[kind] = torch.equal(y, F.linear(x.bfloat16(), self.layer.weight.bfloat16()).float())
        return y.square().mean()

    def training_step(self, batch, batch_idx):
        return self.note("training", batch)

    def validation_step(self, batch, batch_idx):
        self.note("validation", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", [BF16_MATMUL, "32-true"])
def test_lightning_trains_in_it_and_validates_in_float32(precision, tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    torch.manual_seed(0)
    loader = DataLoader(torch.randn(2, 8), batch_size=2)
    options = resolve_trainer_options({"precision": precision, "max_steps": 2, "accelerator": "cpu"})
    trainer = build_trainer(
        options, 1, [], default_root_dir=tmp_path, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Watching()
    trainer.fit(module, loader, loader)
    assert trainer.precision == precision
    assert module.seen == {"training": precision == BF16_MATMUL, "validation": False}


def test_only_its_own_name_switches_it_on():
    for precision in ("32-true", "bf16-mixed", "64-true"):
        with matmul_precision(precision):
            assert not bf16_matmul_enabled()
    with matmul_precision(BF16_MATMUL):
        assert bf16_matmul_enabled()
