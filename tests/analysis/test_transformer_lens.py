"""The measures are those of TransformerLens, on exported networks. Skipped unless it is installed."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from analysis.ablation import ablation_costs
from analysis.activation_patching import patching_effects
from analysis.logit_attribution import logit_attribution
from analysis.logit_lens import logit_lens
from analysis.value_weighted_attention import value_weighted_maps
from checkpoint.checkpoint import Checkpoint
from data.config import TokenizerConfig
from data.tokenizer import build_tokenizer
from model.gpt import GPT
from tests.analysis.networks import random_network

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformer_lens = pytest.importorskip("transformer_lens")

CLEAN = torch.randint(256, (1, 12), generator=torch.Generator().manual_seed(1))
CORRUPTED = CLEAN.clone()
CORRUPTED[0, 4] = (CLEAN[0, 4] + 1) % 256


@dataclass
class Pair:
    """The same network twice, and TransformerLens' activations for the clean prompt."""

    ours: GPT
    theirs: object
    cache: object


@pytest.fixture(scope="module", params=["gpt2", "llama", "llama, grouped heads"])
def pair(request, tmp_path_factory) -> Pair:
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"), None, Path())
    network = random_network(request.param, vocab_size=tokenizer.n_vocab).eval()
    path = tmp_path_factory.mktemp("exported") / "model"
    Checkpoint(path, network, tokenizer, 7, {"nats_per_token": 1.25, "bits_per_byte": 2.5}).export_directory(
        path, {}, {}
    )
    theirs = transformer_lens.TransformerBridge.boot_transformers(str(path), device="cpu").eval()
    _, cache = theirs.run_with_cache(CLEAN)
    return Pair(network, theirs, cache)


@torch.no_grad()
def test_logit_lens(pair):
    stream, _ = pair.cache.accumulated_resid(layer=-1, incl_mid=False, return_labels=True)
    for ours, x in zip(logit_lens(pair.ours, CLEAN), stream, strict=True):
        assert_close(ours, pair.theirs.unembed(pair.theirs.ln_final(x)), atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_logit_attribution(pair):
    stack, labels = pair.cache.get_full_resid_decomposition(
        expand_neurons=False, apply_ln=False, pos_slice=-1, return_labels=True
    )
    stack = pair.cache.apply_ln_to_stack(stack, layer=-1, pos_slice=-1)  # without the weight of the norm
    direction = pair.theirs.ln_final.weight * (pair.theirs.W_U[:, 7] - pair.theirs.W_U[:, 9])
    theirs = dict(zip(labels, (stack[:, 0] @ direction).tolist(), strict=True))
    ours = logit_attribution(pair.ours, CLEAN[0], 7, versus=9)
    for layer in range(3):
        for head in range(4):
            assert ours[f"layer {layer} head {head}"] == pytest.approx(theirs[f"L{layer}H{head}"], abs=1e-3)
        assert ours[f"layer {layer} MLP"] == pytest.approx(theirs[f"{layer}_mlp_out"], abs=1e-3)
    assert ours["token embedding"] == pytest.approx(theirs["embed"], abs=1e-3)
    if "pos_embed" in theirs:
        assert ours["position embedding"] == pytest.approx(theirs["pos_embed"], abs=1e-3)


@torch.no_grad()
def test_value_weighted_attention(pair):
    maps = value_weighted_maps(pair.ours, CLEAN)
    for layer in range(3):
        values = pair.cache["v", layer]
        values = values.repeat_interleave(4 // values.size(2), dim=2)  # (B, T, H, D)
        norms = torch.einsum("bthd,hdc->bhtc", values, pair.theirs.W_O[layer]).norm(dim=-1)
        assert_close(maps[layer], pair.cache["pattern", layer] * norms[:, :, None], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_activation_patching(pair):
    effects = patching_effects(pair.ours, CLEAN[0], CORRUPTED[0], (7, 9))

    def share(logits: torch.Tensor) -> torch.Tensor:
        return (logits[0, -1, 7] - logits[0, -1, 9] - effects.corrupted) / (effects.clean - effects.corrupted)

    stream = transformer_lens.patching.get_act_patch_resid_pre(pair.theirs, CORRUPTED, pair.cache, share)
    heads = transformer_lens.patching.get_act_patch_attn_head_out_all_pos(pair.theirs, CORRUPTED, pair.cache, share)
    assert_close(effects.stream[:-1], stream, atol=1e-3, rtol=1e-3)
    assert_close(effects.heads, heads, atol=1e-3, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("replacement", ["mean", "zero"])
def test_ablation_costs(pair, replacement):
    costs = ablation_costs(pair.ours, CLEAN, replacement)

    def cost(name: str, *where) -> float:
        """Of replacing the activation of that name at these indices."""

        def replace(y, hook):
            y = y.clone()
            y[where] = y[where].mean((0, 1)) if replacement == "mean" else 0
            return y

        logits = pair.theirs.run_with_hooks(CLEAN[:, :-1], fwd_hooks=[(name, replace)], return_type="logits")
        return F.cross_entropy(logits[0], CLEAN[0, 1:]).item() - costs.loss

    for layer in range(3):
        for head in range(4):
            theirs = cost(f"blocks.{layer}.attn.hook_z", slice(None), slice(None), head)
            assert costs.heads[layer, head] == pytest.approx(theirs, abs=1e-3)
        assert costs.mlps[layer] == pytest.approx(cost(f"blocks.{layer}.hook_mlp_out", slice(None)), abs=1e-3)
