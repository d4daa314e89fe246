"""Our dropout drops the share it is told to, scales the rest, and is the same in the backward pass."""

import pytest
import torch

from model.layers import Dropout


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_it_drops_its_share_and_keeps_the_mean(p):
    torch.manual_seed(0)
    y = Dropout(p)(torch.ones(1000, 500))
    share = (y == 0).double().mean().item()
    assert abs(share - p) < 1 / 256  # p is rounded to bytes
    kept = y[y != 0].unique()
    assert kept.numel() == 1
    assert kept.item() == pytest.approx(1 / (1 - share), rel=0.01)
    assert y.mean().item() == pytest.approx(1, abs=0.01)


def test_entries_are_dropped_independently():
    torch.manual_seed(0)
    dropped = (Dropout(0.3)(torch.ones(400, 1001)) == 0).double()  # no multiple of eight
    expected = dropped.mean().item() ** 2
    for shift in (1, 2, 7, 8, 9, 64):
        both = dropped[:, shift:] * dropped[:, :-shift]
        assert both.mean().item() == pytest.approx(expected, abs=0.005), shift
    assert (dropped[1:] * dropped[:-1]).mean().item() == pytest.approx(expected, abs=0.005)


def test_the_gradient_is_dropped_where_the_value_was():
    torch.manual_seed(0)
    x = torch.randn(7, 13, requires_grad=True)
    y = Dropout(0.5)(x)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)
    assert 0 < (y == 0).sum() < y.numel()


def test_the_seed_decides():
    x = torch.ones(100, 3)
    first, again, other = (Dropout(0.5)(x) for seed in (1, 1, 2) if torch.manual_seed(seed))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_it_is_off_in_evaluation_and_at_a_share_of_zero():
    x = torch.randn(5, 5)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert Dropout(0.5)(torch.ones(0, 4)).shape == (0, 4)
