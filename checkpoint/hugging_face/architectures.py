"""The architectures of Hugging Face transformers that our networks are, or are read from: configs and names of weights.

Each entry of `ARCHITECTURES` translates both ways and exactly; what an architecture has no field for is an error that
names the field of ours. transformers itself is not needed, and never imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from model.config import GPTConfig
from system.checks import Bounded, check, short_repr
from system.errors import UserError

Weights = Mapping[str, Tensor]
_SIZE = Bounded(int, 1, 1 << 24)


@dataclass(frozen=True)
class Architecture:
    """One `model_type` of transformers."""

    model_type: str
    class_name: str
    requires: dict[str, tuple]
    """Fields of GPTConfig -> the values that it can express. All other values of these fields are rejected."""
    to_config: Callable[[GPTConfig], dict[str, Any]]
    """The entries of config.json."""
    to_weights: Callable[[Weights, GPTConfig], dict[str, Tensor]]
    """Our names and layouts -> theirs."""
    from_config: Callable[[dict[str, Any]], GPTConfig]
    """The other way. Raises ValueError for entries that none of our networks has."""
    from_weights: Callable[[Weights, GPTConfig], dict[str, Tensor]]
    """The other way. Raises KeyError for a weight that is not there."""
    custom_code: bool = False
    """Whether transformers needs a file of ours to run it."""

    def mismatches(self, config: GPTConfig) -> list[str]:
        """The fields with values that it cannot express, as "model.bias=true"."""
        found = {name: getattr(config, name) for name in self.requires}
        if config.sliding_window is None:
            found.pop("window_pattern", None)
        if config.resolved_num_kv_heads == config.num_heads:
            found.pop("num_kv_heads", None)
        return [f"model.{name}={_as_set(value)}" for name, value in found.items() if value not in self.requires[name]]


def _as_set(value: Any) -> str:
    """As on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def architecture_for(config: GPTConfig) -> Architecture:
    """The first architecture that can express a network. Raises UserError with the fields of the nearest one."""
    for architecture in ARCHITECTURES:
        if not architecture.mismatches(config):
            return architecture
    nearest = min(ARCHITECTURES, key=lambda architecture: len(architecture.mismatches(config)))
    raise UserError(
        f"No Hugging Face architecture has {', '.join(nearest.mismatches(config))}; the nearest is "
        f"{nearest.model_type}. Train with model=gpt2, llama or nanochat, or export to weights.safetensors."
    )


def architecture_named(model_type: Any) -> Architecture:
    """The architecture of a config.json. Raises ValueError for one that we do not have."""
    known = {architecture.model_type: architecture for architecture in ARCHITECTURES}
    if not isinstance(model_type, str) or model_type not in known:
        raise ValueError(f"model_type is {short_repr(model_type)}, but must be one of {', '.join(known)}")
    return known[model_type]


# GPT-2


def _gpt2_config(c: GPTConfig) -> dict[str, Any]:
    return {
        "n_positions": c.context_length,
        "n_embd": c.d_model,
        "n_layer": c.num_layers,
        "n_head": c.num_heads,
        "n_inner": c.resolved_mlp_hidden,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": c.norm_eps,
        "resid_pdrop": c.dropout,
        "embd_pdrop": c.dropout,
        "attn_pdrop": c.dropout,
    }


