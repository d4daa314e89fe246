"""Value-weighted attention is the length of the vectors that a head adds, from the network's own outputs."""

import pytest
import torch
from torch.testing import assert_close

from analysis.value_weighted_attention import value_norms, value_weighted_maps
from tests.analysis.networks import FAMILIES, VOCAB_SIZE, random_network

IDS = torch.randint(VOCAB_SIZE, (2, 14), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_that_attends_only_to_itself_adds_its_weighted_value(family):
    """As does the first one: its value-weighted attention is the length of the head's output."""
    network = random_network(family)
    maps = value_weighted_maps(network, IDS)
    assert network.training and maps.shape == (3, 2, 4, 14, 14)
    network.eval()
    for layer, block in enumerate(network.blocks):
        seen = []
        hook = block.attention.out_proj.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        network(IDS)
        hook.remove()
        for head in range(4):
            columns = slice(8 * head, 8 * head + 8)
            added = seen[0][:, 0, columns] @ block.attention.out_proj.weight[:, columns].T  # (B, C)
            assert_close(maps[layer, :, head, 0, 0], added.norm(dim=-1))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_maps_are_the_weights_times_the_norms_and_zero_where_attention_is(family):
    network = random_network(family)
    maps, norms, weights = value_weighted_maps(network, IDS), value_norms(network, IDS), network.attention_maps(IDS)
    assert norms.shape == (3, 2, 4, 14) and norms.min() > 0
    for layer in range(3):
        for key in range(14):
            assert_close(maps[layer][..., key], weights[layer][..., key] * norms[layer][..., key, None])
