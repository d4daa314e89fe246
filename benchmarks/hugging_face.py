"""Hugging Face's GPT-2, for comparison."""

from importlib.util import find_spec

from torch import nn

from model.config import GPTConfig
from model.gpt import GPT
from system.errors import UserError


def check_transformers_installed() -> None:
    """Raises UserError if transformers is not installed."""
    if find_spec("transformers") is None:
        raise UserError("this benchmark needs transformers. Install it: pip install -r requirements-dev.txt")


def hugging_face_gpt2(config: GPTConfig) -> nn.Module:
    """GPT2LMHeadModel of the same shape, without dropout. Raises UserError if the parameter counts differ."""
    from transformers import GPT2Config, GPT2LMHeadModel  # only here: nothing else needs it

    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context_length,
            n_embd=config.d_model,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="sdpa",
        )
    )
    numbers, ours = sum(p.numel() for p in theirs.parameters()), GPT(config).num_parameters()
    if numbers != ours:
        raise UserError(f"GPT2LMHeadModel has {numbers:,} parameters and ours {ours:,}: not the same model.")
    return theirs
