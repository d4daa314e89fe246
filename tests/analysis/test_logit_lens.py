"""The logit lens ends with the network's own logits, and shows those of a network cut off after a layer before."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from analysis import residual_stream
from analysis.logit_lens import lens_losses, logit_lens
from tests.analysis.networks import FAMILIES, VOCAB_SIZE, random_network

TOKENS = torch.randint(VOCAB_SIZE, (5, 14), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_shows_the_logits_of_a_network_that_ends_there(family):
    network = random_network(family)
    logits = logit_lens(network, TOKENS)
    assert network.training and logits.shape == (4, 5, 14, VOCAB_SIZE)
    assert torch.equal(logits[3], network.eval()(TOKENS))  # bit for bit
    for layer in range(3):
        cut = copy.deepcopy(network).eval()
        cut.blocks = cut.blocks[:layer]
        assert_close(logits[layer], cut(TOKENS))
        assert (logits[layer] - logits[layer + 1]).abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_the_cross_entropy_of_these_logits(family, monkeypatch):
    network, sizes = random_network(family), []
    plain = type(network).logits
    monkeypatch.setattr(type(network), "logits", lambda self, x: sizes.append(x[..., 0].numel()) or plain(self, x))
    monkeypatch.setattr(residual_stream, "MAX_LOGITS", 10 * VOCAB_SIZE)
    losses = lens_losses(network, TOKENS)
    assert network.training and max(sizes) == 10  # rows of logits at once
    for loss, logits in zip(losses, logit_lens(network, TOKENS[:, :-1]), strict=True):
        assert_close(loss, F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()))
