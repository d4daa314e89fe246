"""The MLP's non-linearities against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from model.kernels.activation import MIN_NUMEL, gelu, squared_relu


def gelu_by_torch(x: torch.Tensor) -> torch.Tensor:
    """GPT-2's form."""
    return F.gelu(x, approximate="tanh")


def gradient(function, x: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """Of x, for a gradient of what the function makes of it."""
    return torch.autograd.grad(function(x), x, upstream)[0]


def test_squared_relu_and_its_gradient_are_those_written_out():
    x = torch.cat([torch.randn(400) * 10, torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e15])]).requires_grad_()
    assert torch.equal(squared_relu(x), F.relu(x).square())
    assert torch.equal(squared_relu(x.detach()), F.relu(x).square())
    upstream = torch.randn_like(x)
    assert torch.equal(gradient(squared_relu, x, upstream), gradient(lambda x: F.relu(x).square(), x, upstream))
    assert torch.autograd.gradcheck(squared_relu, torch.randn(3, 7, dtype=torch.float64).requires_grad_())


def test_gelu_and_its_gradient_are_pytorchs_in_all_that_float64_can_tell():
    x = torch.linspace(-12, 12, MIN_NUMEL + 1, dtype=torch.float64).requires_grad_()
    upstream = torch.randn_like(x)
    assert_close(gelu(x), gelu_by_torch(x), rtol=1e-12, atol=1e-14)
    assert_close(gelu(x.detach()), gelu_by_torch(x.detach()), rtol=1e-12, atol=1e-14)
    assert_close(gradient(gelu, x, upstream), gradient(gelu_by_torch, x, upstream), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 30.0, 1e6, 1e12])
def test_gelu_of_any_size_is_as_near_in_float32_as_pytorchs(scale):
    x = (scale * torch.randn(MIN_NUMEL)).requires_grad_()
    exact = x.detach().double().requires_grad_()
    assert_close(gelu(x).double(), gelu_by_torch(exact), rtol=2e-6, atol=3e-7)
    slope = gradient(gelu_by_torch, exact, torch.ones_like(exact))
    assert_close(gradient(gelu, x, torch.ones_like(x)).double(), slope, rtol=2e-6, atol=3e-6)


def test_few_numbers_get_the_same_gelu():
    x = torch.randn(MIN_NUMEL)
    assert_close(gelu(x[: MIN_NUMEL - 1]), gelu(x)[: MIN_NUMEL - 1], rtol=1e-5, atol=1e-6)
    assert torch.equal(gelu(x[: MIN_NUMEL - 1]), gelu_by_torch(x[: MIN_NUMEL - 1]))


@pytest.mark.parametrize("function", [squared_relu, gelu])
def test_inputs_and_gradients_stay_as_they_are(function):
    x, upstream = torch.randn(2, MIN_NUMEL).unbind()
    before, upstream_before = x.clone(), upstream.clone()
    function(x)
    gradient(function, x.requires_grad_(), upstream)
    assert torch.equal(x, before) and torch.equal(upstream, upstream_before)


@pytest.mark.parametrize("function", [squared_relu, gelu])
def test_second_derivative_is_refused_and_not_wrong(function):
    x = torch.randn(MIN_NUMEL, requires_grad=True)
    (slope,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.sum().backward()


@pytest.mark.parametrize("function", [squared_relu, gelu])
def test_both_compile(function):
    x = torch.randn(MIN_NUMEL, requires_grad=True)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    ones = torch.ones_like(x)
    assert_close(gradient(compiled, x, ones), gradient(function, x, ones), rtol=1e-5, atol=3e-6)
