"""configs/model/*.yaml are the published architectures: logits and gradients are those of Hugging Face's."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from configs.compose import compose
from model.config import GPTConfig
from model.gpt import GPT

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 61, "context_length": 16, "num_layers": 3, "num_heads": 4, "d_model": 32}
Named = dict[str, Tensor]


def family(name: str, **fields) -> GPTConfig:
    """The config of configs/model/<name>.yaml at a tiny size."""
    return replace(compose("train", [f"model={name}"]).model, **{**SIZES, **fields})


# Each of the three: Hugging Face's model of our config's size, and the table of names from theirs to ours.
# The tables move weights and gradients alike.


def gpt2(config: GPTConfig) -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context_length,
            n_embd=config.d_model,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
    )


def from_gpt2(theirs: Named, config: GPTConfig) -> Named:
    ours = {
        "token_embedding.weight": theirs["transformer.wte.weight"],
        "lm_head.weight": theirs["transformer.wte.weight"],
        "position_embedding.weight": theirs["transformer.wpe.weight"],
        "final_norm.weight": theirs["transformer.ln_f.weight"],
        "final_norm.bias": theirs["transformer.ln_f.bias"],
    }
    table = {
        "attention_norm": "ln_1",
        "attention.in_proj": "attn.c_attn",
        "attention.out_proj": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for i in range(config.num_layers):
        for our, their in table.items():
            # GPT-2's Conv1D keeps its matrices as (inputs, outputs).
            weight = theirs[f"transformer.h.{i}.{their}.weight"]
            ours[f"blocks.{i}.{our}.weight"] = weight.T if weight.ndim == 2 else weight
            ours[f"blocks.{i}.{our}.bias"] = theirs[f"transformer.h.{i}.{their}.bias"]
    return ours


def llama(config: GPTConfig) -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.context_length,
            hidden_size=config.d_model,
            intermediate_size=config.resolved_mlp_hidden,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.resolved_num_kv_heads,
            attn_implementation="eager",
        )
    )


def from_llama(theirs: Named, config: GPTConfig) -> Named:
    ours = {
        "token_embedding.weight": theirs["model.embed_tokens.weight"],
        "final_norm.weight": theirs["model.norm.weight"],
        "lm_head.weight": theirs["lm_head.weight"],
    }
    for i in range(config.num_layers):
        layer = {k.removeprefix(f"model.layers.{i}."): v for k, v in theirs.items() if f".layers.{i}." in k}
        ours |= {
            f"blocks.{i}.attention_norm.weight": layer["input_layernorm.weight"],
            f"blocks.{i}.attention.in_proj.weight": torch.cat([layer[f"self_attn.{x}_proj.weight"] for x in "qkv"]),
            f"blocks.{i}.attention.out_proj.weight": layer["self_attn.o_proj.weight"],
            f"blocks.{i}.mlp_norm.weight": layer["post_attention_layernorm.weight"],
            f"blocks.{i}.mlp.up.weight": torch.cat([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]]),
            f"blocks.{i}.mlp.down.weight": layer["mlp.down_proj.weight"],
        }
    return ours


def nanochat(config: GPTConfig) -> nn.Module:
    return transformers.NanoChatForCausalLM(
        transformers.NanoChatConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.context_length,
            hidden_size=config.d_model,
            intermediate_size=config.resolved_mlp_hidden,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.resolved_num_kv_heads,
            pad_token_id=None,  # else that token's embedding would not learn
            attn_implementation="eager",
        )
    )


def from_nanochat(theirs: Named, config: GPTConfig) -> Named:
    def swap_halves(rows: Tensor) -> Tensor:
        """Theirs turns pairs the other way round, which is ours with the two entries of a pair swapped."""
        return rows.unflatten(0, (-1, 2, config.head_dim // 2)).flip(1).flatten(0, 2)

    ours = {
        "token_embedding.weight": theirs["model.embed_tokens.weight"],
        "lm_head.weight": theirs["lm_head.weight"],
    }
    for i in range(config.num_layers):
        q, k, v, o = (theirs[f"model.layers.{i}.self_attn.{x}_proj.weight"] for x in "qkvo")
        ours |= {
            f"blocks.{i}.attention.in_proj.weight": torch.cat([swap_halves(q), swap_halves(k), v]),
            f"blocks.{i}.attention.out_proj.weight": o,
            f"blocks.{i}.mlp.up.weight": theirs[f"model.layers.{i}.mlp.fc1.weight"],
            f"blocks.{i}.mlp.down.weight": theirs[f"model.layers.{i}.mlp.fc2.weight"],
        }
    return ours


def test_tiny_without_its_own_two_choices_is_nanochat():
    assert family("tiny", bigram_table_size=None, logit_soft_cap=15.0) == family("nanochat")


def test_tiny_with_an_empty_table_is_nanochat_without_its_cap():
    tiny, nanochat = GPT(family("tiny")), GPT(family("nanochat", logit_soft_cap=None))
    assert not tiny.bigram_embedding.weight.any()
    for parameter in nanochat.parameters():
        nn.init.normal_(parameter, std=0.3)
    left_out, unknown = tiny.load_state_dict(nanochat.state_dict(), strict=False)
    assert (left_out, unknown) == (["bigram_embedding.weight"], [])
    ids = torch.randint(SIZES["vocab_size"], (3, SIZES["context_length"]))
    assert torch.equal(tiny(ids), nanochat(ids))


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Every weight and bias random, norms around 1, in sizes that let each part show in the logits."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.normal_(mean=0.0 if name.endswith("bias") else 1.0, std=0.3)
        else:
            parameter.normal_(std=0.3)
        # Embeddings, and nanochat's queries and keys, so small that an epsilon in the wrong place shows.
        if "embed_tokens" in name or "wte" in name or "wpe" in name:
            parameter.mul_(0.03)
        if isinstance(model, transformers.NanoChatForCausalLM) and ("q_proj" in name or "k_proj" in name):
            parameter.mul_(0.003)


@pytest.mark.parametrize(
    ("reference", "to_ours", "config"),
    [
        pytest.param(gpt2, from_gpt2, family("gpt2"), id="gpt2"),
        pytest.param(llama, from_llama, family("llama"), id="llama"),
        pytest.param(llama, from_llama, family("llama", num_kv_heads=2), id="llama-grouped"),
        pytest.param(llama, from_llama, family("llama", num_kv_heads=1), id="llama-one_kv_head"),
        pytest.param(nanochat, from_nanochat, family("nanochat"), id="nanochat"),
        pytest.param(nanochat, from_nanochat, family("nanochat", num_kv_heads=2), id="nanochat-grouped"),
    ],
)
def test_logits_and_gradients_equal_hugging_face(reference, to_ours, config):
    theirs, ours = reference(config).eval(), GPT(config)
    randomise(theirs)
    ours.load_state_dict(to_ours(dict(theirs.named_parameters()), config))  # strict: no name is left out
    assert ours.num_parameters() == sum(p.numel() for p in theirs.parameters())

    ids, targets = torch.randint(config.vocab_size, (2, 3, config.context_length))
    logits, expected = ours(ids), theirs(ids).logits
    assert_close(logits, expected, atol=1e-4 * min(1, expected.std().item()), rtol=1e-4)

    for output in (logits, expected):
        F.cross_entropy(output.flatten(0, 1), targets.flatten()).backward()
    their_gradients = to_ours({name: p.grad for name, p in theirs.named_parameters()}, config)
    for name, parameter in ours.named_parameters():
        gradient = their_gradients[name]
        assert gradient.any(), name
        assert_close(parameter.grad, gradient, atol=1e-4 * gradient.abs().max().item(), rtol=1e-3, msg=name)
