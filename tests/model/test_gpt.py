"""The network cannot see the future, shows the attention it really uses and starts from a uniform guess."""

import dataclasses
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from configs.compose import compose
from data.config import TokenizerConfig
from data.corpus import Corpus, find_files
from data.tokenizer import build_tokenizer, encode
from model.config import GPTConfig
from model.gpt import GPT, BigramEmbedding
from system.errors import UserError

FAMILIES = ("gpt2", "llama", "nanochat", "tiny")
TINY = {"vocab_size": 50, "context_length": 12, "num_layers": 3, "num_heads": 4, "d_model": 32}


def family(name: str, **fields) -> GPTConfig:
    """The config of configs/model/<name>.yaml, with some fields changed."""
    return replace(compose("train", [f"model={name}"]).model, **{"vocab_size": 1024, **fields})


def network(config: GPTConfig) -> GPT:
    """A network in which every weight matters: some start at zero, such as nanochat's where blocks write.

    As it is after training, when nothing is dropped.
    """
    torch.manual_seed(0)
    gpt = GPT(config).eval()
    for parameter in gpt.parameters():
        nn.init.normal_(parameter, std=0.3)
    return gpt


def random_ids(config: GPTConfig, batch: int = 2) -> Tensor:
    return torch.randint(config.vocab_size, (batch, config.context_length), generator=torch.Generator().manual_seed(1))


# Causality


