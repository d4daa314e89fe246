"""Our RMSNorm is PyTorch's, values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from model.layers import RMSNorm, rms_norm


@pytest.mark.parametrize("shape", [(4, 7, 32), (5, 1), (2, 3, 4, 8), (0, 16)])
def test_values_and_gradients_are_pytorchs(shape):
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    grad = torch.randn(shape)
    ours, theirs = rms_norm(x, 1e-5), F.rms_norm(x, shape[-1:], eps=1e-5)
    assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    (our_grad,), (their_grad,) = (torch.autograd.grad(y, x, grad) for y in (ours, theirs))
    assert_close(our_grad, their_grad, atol=1e-5, rtol=1e-5)


def test_the_derivative_is_the_limit_of_differences():
    torch.manual_seed(0)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, 0.1), x)


def test_the_module_has_pytorchs_weight():
    torch.manual_seed(0)
    ours, theirs, x = RMSNorm(8, 1e-6), torch.nn.RMSNorm(8, 1e-6), torch.randn(3, 8)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    assert_close(ours(x), theirs(x))


def test_vectors_of_zeros_and_half_precision_work():
    assert torch.equal(rms_norm(torch.zeros(2, 4), 1e-6), torch.zeros(2, 4))
    assert rms_norm(torch.randn(2, 4).bfloat16(), 1e-6).dtype == torch.bfloat16
