"""GGUF, the file format of llama.cpp and Ollama: a network and its tokenizer in one file.

The `gguf` package writes the format. llama.cpp runs GPT-2 and Llama networks, and splits text only with patterns of
published models: of the tokenizers here, with GPT-2's (`tokenizer.pattern=gpt2`). Everything else is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tiktoken
from torch import Tensor

from checkpoint.hugging_face.architectures import ARCHITECTURES, Architecture
from checkpoint.hugging_face.tokenizer import GPT2_PATTERNS, all_merges, to_characters
from data.tokenizers.byte import PATTERN as BYTE_PATTERN
from model.config import GPTConfig
from system.errors import UserError
from system.files import atomic_write

if TYPE_CHECKING:  # the package is optional
    from gguf import GGUFWriter

# A byte that no UTF-8 text contains. llama.cpp stops at an end-of-text token, and needs to be given one.
_NEVER_USED = b"\xff"
_NAMES = {
    "gpt2": {
        "transformer.wte": "token_embd",
        "transformer.wpe": "position_embd",
        "transformer.ln_f": "output_norm",
        "lm_head": "output",
        "ln_1": "attn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "ln_2": "ffn_norm",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    },
    "llama": {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
}
"""Modules of Hugging Face's models -> those of llama.cpp, by architecture."""


def write_gguf(
    path: Path, config: GPTConfig, tokenizer: tiktoken.Encoding, weights: Mapping[str, Tensor], name: str
) -> None:
    """Writes a network as a GGUF file, in float32.

    Args:
        weights: the network's state_dict.
        name: of the model, for people.

    Raises:
        UserError: llama.cpp has no such network or tokenizer, the package gguf is missing, or the file cannot be
            written.
    """
    architecture = _architecture(config)
    merges = _merges(tokenizer)
    try:
        from gguf import GGUFWriter, LlamaFileType
    except ImportError:
        raise UserError("export to .gguf needs the package gguf. Install it with: pip install gguf") from None
    try:
        with atomic_write(path) as file:
            writer = GGUFWriter(file.name, architecture.model_type)
            writer.add_name(name)
            writer.add_file_type(LlamaFileType.ALL_F32)
            _add_config(writer, config)
            _add_tokenizer(writer, tokenizer, merges)
            theirs = architecture.to_weights({key: tensor.cpu() for key, tensor in weights.items()}, config)
            for key, tensor in _gguf_tensors(architecture.model_type, theirs, config):
                writer.add_tensor(key, tensor)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}. Give another file name.") from None


def _architecture(config: GPTConfig) -> Architecture:
    known = [architecture for architecture in ARCHITECTURES if architecture.model_type in _NAMES]
    nearest = min(known, key=lambda architecture: len(architecture.mismatches(config)))
    if mismatches := nearest.mismatches(config):
        raise UserError(
            f"llama.cpp cannot run a network with {', '.join(mismatches)}; the nearest it has is "
            f"{nearest.model_type}. Train with model=gpt2 or model=llama."
        )
    return nearest


def _add_config(writer: GGUFWriter, c: GPTConfig) -> None:
    writer.add_context_length(c.context_length)
    writer.add_embedding_length(c.d_model)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.resolved_mlp_hidden)
    writer.add_head_count(c.num_heads)
    writer.add_vocab_size(c.vocab_size)
    if c.positions == "rope":
        writer.add_head_count_kv(c.resolved_num_kv_heads)
        writer.add_layer_norm_rms_eps(c.norm_eps)
        writer.add_rope_dimension_count(c.head_dim)
        writer.add_rope_freq_base(c.rope_base)
    else:
        writer.add_layer_norm_eps(c.norm_eps)


# Weights


def _gguf_tensors(model_type: str, theirs: Mapping[str, Tensor], config: GPTConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values in GGUF. A vector or a matrix (outputs, inputs) each, as torch.nn.Linear has them."""
    names = _NAMES[model_type]
    for name, tensor in theirs.items():
        module, _, part = name.rpartition(".")
        layer = ""
        if module not in names:  # "model.layers.0.mlp.up_proj"
            _, _, number, module = module.split(".", 3)
            layer = f"blk.{number}."
        if model_type == "gpt2" and layer and tensor.ndim == 2:  # Conv1D has (inputs, outputs)
            tensor = tensor.T
        if names[module] == "attn_q":
            tensor = _interleave_halves(tensor, config.num_heads)
        if names[module] == "attn_k":
            tensor = _interleave_halves(tensor, config.resolved_num_kv_heads)
        yield f"{layer}{names[module]}.{part}", tensor.contiguous().numpy()


def _interleave_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Reorders rows (H D, …): llama.cpp rotates adjacent pairs, where Hugging Face's Llama rotates i and i + D/2."""
    heads = rows.unflatten(0, (num_heads, 2, -1))  # (H, 2, D/2, …)
    return heads.transpose(1, 2).flatten(0, 2)


# Tokenizer


def _merges(tokenizer: tiktoken.Encoding) -> list[tuple[bytes, bytes]]:
    """The merges for llama.cpp. Raises UserError where its ids would differ from ours."""
    ranks = tokenizer._mergeable_ranks
    if tokenizer._pat_str == BYTE_PATTERN:
        return []
    if tokenizer._pat_str not in GPT2_PATTERNS:
        raise UserError(
            f"llama.cpp cannot split text like tokenizer {tokenizer.name}. Train with tokenizer.pattern=gpt2 or "
            "tokenizer=byte."
        )
    merges = list(all_merges(ranks))
    for token in ranks:  # a piece that is a token is that token for tiktoken, whatever the merges make of it
        if len(_merge(token, ranks.get)) > 1:
            raise UserError(
                f"llama.cpp would never make the token {token!r} of tokenizer {tokenizer.name}: its merges lead "
                "elsewhere. Train with tokenizer.pattern=gpt2 or tokenizer=byte."
            )
    return merges


def _merge(piece: bytes, rank_of: Callable[[bytes], int | None]) -> list[bytes]:
    """Byte-pair encoding of a piece: joins the pair that makes the token of the lowest id, as long as there is one.

    The whole piece counts only as the result of such a join.
    """
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 1:
        joined = [(rank_of(left + right), i) for i, (left, right) in enumerate(zip(parts, parts[1:], strict=False))]
        rank, i = min(((rank, i) for rank, i in joined if rank is not None), default=(None, 0))
        if rank is None:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _add_tokenizer(writer: GGUFWriter, tokenizer: tiktoken.Encoding, merges: list[tuple[bytes, bytes]]) -> None:
    from gguf import TokenType

    ranks, special = tokenizer._mergeable_ranks, tokenizer._special_tokens
    texts = {rank: to_characters(token) for token, rank in ranks.items()} | {i: name for name, i in special.items()}
    ids = range(tokenizer.n_vocab)
    normal, controls = set(ranks.values()), set(special.values())
    types = [TokenType.NORMAL if i in normal else TokenType.CONTROL if i in controls else TokenType.UNUSED for i in ids]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([texts.get(i, f"[unused {i}]") for i in ids])
    writer.add_token_types(types)
    # The file must have merges. "a" and "a" join to no token of a byte tokenizer, and llama.cpp then keeps the two.
    writer.add_token_merges([f"{to_characters(left)} {to_characters(right)}" for left, right in merges] or ["a a"])
    end_of_text = special.get("<|endoftext|>", ranks[_NEVER_USED])
    writer.add_bos_token_id(end_of_text)
    writer.add_eos_token_id(end_of_text)
    writer.add_add_bos_token(False)
