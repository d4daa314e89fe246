"""Every default of the network, once. Needs no torch."""

import math
from dataclasses import dataclass, fields

from model.activations import ACTIVATIONS
from system.checks import check_fields, short_repr
from system.errors import UserError

LARGEST = 1 << 24  # of any of a network's sizes: beyond it not even the messages come in time


@dataclass(frozen=True)
class GPTConfig:
    """Shape and parts of a decoder-only transformer.

    The defaults are GPT-2's parts at a size for two CPU cores. Other families differ in a few
    fields: see configs/model/llama.yaml, nanochat.yaml and tiny.yaml.
    """

    vocab_size: int | None = None
    """Number of tokens the model knows. None: the tokenizer decides."""
    context_length: int = 64
    """Tokens the model sees at once."""
    num_layers: int = 2
    """Blocks on top of each other, each one attention and one MLP."""
    num_heads: int = 4
    """Attention heads a layer. Must divide d_model."""
    num_kv_heads: int | None = None
    """Key and value heads a layer, each shared by num_heads / num_kv_heads query heads. None: as many as heads."""
    d_model: int = 128
    """Width of the residual stream."""
    mlp_hidden: int | None = None
    """Width inside the MLP. None: 4 x d_model; for swiglu 8/3 x d_model, so that all MLPs have as many weights."""
    sliding_window: int | None = None
    """Tokens a query can look at, itself included; attention then costs as much a token at any context. None: all."""
    window_pattern: str = "S"
    """Which layers have the window: S short (sliding_window), L long (all tokens), repeated over the layers. No effect
    without a window."""

    positions: str = "learned"
    """How a token's place gets in: "learned" (a vector a position) or "rope" (rotated queries and keys)."""
    rope_base: float = 10_000.0
    """RoPE's slowest wavelength, in tokens, is about 2 pi times this."""
    norm: str = "layernorm"
    """"layernorm" or "rmsnorm"."""
    norm_affine: bool = True
    """Whether norms have weights."""
    norm_eps: float = 1e-5
    """Added to the variance in every norm."""
    mlp: str = "gelu"
    """Activation of the MLP, one of model/activations.py: "gelu" (GPT-2's tanh form), "swiglu", "relu2" ..."""
    bias: bool = True
    """Whether linear layers (and LayerNorm) have biases."""
    qk_norm: bool = False
    """Normalise queries and keys, so that no score can blow up."""
    embedding_norm: bool = False
    """Normalise the embedding before the first block."""
    tied_embeddings: bool = True
    """The output layer shares the token embedding's matrix."""
    logit_soft_cap: float | None = None
    """Squash logits smoothly into (-cap, cap)."""
    bigram_table_size: int | None = None
    """Rows of a second embedding, of each token with the one before it; pairs share rows by hash. None: off."""
    bigram_dropout: float = 0.2
    """Share of these pairs left out in training, so that nothing leans on pairs that only the training text has."""
    dropout: float = 0.0
    """Share of activations dropped in training: embedding, attention weights, both branches of a block."""
    init: str = "gpt2"
    """Which column of GPT.init_weights: "gpt2" or "nanochat"."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """num_kv_heads, decided."""
        return self.num_kv_heads or self.num_heads

    @property
    def mlp_width(self) -> int:
        """mlp_hidden, decided."""
        if self.mlp_hidden is not None:
            return self.mlp_hidden
        # A gate makes three matrices of two; multiples of 32 suit vector units.
        return 4 * self.d_model if ACTIVATIONS[self.mlp].inputs == 1 else -(-8 * self.d_model // 3 // 32) * 32

    @property
    def drops(self) -> bool:
        """Whether anything is dropped in training."""
        return self.dropout > 0 or (bool(self.bigram_table_size) and self.bigram_dropout > 0)

    def window_of(self, layer: int) -> int | None:
        """Tokens a query of this layer, counted from 0, can look at. None: all before it."""
        short = self.window_pattern[layer % len(self.window_pattern)] == "S"
        return self.sliding_window if short else None

    def __post_init__(self):
        """Refuses what cannot work. Raises UserError."""
        check_fields(self, "model")
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and field.type in (int, int | None) and not 1 <= value <= LARGEST:
                bound = "at least 1" if value < 1 else f"at most {LARGEST:,}"
                raise UserError(f"model.{field.name} is {short_repr(value)}, but must be {bound}.")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UserError(f"model.{name} is {short_repr(value)}, but must be one of {', '.join(choices)}.")
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise UserError(
                f"model.window_pattern is {short_repr(self.window_pattern)}, but must be letters S (short: "
                "model.sliding_window) and L (long: all tokens), such as SSSL."
            )
        for name in ("dropout", "bigram_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(
                    f"model.{name} is {short_repr(getattr(self, name))}, but must be at least 0 and below 1."
                )
        for name in ("norm_eps", "rope_base", "logit_soft_cap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"model.{name} is {short_repr(value)}, but must be a positive number.")
        if self.positions == "rope" and self.d_model % 2:
            raise UserError(f"model.positions=rope rotates pairs, but d_model {self.d_model} is odd. Use an even one.")
        check_heads(self.d_model, self.num_heads, self.kv_heads, even=self.positions == "rope")
        if self.positions == "rope" and self.head_dim % 2:
            raise UserError(
                f"model.positions=rope rotates pairs, but head_dim = d_model {self.d_model} / num_heads "
                f"{self.num_heads} = {self.head_dim} is odd. Choose model.num_heads so that the quotient is even."
            )


RENAMED_FIELDS = {
    "attention_window": "sliding_window",
    "attention_pattern": "window_pattern",
    "bigram_rows": "bigram_table_size",
}
"""Fields of earlier versions -> what they are called now."""

_CHOICES = {
    "positions": ("learned", "rope"),
    "norm": ("layernorm", "rmsnorm"),
    "mlp": ACTIVATIONS,
    "init": ("gpt2", "nanochat"),
}


def check_heads(d_model: int, num_heads: int, num_kv_heads: int, even: bool = False) -> None:
    """Raises UserError unless heads divide the width and key/value heads divide the heads.

    Args:
        even: whether head_dim is to be even, as RoPE needs it: only such heads are offered.
    """
    if d_model % num_heads:
        valid = _divisors(d_model // 2 if even else d_model)
        raise UserError(
            f"d_model {d_model} is not divisible by num_heads {num_heads}. "
            f"Use model.num_heads from {', '.join(map(str, valid))}, or another model.d_model."
        )
    if num_heads % num_kv_heads:
        valid = _divisors(num_heads)
        raise UserError(
            f"num_heads {num_heads} is not divisible by num_kv_heads {num_kv_heads}. "
            f"Use model.num_kv_heads from {', '.join(map(str, valid))}."
        )


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
