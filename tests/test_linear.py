"""The linear layer multiplies through another library on some machines; the numbers stay."""

import pytest
import torch
import torch.nn.functional as F

import model.linear
from model.linear import Linear


@pytest.fixture
def onednn(monkeypatch):
    """Takes the oneDNN path on any machine that has it."""
    if not model.linear.has_onednn():
        pytest.skip("this PyTorch carries no oneDNN")
    monkeypatch.setattr(model.linear, "onednn_is_faster", lambda: True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 16), (7, 16), (1, 1, 16), (0, 4, 16)])
def test_output_and_gradients_equal_pytorchs_linear(onednn, shape, bias):
    torch.manual_seed(0)
    layer, x = Linear(16, 24, bias=bias), torch.randn(shape, requires_grad=True)
    inputs = [x, *layer.parameters()]
    theirs = F.linear(x, layer.weight, layer.bias)
    ours = layer(x)
    grad = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for our_grad, their_grad in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad), strict=True
    ):
        torch.testing.assert_close(our_grad, their_grad, atol=1e-5, rtol=1e-5)


def test_a_strided_input_gives_the_same(onednn):
    x = torch.randn(6, 5, 32)[:, ::2, :16]
    layer = Linear(16, 8, bias=False)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight), atol=1e-6, rtol=1e-5)


def test_other_precisions_go_pytorchs_way(onednn):
    x = torch.randn(4, 16)
    assert Linear(16, 8).double()(x.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert Linear(16, 8)(x).dtype == torch.bfloat16


def test_the_choice_is_a_fact_of_the_machine():
    assert model.linear.onednn_is_faster() is model.linear.onednn_is_faster()
    assert Linear(4, 4).state_dict().keys() == torch.nn.Linear(4, 4).state_dict().keys()
