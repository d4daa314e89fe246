"""The output layer and its loss in chunks are the plain ones, to the last number one could use of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import model.kernels.cross_entropy
import model.kernels.onednn
from model.config import GPTConfig
from model.gpt import GPT
from model.kernels.cross_entropy import CHUNK_ROWS, fused_linear_cross_entropy
from model.layers import cross_entropy

V, C = 301, 24


@pytest.fixture(params=["onednn", "pytorch"])
def library(request, monkeypatch):
    """Either of the libraries that a machine may take."""
    if request.param == "onednn" and not model.kernels.onednn.has_onednn():
        pytest.skip("this PyTorch carries no oneDNN")
    monkeypatch.setattr(model.kernels.onednn, "onednn_is_faster", lambda: request.param == "onednn")


@pytest.fixture
def chunked(monkeypatch):
    """Whether each call of `cross_entropy` went in chunks, in order; only filled by calls that did."""
    calls, apply = [], model.kernels.cross_entropy._LinearCrossEntropy.apply

    class Noting:
        @staticmethod
        def apply(*inputs):
            calls.append(inputs)
            return apply(*inputs)

    monkeypatch.setattr(model.kernels.cross_entropy, "_LinearCrossEntropy", Noting)
    return calls


def inputs(N: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(N, C, dtype=dtype) * scale, torch.randn(V, C, dtype=dtype)
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(V, (N,))


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), targets)


def assert_same(x: Tensor, weight: Tensor, targets: Tensor, factor: float = 1.0, tolerance: float = 1e-5) -> None:
    """Loss and both gradients, as the plain way finds them."""
    losses = fused_linear_cross_entropy(x, weight, targets), plain(x, weight, targets)
    assert_close(*losses, atol=0, rtol=tolerance)
    ours, expected = (torch.autograd.grad(factor * loss, (x, weight)) for loss in losses)
    for gradient, exact in zip(ours, expected, strict=True):
        assert gradient.dtype == exact.dtype
        assert_close(gradient, exact, atol=tolerance * exact.abs().max().item(), rtol=tolerance)


@pytest.mark.parametrize("N", [1, 5, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, 2 * CHUNK_ROWS, 3 * CHUNK_ROWS + 7])
def test_loss_and_gradients_are_those_of_pytorch_whatever_the_rows(library, chunked, N):
    assert_same(*inputs(N))
    assert len(chunked) == 1


def test_float64_is_exact(chunked):
    assert_same(*inputs(CHUNK_ROWS + 3, torch.float64), tolerance=1e-12)
    x, weight, targets = inputs(4, torch.float64)
    assert torch.autograd.gradcheck(lambda x, weight: fused_linear_cross_entropy(x, weight, targets), (x, weight))
    assert len(chunked) > 2


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e3, 1e30])
def test_logits_of_any_size_are_no_overflow(library, scale):
    x, weight, targets = inputs(CHUNK_ROWS + 3, scale=scale)
    assert fused_linear_cross_entropy(x, weight, targets).isfinite()
    assert_same(x, weight, targets)


@pytest.mark.parametrize("factor", [0.25, -3.0, 65536.0])
def test_gradients_follow_what_the_loss_is_multiplied_by(library, factor):
    assert_same(*inputs(CHUNK_ROWS + 3), factor=factor)


def test_inputs_are_left_as_they_were(library):
    x, weight, targets = inputs(40)
    before = x.detach().clone(), weight.detach().clone(), targets.clone()
    fused_linear_cross_entropy(x, weight, targets).backward()
    assert all(torch.equal(a, b) for a, b in zip((x, weight, targets), before, strict=True))


def test_a_weight_or_an_input_that_does_not_learn_is_no_trouble(library):
    x, weight, targets = inputs(40)
    fused_linear_cross_entropy(x.detach(), weight, targets).backward()
    assert weight.grad.any() and x.grad is None
    with torch.no_grad():
        assert_close(fused_linear_cross_entropy(x, weight, targets), plain(x, weight, targets))


def test_second_derivative_is_refused_and_not_wrong(library):
    x, weight, targets = inputs(40)
    (gradient,) = torch.autograd.grad(fused_linear_cross_entropy(x, weight, targets).square(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_loss_that_is_no_number_shows(library):
    x, weight, targets = inputs(CHUNK_ROWS + 3)
    for bad in (torch.nan, torch.inf):
        with torch.no_grad():
            spoilt = x.clone()
            spoilt[-1, 0] = bad
            assert not fused_linear_cross_entropy(spoilt, weight, targets).isfinite()


# Where the plain way is taken


def test_under_autocast_it_is_the_plain_one(chunked):
    x, weight, targets = inputs(CHUNK_ROWS + 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cross_entropy(x, weight, targets), plain(x, weight, targets))
    assert chunked == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_is_the_plain_one(chunked, dtype):
    x, weight, targets = inputs(CHUNK_ROWS + 3, dtype)
    assert torch.equal(cross_entropy(x, weight, targets), plain(x, weight, targets))
    assert chunked == []


def test_compiled_it_is_the_plain_one(chunked):
    compiled = torch.compile(cross_entropy, backend="eager", fullgraph=True)
    assert_close(compiled(*inputs(40)), plain(*inputs(40)))
    assert chunked == []


@pytest.mark.parametrize("cap", [None, 15.0])
def test_capped_logits_go_the_plain_way(chunked, cap):
    gpt = GPT(GPTConfig(vocab_size=50, context_length=8, logit_soft_cap=cap))
    gpt.loss(torch.zeros(2, 8, dtype=torch.long), torch.ones(2, 8, dtype=torch.long)).backward()
    assert len(chunked) == (cap is None)