_GPT2_NAMES = {
    "attention_norm": "ln_1",
    "attention.in_proj": "attn.c_attn",
    "attention.out_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def _gpt2_weights(ours: Weights, c: GPTConfig) -> dict[str, Tensor]:
    theirs = {
        "transformer.wte.weight": ours["token_embedding.weight"],
        "transformer.wpe.weight": ours["position_embedding.weight"],
    }
    if not c.tied_embeddings:
        theirs["lm_head.weight"] = ours["lm_head.weight"]
    for our, their in _gpt2_names(c).items():
        matrix = ours.get(f"{our}.weight")
        if matrix is None:  # norm_affine=false
            matrix = torch.ones(c.d_model)
        theirs[f"{their}.weight"] = matrix.T if matrix.ndim == 2 else matrix  # Conv1D has (inputs, outputs)
        bias = ours.get(f"{our}.bias")
        theirs[f"{their}.bias"] = torch.zeros(matrix.size(0)) if bias is None else bias  # bias=false
    return theirs


def _gpt2_names(c: GPTConfig) -> dict[str, str]:
    """Modules with a weight and a bias, our names -> theirs."""
    names = {"final_norm": "transformer.ln_f"}
    for layer in range(c.num_layers):
        names |= {f"blocks.{layer}.{our}": f"transformer.h.{layer}.{their}" for our, their in _GPT2_NAMES.items()}
    return names


def _from_gpt2_config(config: dict[str, Any]) -> GPTConfig:
    _expect(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    if config.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise ValueError(f"activation_function is {short_repr(config['activation_function'])}, but must be gelu_new")
    return GPTConfig(
        vocab_size=_size(config, "vocab_size", 50257),
        context_length=_size(config, "n_positions", 1024),
        num_layers=_size(config, "n_layer", 12),
        num_heads=_size(config, "n_head", 12),
        d_model=_size(config, "n_embd", 768),
        mlp_hidden=_optional_size(config, "n_inner"),
        norm_eps=_number(config, "layer_norm_epsilon", 1e-5),
        tied_embeddings=_boolean(config, "tie_word_embeddings", True),
    )


def _from_gpt2_weights(theirs: Weights, c: GPTConfig) -> dict[str, Tensor]:
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in theirs.items()}  # GPT2Model has no prefix
    ours = {
        "token_embedding.weight": theirs["wte.weight"],
        "position_embedding.weight": theirs["wpe.weight"],
        "lm_head.weight": theirs["wte.weight"] if c.tied_embeddings else theirs["lm_head.weight"],
    }
    for our, their in _gpt2_names(c).items():
        their = their.removeprefix("transformer.")
        matrix = theirs[f"{their}.weight"]
        ours[f"{our}.weight"] = matrix.T if matrix.ndim == 2 else matrix
        ours[f"{our}.bias"] = theirs[f"{their}.bias"]
    return ours


# Llama, and the same network with sliding windows: Mistral, Ministral


def _llama_config(c: GPTConfig) -> dict[str, Any]:
    return _rope_config(c) | {"hidden_act": "silu", "attention_bias": c.bias, "mlp_bias": c.bias}


def _mistral_config(c: GPTConfig) -> dict[str, Any]:
    return _rope_config(c) | {"hidden_act": "silu", "sliding_window": c.sliding_window}


def _ministral_config(c: GPTConfig) -> dict[str, Any]:
    windows = [c.window_of(layer) for layer in range(c.num_layers)]
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return _mistral_config(c) | {"layer_types": types}


def _rope_config(c: GPTConfig) -> dict[str, Any]:
    return {
        "max_position_embeddings": c.context_length,
        "hidden_size": c.d_model,
        "intermediate_size": c.resolved_mlp_hidden,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.resolved_num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_base,  # read by transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_base},  # read by transformers 5
        "attention_dropout": c.dropout,
    }


def _llama_weights(ours: Weights, c: GPTConfig) -> dict[str, Tensor]:
    theirs = {"model.embed_tokens.weight": ours["token_embedding.weight"]}
    if not c.tied_embeddings:
        theirs["lm_head.weight"] = ours["lm_head.weight"]
    ones = torch.ones(c.d_model)  # norm_affine=false
    theirs["model.norm.weight"] = ours.get("final_norm.weight", ones)
    for layer in range(c.num_layers):
        block, their = f"blocks.{layer}", f"model.layers.{layer}"
        theirs[f"{their}.input_layernorm.weight"] = ours.get(f"{block}.attention_norm.weight", ones)
        theirs[f"{their}.post_attention_layernorm.weight"] = ours.get(f"{block}.mlp_norm.weight", ones)
        for part in ("weight", "bias") if c.bias else ("weight",):
            q, k, v = ours[f"{block}.attention.in_proj.{part}"].split(_qkv_rows(c))
            gate, up = ours[f"{block}.mlp.up.{part}"].chunk(2)
            theirs |= {
                f"{their}.self_attn.q_proj.{part}": q,
                f"{their}.self_attn.k_proj.{part}": k,
                f"{their}.self_attn.v_proj.{part}": v,
                f"{their}.self_attn.o_proj.{part}": ours[f"{block}.attention.out_proj.{part}"],
                f"{their}.mlp.gate_proj.{part}": gate,
                f"{their}.mlp.up_proj.{part}": up,
                f"{their}.mlp.down_proj.{part}": ours[f"{block}.mlp.down.{part}"],
            }
    return theirs


def _from_llama_config(config: dict[str, Any]) -> GPTConfig:
    bias = _boolean(config, "attention_bias", False)
    _expect(config, hidden_act="silu", mlp_bias=bias, pretraining_tp=1)
    return replace(_from_rope_config(config), norm_eps=_number(config, "rms_norm_eps", 1e-6), mlp="swiglu", bias=bias)


def _from_mistral_config(config: dict[str, Any]) -> GPTConfig:
    c = _from_llama_config({**config, "attention_bias": False, "mlp_bias": False})
    return replace(c, sliding_window=_optional_size(config, "sliding_window"))


def _from_ministral_config(config: dict[str, Any]) -> GPTConfig:
    c = _from_mistral_config(config)
    types = config.get("layer_types") or ["sliding_attention"] * c.num_layers
    check(types, [str], "layer_types")
    letters = {"sliding_attention": "S", "full_attention": "L"}
    if len(types) != c.num_layers or set(types) - set(letters):
        raise ValueError(f"layer_types must name {c.num_layers} times one of {', '.join(letters)}")
    return replace(c, window_pattern="".join(letters[name] for name in types))


def _from_rope_config(config: dict[str, Any]) -> GPTConfig:
    """What Llama and NanoChat share."""
    rope = config.get("rope_parameters") or {}
    check(rope, {str: object}, "rope_parameters")
    scaling = config.get("rope_scaling")
    if rope.get("rope_type", "default") != "default" or scaling is not None:
        raise ValueError(f"its RoPE is scaled ({short_repr(scaling or rope)}), which none of our networks does")
    base = _number(rope if "rope_theta" in rope else config, "rope_theta", 10_000.0)
    num_heads, d_model = _size(config, "num_attention_heads", 32), _size(config, "hidden_size", 4096)
    if config.get("head_dim") not in (None, d_model // num_heads):
        raise ValueError(f"head_dim is {short_repr(config['head_dim'])}, but must be hidden_size / num_attention_heads")
    return GPTConfig(
        vocab_size=_size(config, "vocab_size", 32000),
        context_length=_size(config, "max_position_embeddings", 2048),
        num_layers=_size(config, "num_hidden_layers", 32),
        num_heads=num_heads,
        num_kv_heads=_optional_size(config, "num_key_value_heads"),
        d_model=d_model,
        mlp_hidden=_size(config, "intermediate_size", None),
        positions="rope",
        rope_base=base,
        norm="rmsnorm",
        tied_embeddings=_boolean(config, "tie_word_embeddings", False),
        bias=False,
    )


def _from_llama_weights(theirs: Weights, c: GPTConfig) -> dict[str, Tensor]:
    theirs = {name.removeprefix("model."): tensor for name, tensor in theirs.items()}  # LlamaModel has no prefix
    ours = {
        "token_embedding.weight": theirs["embed_tokens.weight"],
        "final_norm.weight": theirs["norm.weight"],
        "lm_head.weight": theirs["embed_tokens.weight" if c.tied_embeddings else "lm_head.weight"],
    }
    for layer in range(c.num_layers):
        block, their = f"blocks.{layer}", f"layers.{layer}"
        ours[f"{block}.attention_norm.weight"] = theirs[f"{their}.input_layernorm.weight"]
        ours[f"{block}.mlp_norm.weight"] = theirs[f"{their}.post_attention_layernorm.weight"]
        for part in ("weight", "bias") if c.bias else ("weight",):
            q, k, v, o = (theirs[f"{their}.self_attn.{name}_proj.{part}"] for name in "qkvo")
            gate, up, down = (theirs[f"{their}.mlp.{name}_proj.{part}"] for name in ("gate", "up", "down"))
            ours[f"{block}.attention.in_proj.{part}"] = torch.cat([q, k, v])
            ours[f"{block}.attention.out_proj.{part}"] = o
            ours[f"{block}.mlp.up.{part}"] = torch.cat([gate, up])
            ours[f"{block}.mlp.down.{part}"] = down
    return ours


# NanoChat, and the same network with a bigram table


def _nanochat_config(c: GPTConfig) -> dict[str, Any]:
    return _rope_config(c) | {"hidden_act": "relu2", "final_logit_softcapping": c.logit_soft_cap}


def _tiny_config(c: GPTConfig) -> dict[str, Any]:
    auto_map = {"AutoConfig": "TinyGPTConfig", "AutoModelForCausalLM": "TinyGPTForCausalLM"}
    return _nanochat_config(c) | {
        "bigram_table_size": c.bigram_table_size,
        "auto_map": {name: f"modeling_tiny_gpt.{class_name}" for name, class_name in auto_map.items()},
    }


def _nanochat_weights(ours: Weights, c: GPTConfig) -> dict[str, Tensor]:
    theirs = {"model.embed_tokens.weight": ours["token_embedding.weight"]}
    if not c.tied_embeddings:
        theirs["lm_head.weight"] = ours["lm_head.weight"]
    if c.bigram_table_size:
        theirs["bigram_embedding.weight"] = ours["bigram_embedding.weight"]
    for layer in range(c.num_layers):
        block, their = f"blocks.{layer}", f"model.layers.{layer}"
        q, k, v = ours[f"{block}.attention.in_proj.weight"].split(_qkv_rows(c))
        theirs |= {
            f"{their}.self_attn.q_proj.weight": _swap_halves(q, c),
            f"{their}.self_attn.k_proj.weight": _swap_halves(k, c),
            f"{their}.self_attn.v_proj.weight": v,
            f"{their}.self_attn.o_proj.weight": ours[f"{block}.attention.out_proj.weight"],
            f"{their}.mlp.fc1.weight": ours[f"{block}.mlp.up.weight"],
            f"{their}.mlp.fc2.weight": ours[f"{block}.mlp.down.weight"],
        }
    return theirs


def _from_nanochat_config(config: dict[str, Any]) -> GPTConfig:
    _expect(config, hidden_act="relu2", attention_bias=False)
    cap = config.get("final_logit_softcapping", 15.0)
    return replace(
        _from_rope_config(config),
        norm_affine=False,
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        mlp="relu2",
        qk_norm=True,
        embedding_norm=True,
        logit_soft_cap=None if cap is None else _number(config, "final_logit_softcapping", 15.0),
        init="nanochat",
    )


def _from_tiny_config(config: dict[str, Any]) -> GPTConfig:
    return replace(_from_nanochat_config(config), bigram_table_size=_size(config, "bigram_table_size", None))


def _from_nanochat_weights(theirs: Weights, c: GPTConfig) -> dict[str, Tensor]:
    theirs = {name.removeprefix("model."): tensor for name, tensor in theirs.items()}
    ours = {
        "token_embedding.weight": theirs["embed_tokens.weight"],
        "lm_head.weight": theirs["embed_tokens.weight" if c.tied_embeddings else "lm_head.weight"],
    }
    if c.bigram_table_size:
        ours["bigram_embedding.weight"] = theirs["bigram_embedding.weight"]
    for layer in range(c.num_layers):
        block, their = f"blocks.{layer}", f"layers.{layer}"
        q, k, v, o = (theirs[f"{their}.self_attn.{name}_proj.weight"] for name in "qkvo")
        ours |= {
            f"{block}.attention.in_proj.weight": torch.cat([_swap_halves(q, c), _swap_halves(k, c), v]),
            f"{block}.attention.out_proj.weight": o,
            f"{block}.mlp.up.weight": theirs[f"{their}.mlp.fc1.weight"],
            f"{block}.mlp.down.weight": theirs[f"{their}.mlp.fc2.weight"],
        }
    return ours


def _swap_halves(rows: Tensor, c: GPTConfig) -> Tensor:
    """Rows (heads x D, C) of queries or keys. NanoChat rotates the other way: ours with a pair's entries swapped."""
    return rows.unflatten(0, (-1, 2, c.head_dim // 2)).flip(1).flatten(0, 2)


def _qkv_rows(c: GPTConfig) -> list[int]:
    return [c.num_heads * c.head_dim, c.resolved_num_kv_heads * c.head_dim, c.resolved_num_kv_heads * c.head_dim]


# Values of a config.json, which may be anybody's


def _expect(config: dict[str, Any], **expected: Any) -> None:
    """Raises ValueError for an entry with another value. One that is missing has the expected one."""
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} is {short_repr(config[name])}, but must be {short_repr(value)}")


def _size(config: dict[str, Any], name: str, default: int | None) -> int:
    value = config.get(name, default)
    check(value, _SIZE, name)
    return value


def _optional_size(config: dict[str, Any], name: str) -> int | None:
    return None if config.get(name) is None else _size(config, name, None)


def _number(config: dict[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    check(value, Bounded(float, 0, 1e12), name)
    return float(value)


def _boolean(config: dict[str, Any], name: str, default: bool) -> bool:
    value = config.get(name, default)
    check(value, bool, name)
    return value


_PLAIN = {"logit_soft_cap": (None,), "bigram_table_size": (None,), "embedding_norm": (False,), "qk_norm": (False,)}
_GPT2 = _PLAIN | {
    **{"positions": ("learned",), "norm": ("layernorm",), "mlp": ("gelu",)},
    **{"sliding_window": (None,), "num_kv_heads": (None,)},
}
_LLAMA = _PLAIN | {"positions": ("rope",), "norm": ("rmsnorm",), "mlp": ("swiglu",)}
_NANOCHAT = {
    **{"positions": ("rope",), "norm": ("rmsnorm",), "norm_affine": (False,), "mlp": ("relu2",), "bias": (False,)},
    **{"qk_norm": (True,), "embedding_norm": (True,), "sliding_window": (None,)},
}

ARCHITECTURES = (
    Architecture("gpt2", "GPT2LMHeadModel", _GPT2, _gpt2_config, _gpt2_weights, _from_gpt2_config, _from_gpt2_weights),
    Architecture(
        *("llama", "LlamaForCausalLM", _LLAMA | {"sliding_window": (None,)}),
        *(_llama_config, _llama_weights, _from_llama_config, _from_llama_weights),
    ),
    Architecture(
        *("mistral", "MistralForCausalLM", _LLAMA | {"bias": (False,), "window_pattern": ("S",)}),
        *(_mistral_config, _llama_weights, _from_mistral_config, _from_llama_weights),
    ),
    Architecture(
        *("ministral", "MinistralForCausalLM", _LLAMA | {"bias": (False,)}),
        *(_ministral_config, _llama_weights, _from_ministral_config, _from_llama_weights),
    ),
    Architecture(
        *("nanochat", "NanoChatForCausalLM", _NANOCHAT | {"bigram_table_size": (None,)}),
        *(_nanochat_config, _nanochat_weights, _from_nanochat_config, _from_nanochat_weights),
    ),
    Architecture(
        *("tiny_gpt", "TinyGPTForCausalLM", _NANOCHAT),
        *(_tiny_config, _nanochat_weights, _from_tiny_config, _from_nanochat_weights),
        custom_code=True,
    ),
)
