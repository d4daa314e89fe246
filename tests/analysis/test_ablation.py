"""Ablation costs are those of a network in which the part was removed by editing its weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from analysis.ablation import ablate, ablation_costs
from model.gpt import GPT, Block
from system.errors import UserError
from tests.analysis.networks import FAMILIES, VOCAB_SIZE, random_network

TOKENS = torch.randint(VOCAB_SIZE, (5, 14), generator=torch.Generator().manual_seed(1))


def loss_of(network: GPT) -> Tensor:
    return F.cross_entropy(network.eval()(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())


def inputs_of(network: GPT, module: torch.nn.Module) -> Tensor:
    """What the module gets as input, (5, 13, ...)."""
    seen = []
    hook = module.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    loss_of(network)
    hook.remove()
    return seen[0]


def without(network: GPT, layer: int, head: int | None, replacement: str) -> GPT:
    """A copy with edited weights: the head's columns, or of an MLP (head=None) all, are zero; the mean is a bias."""
    network = copy.deepcopy(network)
    block = network.blocks[layer]
    linear = block.mlp.down if head is None else block.attention.out_proj
    columns = slice(None) if head is None else slice(8 * head, 8 * head + 8)
    mean = inputs_of(network, linear)[..., columns].mean((0, 1))
    moved = linear.weight[:, columns] @ mean
    bias = torch.zeros(32) if linear.bias is None else linear.bias.clone()
    if replacement == "mean":
        bias += moved
    elif head is None:
        bias.zero_()  # the bias belongs to the MLP, and to no head
    linear.weight[:, columns] = 0
    linear.bias = torch.nn.Parameter(bias)
    return network


@torch.no_grad()
@pytest.mark.parametrize("replacement", ["mean", "zero"])
@pytest.mark.parametrize("family", FAMILIES)
def test_costs_are_those_of_a_network_with_edited_weights(family, replacement):
    network = random_network(family)
    costs = ablation_costs(network, TOKENS, replacement)
    assert network.training and costs.heads.shape == (3, 4) and costs.mlps.shape == (3,)
    whole = loss_of(network)
    assert costs.loss == pytest.approx(whole.item(), abs=1e-5)
    for layer in range(3):
        for head in range(4):
            expected = loss_of(without(network, layer, head, replacement)) - whole
            assert_close(costs.heads[layer, head], expected, atol=1e-5, rtol=1e-5)
        expected = loss_of(without(network, layer, None, replacement)) - whole
        assert_close(costs.mlps[layer], expected, atol=1e-5, rtol=1e-5)
    assert costs.heads.abs().min() > 1e-4  # so that none of these comparisons is between zeros


@torch.no_grad()
@pytest.mark.parametrize("replacement", ["mean", "zero"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_inside_the_context_are_those_of_edited_weights_and_outside_as_before(family, replacement):
    network = random_network(family).eval()
    ids, before = TOKENS[:, :-1], network(TOKENS[:, :-1])
    with ablate(network, 1, 2, replacement=replacement):
        inside = network(ids)
    assert_close(inside, without(network, 1, 2, replacement)(ids), atol=1e-4, rtol=1e-4)
    assert (inside - before).abs().max() > 0.01 and torch.equal(network(ids), before)


@torch.no_grad()
def test_all_heads_of_a_layer_and_a_given_replacement():
    network = random_network("gpt2").eval()
    ids, attention = TOKENS[:, :-1], network.blocks[1].attention
    with ablate(network, 1, replacement="zero"):
        attended = inputs_of(network, network.blocks[1].mlp_norm)  # the residual stream after attention
    assert_close(attended, inputs_of(network, network.blocks[1].attention_norm) + attention.out_proj.bias)
    own = inputs_of(network, attention.out_proj)[..., 16:24]
    before = network(ids)
    with ablate(network, 1, 2, replacement=own):
        assert torch.equal(network(ids), before)
    with ablate(network, 1, 2, replacement=own + 1):
        assert (network(ids) - before).abs().max() > 0.01


@torch.no_grad()
def test_an_edited_block_is_ablated_as_edited(monkeypatch):
    def in_parallel(self, x, rope=None, cache=None):
        """Attention and MLP side by side, as in GPT-J."""
        h = self.attention_norm(x)
        return x + self.attention(h, causal=True, window=self.window, rope=rope, cache=cache) + self.mlp(h)

    before = ablation_costs(random_network("llama"), TOKENS)
    monkeypatch.setattr(Block, "forward", in_parallel)
    network = random_network("llama")
    costs, whole = ablation_costs(network, TOKENS), loss_of(network)
    assert abs(costs.loss - before.loss) > 0.01
    for layer in range(3):
        expected = loss_of(without(network, layer, 1, "mean")) - whole
        assert_close(costs.heads[layer, 1], expected, atol=1e-5, rtol=1e-5)


def test_hooks_and_mode_are_restored_after_an_error():
    network = random_network("gpt2")
    before = {
        name: len(module._forward_hooks) + len(module._forward_pre_hooks) for name, module in network.named_modules()
    }
    with pytest.raises(KeyError), ablate(network, 0, 0):
        raise KeyError
    with pytest.raises(IndexError):
        ablation_costs(network, TOKENS + VOCAB_SIZE)
    assert network.training
    for name, module in network.named_modules():
        assert len(module._forward_hooks) + len(module._forward_pre_hooks) == before[name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer": 3}, "layer is 3, but this model has layers 0 to 2."),
        ({"layer": -1}, "layer is -1, but this model has layers 0 to 2."),
        ({"layer": 0, "head": 4}, "head is 4, but this model has heads 0 to 3."),
        ({"layer": 0, "replacement": "none"}, "replacement is 'none', but must be one of mean, zero."),
    ],
)
def test_what_does_not_exist_is_rejected(arguments, message):
    with pytest.raises(UserError, match=message), ablate(random_network("gpt2"), **arguments):
        pass
