"""Logit attribution: the parts sum to the logit, in every family, and each is what it is by its definition."""

import pytest
import torch

from analysis.logit_attribution import logit_attribution
from model.gpt import Block
from system.errors import UserError
from tests.analysis.networks import FAMILIES, VOCAB_SIZE, random_network

IDS = torch.randint(VOCAB_SIZE, (14,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("position", [-1, 0, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_sum_to_the_logit_and_to_the_difference_of_two(family, position):
    network = random_network(family)
    contributions = logit_attribution(network, IDS, 7, position=position)
    difference = logit_attribution(network, IDS, 7, versus=9, position=position)
    assert network.training and list(contributions) == list(difference)
    network.eval()
    logits = network.lm_head(network.final_norm(network.hidden_states(IDS[None])))[0, position]  # before a soft cap
    assert sum(contributions.values()) == pytest.approx(logits[7].item(), abs=1e-4)
    assert sum(difference.values()) == pytest.approx((logits[7] - logits[9]).item(), abs=1e-4)
    assert min(map(abs, contributions.values())) > 0


@pytest.mark.parametrize(
    ("family", "embeddings", "biases"),
    [
        ("gpt2", ["token embedding", "position embedding"], ["attention bias", "final norm bias"]),
        ("gpt2, untied", ["token embedding", "position embedding", "embedding norm bias"], ["attention bias", "final"]),
        ("llama", ["token embedding"], []),
        ("tiny", ["token embedding", "bigram embedding"], []),
    ],
)
def test_every_part_of_the_network_has_a_label(family, embeddings, biases):
    labels = list(logit_attribution(random_network(family), IDS, 7))
    assert labels[: len(embeddings)] == embeddings
    for layer in range(3):
        parts = [label for label in labels if label.startswith(f"layer {layer} ")]
        bias = [f"layer {layer} attention bias"] if biases else []
        assert parts == [*(f"layer {layer} head {head}" for head in range(4)), *bias, f"layer {layer} MLP"]
    assert labels[-1] == ("final norm bias" if biases else "layer 2 MLP")


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_contribution_of_a_part_of_the_last_layer_is_what_its_absence_takes_from_the_logit(family, monkeypatch):
    """In the last layer nothing reacts, except the norm, whose scale is fixed here."""
    network = random_network(family, logit_soft_cap=None).eval()
    x = network.hidden_states(IDS[None])[0, -1]
    monkeypatch.setattr(network.final_norm, "forward", fixed_scale(network.final_norm, x))
    contributions = logit_attribution(network, IDS, 7)
    before = network(IDS[None])[0, -1, 7]
    block = network.blocks[-1]
    block.mlp.down.weight.zero_()
    if block.mlp.down.bias is not None:
        block.mlp.down.bias.zero_()
    without_mlp = network(IDS[None])[0, -1, 7]
    assert contributions["layer 2 MLP"] == pytest.approx((before - without_mlp).item(), abs=1e-4)
    block.attention.out_proj.weight[:, 8:16] = 0  # the MLP cannot react any more
    without_head = network(IDS[None])[0, -1, 7]
    assert contributions["layer 2 head 1"] == pytest.approx((without_mlp - without_head).item(), abs=1e-4)


def fixed_scale(norm, x):
    """The norm as the linear function that it is around x when its scale does not change."""
    if isinstance(norm, torch.nn.LayerNorm):
        scale = (x.var(correction=0) + norm.eps) ** -0.5
        return lambda y: (y - y.mean(-1, keepdim=True)) * scale * norm.weight + norm.bias
    scale = (x.square().mean() + norm.eps) ** -0.5
    return lambda y: y * scale * (1 if norm.weight is None else norm.weight)


def test_edited_blocks_whose_outputs_do_not_add_up_are_rejected(monkeypatch):
    plain = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x, rope=None, cache=None: 0.5 * plain(self, x, rope, cache))
    with pytest.raises(UserError, match="needs blocks that add the outputs of attention and MLP to their input"):
        logit_attribution(random_network("llama"), IDS, 7)