@pytest.mark.parametrize("num_kv_heads", [None, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_changing_the_next_token_leaves_earlier_logits_alone(name, num_kv_heads):
    config = family(name, **TINY, num_kv_heads=num_kv_heads)
    gpt, ids = network(config), random_ids(config)
    with torch.no_grad():
        logits = gpt(ids)
        for t in range(config.context_length - 1):
            changed = ids.clone()
            changed[:, t + 1] = (ids[:, t + 1] + 1) % config.vocab_size
            changed_logits = gpt(changed)
            assert torch.equal(changed_logits[:, : t + 1], logits[:, : t + 1])
            assert (changed_logits[:, t + 1 :] != logits[:, t + 1 :]).any(-1).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_beginning_gives_the_logits_it_has_in_the_whole(name):
    config = family(name, **TINY)
    gpt, ids = network(config), random_ids(config)
    for length in (1, 5, config.context_length):
        assert_close(gpt(ids[:, :length]), gpt(ids)[:, :length], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_sequences_of_a_batch_do_not_see_each_other(name):
    config = family(name, **TINY)
    gpt, ids = network(config), random_ids(config, batch=3)
    changed = ids.clone()
    changed[1] = ids[0]
    assert_close(gpt(changed)[[0, 2]], gpt(ids)[[0, 2]])
    assert_close(gpt(changed)[1], gpt(ids)[0])


# Attention maps


@pytest.mark.parametrize("num_kv_heads", [None, 2, 1])
@pytest.mark.parametrize("name", FAMILIES)
def test_attention_maps_are_those_the_fast_path_used(name, num_kv_heads):
    config = family(name, **TINY, num_kv_heads=num_kv_heads)
    gpt, ids = network(config).eval(), random_ids(config)
    maps = gpt.attention_maps(ids)
    assert len(maps) == config.num_layers

    calls = []  # what went into and came out of every layer's attention in a plain forward pass
    for block in gpt.blocks:
        block.attention.register_forward_hook(lambda _, inputs, output: calls.append((inputs[0], output)))
    gpt(ids)
    kv_rows = config.resolved_num_kv_heads * config.head_dim
    for block, weights, (x, fused) in zip(gpt.blocks, maps, calls, strict=True):
        assert weights.shape == (2, config.num_heads, config.context_length, config.context_length)
        assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        assert torch.equal(weights, weights.tril())
        assert (weights[..., 0, 0] == 1).all()
        proj = block.attention.in_proj
        value = F.linear(x, proj.weight[-kv_rows:], None if proj.bias is None else proj.bias[-kv_rows:])
        value = value.unflatten(-1, (config.resolved_num_kv_heads, config.head_dim))  # (B, T, G, D)
        value = value.repeat_interleave(config.num_heads // config.resolved_num_kv_heads, dim=2)  # (B, T, H, D)
        heads = torch.einsum("bhts,bshd->bthd", weights, value)
        assert_close(block.attention.out_proj(heads.flatten(2)), fused, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_looking_at_attention_disturbs_nothing(training):
    config = family("gpt2", **TINY, dropout=0.5)
    gpt, ids = network(config).train(training), random_ids(config)
    state = torch.get_rng_state()
    maps = gpt.attention_maps(ids)
    assert torch.equal(torch.get_rng_state(), state)
    assert {module.training for module in gpt.modules()} == {training}
    assert not any(weights.requires_grad for weights in maps)
    without_dropout = gpt.eval().attention_maps(ids)
    assert all(torch.equal(a, b) for a, b in zip(maps, without_dropout, strict=True))


@pytest.mark.parametrize(("name", "share"), [("gpt2", "dropout"), ("tiny", "dropout"), ("tiny", "bigram_dropout")])
def test_dropout_changes_training_only(name, share):
    config = dataclasses.replace(family(name, **TINY), bigram_dropout=0.0)
    plain, ids = network(config), random_ids(config)
    dropped = network(dataclasses.replace(config, **{share: 0.5}))
    assert not config.has_dropout and dropped.config.has_dropout
    assert torch.equal(dropped.eval()(ids), plain.train()(ids))
    assert not torch.allclose(dropped.train()(ids), plain(ids))


def test_bigram_dropout_leaves_out_its_share_of_whole_pairs():
    table = BigramEmbedding(64, 16, dropout=0.25)
    torch.manual_seed(0)
    nn.init.normal_(table.weight)
    ids = torch.randint(50, (40, 50))
    left = table(ids) != 0  # (B, T, C)
    assert torch.equal(left.any(-1), left.all(-1))
    assert left.any(-1).float().mean().item() == pytest.approx(0.75, abs=0.05)


# The start


@pytest.mark.parametrize("tied_embeddings", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_first_loss_is_that_of_a_uniform_guess(name, tied_embeddings):
    torch.manual_seed(0)
    config = family(name, vocab_size=1024, tied_embeddings=tied_embeddings)
    ids = torch.randint(1024, (8, config.context_length + 1))
    with torch.no_grad():
        loss = F.cross_entropy(GPT(config)(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(1024), rel=0.01)


WRITE = 0.02 / math.sqrt(2 * 4)  # four layers, each writing to the stream twice
INIT_STD = {
    "gpt2": {
        "token_embedding": 0.02,
        "position_embedding": 0.02,
        "in_proj": 0.02,
        "out_proj": WRITE,
        "up": 0.02,
        "down": WRITE,
    },
    "llama": {
        "token_embedding": 0.02,
        "lm_head": 0.02,
        "in_proj": 0.02,
        "out_proj": WRITE,
        "up": 0.02,
        "down": WRITE,
    },
    "nanochat": {
        "token_embedding": 1,
        "lm_head": 0.001,
        "in_proj": 128**-0.5,
        "out_proj": 0,
        "up": 128**-0.5,
        "down": 0,
    },
}
INIT_STD["tiny"] = INIT_STD["nanochat"] | {"bigram_embedding": 0}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_starts_as_in_the_table(name):
    torch.manual_seed(0)
    config = family(name, num_layers=4, d_model=128)
    seen = set()
    for path, parameter in GPT(config).named_parameters():
        if parameter.ndim == 2:
            matrix = path.split(".")[-2]
            seen.add(matrix)
            assert parameter.std().item() == pytest.approx(INIT_STD[name][matrix], rel=0.03), path
            assert abs(parameter.mean().item()) <= 0.05 * INIT_STD[name][matrix], path
        else:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if path.endswith("bias") else 1.0)), path
    assert seen == set(INIT_STD[name])


def test_the_seed_decides_the_start():
    def start(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return GPT(GPTConfig(**TINY)).state_dict()

    assert all(torch.equal(a, b) for a, b in zip(start(1).values(), start(1).values(), strict=True))
    assert not torch.equal(start(1)["token_embedding.weight"], start(2)["token_embedding.weight"])


# Parameters


def on_meta(config: GPTConfig) -> GPT:
    with torch.device("meta"):  # shapes without memory
        return GPT(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameter_count_follows_the_formula(name):
    V, T, L, C = 50, 12, 3, 32
    expected = {
        "gpt2": V * C + T * C + L * (12 * C**2 + 13 * C) + 2 * C,
        "llama": 2 * V * C + L * (4 * C**2 + 3 * 96 * C + 2 * C) + C,  # 8/3 x 32, up to a multiple of 32, is 96
        "nanochat": 2 * V * C + L * 12 * C**2,
        "tiny": 2 * V * C + 16384 * C + L * 12 * C**2,
    }
    assert on_meta(family(name, **TINY)).num_parameters() == expected[name]


def test_shared_key_value_heads_save_their_rows():
    C, saved_rows = 32, 2 * 24  # one key and one value head of 8 instead of four each
    whole, shared = (on_meta(family("llama", **TINY, num_kv_heads=G)).num_parameters() for G in (4, 1))
    assert whole - shared == 3 * saved_rows * C


def test_published_sizes_have_their_published_parameter_counts():
    gpt2 = family("gpt2", vocab_size=50257, context_length=1024, num_layers=12, num_heads=12, d_model=768)
    assert on_meta(gpt2).num_parameters() == 124_439_808
    llama_7b = family("llama", vocab_size=32000, num_layers=32, num_heads=32, d_model=4096, mlp_hidden=11008)
    assert on_meta(llama_7b).num_parameters() == 6_738_415_616


def test_every_mlp_has_about_as_many_weights():
    sizes = [
        sum(
            p.numel() for p in on_meta(family("nanochat", d_model=768, num_heads=6, mlp=mlp)).blocks[0].mlp.parameters()
        )
        for mlp in ("gelu", "swiglu", "relu2")
    ]
    assert max(sizes) <= 1.02 * min(sizes)


def test_tied_embedding_is_one_parameter():
    tied = GPT(GPTConfig(**TINY, tied_embeddings=True))
    assert tied.lm_head.weight is tied.token_embedding.weight
    untied = GPT(GPTConfig(**TINY, tied_embeddings=False))
    assert untied.num_parameters() - tied.num_parameters() == 50 * 32
    tied.token_embedding.weight.data.zero_()
    assert (tied(random_ids(tied.config)) == 0).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_learns(name):
    config = family(name, **TINY)
    gpt = network(config)
    gpt(random_ids(config)).square().sum().backward()
    assert [path for path, p in gpt.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_rope_tables_are_no_part_of_a_checkpoint():
    assert not [key for key in GPT(family("llama", **TINY)).state_dict() if "rope" in key]


def test_weights_load_by_the_former_name_of_the_output_layer():
    gpt = GPT(family("llama", **TINY))
    weights = gpt.state_dict()
    weights["output.weight"] = weights.pop("lm_head.weight") + 1
    gpt.load_state_dict(weights)
    assert torch.equal(gpt.lm_head.weight, weights["output.weight"])
    wrapper = nn.ModuleDict({"network": gpt})  # as in a checkpoint of training
    wrapper.load_state_dict({f"network.{name}": weight for name, weight in weights.items()})


def test_soft_cap_bounds_the_logits():
    config = family("nanochat", **TINY, logit_soft_cap=2.0)
    capped, ids = network(config), random_ids(config)
    plain = network(dataclasses.replace(config, logit_soft_cap=None))(ids)
    assert plain.abs().max() > 2
    assert capped(ids).abs().max() <= 2
    assert_close(capped(ids), 2 * torch.tanh(plain / 2))


# The loss


@pytest.mark.parametrize("tied_embeddings", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_its_gradients_are_those_of_the_logits(name, tied_embeddings):
    config = family(name, **TINY, tied_embeddings=tied_embeddings)
    gpt, ids, targets = network(config).train(), random_ids(config), random_ids(config).flip(1)
    torch.manual_seed(0)  # drops the same in both
    loss = gpt.loss(ids, targets)
    torch.manual_seed(0)
    losses = loss, F.cross_entropy(gpt(ids).flatten(0, 1), targets.flatten())
    assert_close(*losses, atol=1e-5, rtol=1e-5)
    ours, expected = (torch.autograd.grad(loss, list(gpt.parameters())) for loss in losses)
    for (path, _), gradient, exact in zip(gpt.named_parameters(), ours, expected, strict=True):
        assert_close(gradient, exact, atol=1e-5 * exact.abs().max().item(), rtol=1e-4, msg=path)


@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_network_is_what_the_loss_goes_through(name):
    config = family(name, **TINY)
    gpt, ids = network(config).train(), random_ids(config)
    torch.manual_seed(0)  # drops the same in both
    expected, calls = gpt.loss(ids, ids.flip(1)), []

    def backend(graph, example_inputs):
        def compiled(*inputs):
            calls.append(graph)
            return graph.forward(*inputs)

        return compiled

    gpt.compile(backend=backend)
    torch.manual_seed(0)
    assert_close(gpt.loss(ids, ids.flip(1)), expected, atol=1e-5, rtol=1e-5)
    assert len(calls) == 1  # all of the network in one graph


# Bigrams


def rows_of(ids: Tensor, rows: int) -> Tensor:
    """The row of the table that each token of (B, T) looks up, (B, T)."""
    bigram = BigramEmbedding(rows, 1)
    bigram.weight.data = torch.arange(rows).float()[:, None]
    return bigram(ids)[..., 0].long()


def test_bigram_embedding_sees_a_token_and_the_one_before_it_and_nothing_else():
    torch.manual_seed(0)
    bigram, ids = BigramEmbedding(16384, 4), torch.randint(1024, (1, 30))
    before = bigram(ids)
    assert before.shape == (1, 30, 4)
    for t in range(30):
        changed = ids.clone()
        changed[0, t] = (ids[0, t] + 1) % 1024
        moved = (bigram(changed) != before).any(-1)[0]
        assert moved.nonzero().flatten().tolist() == [t, t + 1][: 30 - t]


def test_a_pair_has_the_same_vector_wherever_it_stands():
    bigram = BigramEmbedding(16384, 4)
    found = bigram(torch.tensor([[7, 5, 9, 9, 7, 5], [1, 7, 5, 7, 5, 7]]))
    pair = found[0, 1]
    assert all(torch.equal(found[b, t], pair) for b, t in ((0, 5), (1, 2), (1, 4)))
    assert not torch.equal(found[1, 3], pair)  # 5 7 is another pair than 7 5


def test_first_token_of_a_window_is_paired_with_none():
    bigram, ids = BigramEmbedding(16384, 4), torch.arange(1024)[:, None]
    alone = bigram(ids)[:, 0]  # (1024, 4)
    for following in (0, 1023):
        assert torch.equal(bigram(torch.cat([ids, torch.full_like(ids, following)], 1))[:, 0], alone)
    rows = rows_of(torch.cat([torch.zeros_like(ids), ids], 1), 16384)  # 0 is a token, none is not
    assert (rows_of(ids, 16384)[:, 0] != rows[:, 1]).all()


@pytest.mark.parametrize("rows", [1024, 4096, 16384, 65536, 10_007])
@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_pairs_of_a_real_text_share_rows_hardly_more_than_by_chance(kind, rows, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(find_files()[0].read_text(encoding="utf-8")[:300_000], encoding="utf-8")
    split = Corpus([text], 0.1).train
    encoding = build_tokenizer(TokenizerConfig(kind=kind), split, tmp_path)
    ids = torch.from_numpy(encode(encoding, "".join(split.read())).astype("int64"))
    pairs = torch.stack([ids[:-1], ids[1:]], 1).unique(dim=0)  # (n, 2)
    counts = rows_of(pairs, rows)[:, 1].bincount(minlength=rows)
    n = len(pairs)
    shared, by_chance = n - (counts > 0).sum().item(), n - rows * (1 - (1 - 1 / rows) ** n)
    assert shared <= 1.05 * by_chance + 3 * by_chance**0.5
    assert counts.max() <= 3 * n / rows + 12  # and no row is crowded


# Refusals


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_heads": 5}, ["d_model 32", "num_heads 5", "1, 2, 4, 8, 16, 32"]),
        ({"num_heads": 64}, ["d_model 32", "num_heads 64", "1, 2, 4, 8, 16, 32"]),
        ({"num_kv_heads": 3}, ["num_heads 4", "num_kv_heads 3", "1, 2, 4"]),
        ({"num_kv_heads": 8}, ["num_heads 4", "num_kv_heads 8", "1, 2, 4"]),
        ({"vocab_size": 0}, ["vocab_size is 0", "at least 1"]),
        ({"context_length": 0}, ["context_length is 0", "at least 1"]),
        ({"num_layers": 0}, ["num_layers is 0", "at least 1"]),
        ({"num_heads": 0}, ["num_heads is 0", "at least 1"]),
        ({"num_kv_heads": 0}, ["num_kv_heads is 0", "at least 1"]),
        ({"d_model": -32}, ["d_model is -32", "at least 1"]),
        ({"mlp_hidden": 0}, ["mlp_hidden is 0", "at least 1"]),
        ({"bigram_table_size": 0}, ["bigram_table_size is 0", "at least 1"]),
        ({"bigram_table_size": -16384}, ["bigram_table_size is -16384", "at least 1"]),
        ({"dropout": 1.0}, ["dropout is 1.0", "below 1"]),
        ({"dropout": -0.1}, ["dropout is -0.1", "at least 0"]),
        ({"dropout": math.nan}, ["dropout is nan"]),
        ({"positions": "sinus"}, ["positions is 'sinus'", "learned, rope"]),
        ({"norm": "batchnorm"}, ["norm is 'batchnorm'", "layernorm, rmsnorm"]),
        ({"mlp": "nonsense"}, ["mlp is 'nonsense'", "gelu, swiglu, relu2"]),
        ({"init": "zeros"}, ["init is 'zeros'", "gpt2, nanochat"]),
        ({"norm_eps": 0.0}, ["norm_eps is 0.0", "positive"]),
        ({"rope_base": -1.0}, ["rope_base is -1.0", "positive"]),
        ({"logit_soft_cap": 0.0}, ["logit_soft_cap is 0.0", "positive"]),
        ({"logit_soft_cap": math.inf}, ["logit_soft_cap is inf", "positive"]),
        ({"positions": "rope", "d_model": 12}, ["d_model 12", "num_heads 4", "head_dim", "is 3"]),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_config_that_cannot_work_is_refused_by_name_and_value(fields, said):
    with pytest.raises(UserError) as refusal:
        GPTConfig(**{**TINY, **fields})
    assert "\n" not in str(refusal.value)
    assert [part for part in said if part not in str(refusal.value)] == []


def test_odd_head_width_is_fine_without_rotation():
    config = GPTConfig(**{**TINY, "d_model": 12})
    assert config.head_dim == 3
    assert GPT(config)(random_ids(config)).shape == (2, 12, 50)


# Standing alone


def test_network_needs_torch_alone():
    code = """
import sys, torch
before = set(sys.modules)
import model.gpt
packages = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(*sorted(packages - {"torch"}))
network = model.gpt.GPT(model.gpt.GPTConfig(vocab_size=5))
network(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
heavy = {"lightning", "hydra", "omegaconf", "tensorboard", "transformers", "matplotlib", "tiktoken"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["model", "system"]
