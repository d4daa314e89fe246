"""The model config: every architecture field with its default. Does not import torch."""

import math
from dataclasses import dataclass, fields

from model.activations import ACTIVATIONS
from system.checks import check_fields, short_repr
from system.errors import UserError

MAX_SIZE = 1 << 24  # upper bound of every integer field: larger values run out of memory before any useful message


@dataclass(frozen=True)
class GPTConfig:
    """Architecture of a decoder-only transformer.

    The defaults are GPT-2's architecture at a size for two CPU cores. The other families differ in a few fields:
    see configs/model/llama.yaml, nanochat.yaml and tiny.yaml.
    """

    vocab_size: int | None = None
    """Number of tokens in the vocabulary. None: taken from the tokenizer."""
    context_length: int = 64
    """Maximum sequence length, in tokens."""
    num_layers: int = 2
    """Number of transformer blocks."""
    num_heads: int = 4
    """Number of attention heads per layer. Must divide d_model."""
    num_kv_heads: int | None = None
    """Number of key/value heads per layer (grouped-query attention). Must divide num_heads. None: num_heads."""
    d_model: int = 128
    """Width of the embeddings and of the residual stream."""
    mlp_hidden: int | None = None
    """Hidden width of the MLP. None: 4 x d_model, or 8/3 x d_model for swiglu, which then has as many parameters."""
    sliding_window: int | None = None
    """Number of tokens a query attends to, including its own. The attention cost per token is then the same for any
    context length. None: all previous tokens."""
    window_pattern: str = "S"
    """Which layers use the sliding window, one letter per layer, repeated: S (short, sliding_window tokens) or
    L (long, all tokens). Example: SSSL. No effect without sliding_window."""

    positions: str = "learned"
    """Position encoding: "learned" (absolute position embeddings) or "rope" (rotary embeddings)."""
    rope_base: float = 10_000.0
    """Base of RoPE's frequencies. Larger values rotate more slowly."""
    norm: str = "layernorm"
    """Normalization layer: "layernorm" or "rmsnorm"."""
    norm_affine: bool = True
    """Whether the normalization layers have learnable weights."""
    norm_eps: float = 1e-5
    """Epsilon of the normalization layers."""
    mlp: str = "gelu"
    """Activation function of the MLP, one of model/activations.py: "gelu" (tanh approximation), "swiglu", "relu2"."""
    bias: bool = True
    """Whether linear layers and LayerNorm have biases."""
    qk_norm: bool = False
    """Apply RMSNorm to queries and keys, which bounds the attention scores."""
    embedding_norm: bool = False
    """Apply the normalization layer to the embeddings, before the first block."""
    tied_embeddings: bool = True
    """Share one weight matrix between the token embedding and the output layer (lm_head)."""
    logit_soft_cap: float | None = None
    """Limit the logits to (-cap, cap) with cap x tanh(logits / cap). None: no limit."""
    bigram_table_size: int | None = None
    """Rows of the hashed bigram embedding, which adds a vector for each pair of consecutive tokens. None: no bigram
    embedding."""
    bigram_dropout: float = 0.2
    """Dropout probability of whole bigram vectors, which reduces overfitting to pairs in the training text."""
    dropout: float = 0.0
    """Dropout probability for embeddings, attention weights, and the outputs of attention and MLP."""
    init: str = "gpt2"
    """Weight initialization: "gpt2" or "nanochat"; see GPT.init_weights."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads

    @property
    def resolved_num_kv_heads(self) -> int:
        """num_kv_heads, or its default."""
        return self.num_kv_heads or self.num_heads

    @property
    def resolved_mlp_hidden(self) -> int:
        """mlp_hidden, or its default."""
        if self.mlp_hidden is not None:
            return self.mlp_hidden
        # A gated MLP has three matrices instead of two. Multiples of 32 suit vector units.
        return 4 * self.d_model if ACTIVATIONS[self.mlp].inputs == 1 else -(-8 * self.d_model // 3 // 32) * 32

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything."""
        return self.dropout > 0 or (bool(self.bigram_table_size) and self.bigram_dropout > 0)

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer, counted from 0. None: full attention."""
        short = self.window_pattern[layer % len(self.window_pattern)] == "S"
        return self.sliding_window if short else None

    def __post_init__(self):
        """Validates the fields. Raises UserError."""
        check_fields(self, "model")
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and field.type in (int, int | None) and not 1 <= value <= MAX_SIZE:
                bound = "at least 1" if value < 1 else f"at most {MAX_SIZE:,}"
                raise UserError(f"model.{field.name} is {short_repr(value)}, but must be {bound}.")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UserError(f"model.{name} is {short_repr(value)}, but must be one of {', '.join(choices)}.")
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise UserError(
                f"model.window_pattern is {short_repr(self.window_pattern)}, but must consist of the letters S "
                "(short: model.sliding_window) and L (long: all tokens), for example SSSL."
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
            raise UserError(f"model.positions=rope needs an even model.d_model, but it is {self.d_model}.")
        check_heads(self.d_model, self.num_heads, self.resolved_num_kv_heads, even=self.positions == "rope")
        if self.positions == "rope" and self.head_dim % 2:
            raise UserError(
                f"model.positions=rope needs an even head_dim, but d_model {self.d_model} / num_heads "
                f"{self.num_heads} is {self.head_dim}. Use another model.num_heads."
            )


RENAMED_FIELDS = {
    "attention_window": "sliding_window",
    "attention_pattern": "window_pattern",
    "bigram_rows": "bigram_table_size",
}
"""Field names of earlier versions -> current names."""

_CHOICES = {
    "positions": ("learned", "rope"),
    "norm": ("layernorm", "rmsnorm"),
    "mlp": ACTIVATIONS,
    "init": ("gpt2", "nanochat"),
}


def check_heads(d_model: int, num_heads: int, num_kv_heads: int, even: bool = False) -> None:
    """Raises UserError unless num_heads divides d_model and num_kv_heads divides num_heads.

    Args:
        even: suggest only numbers of heads with an even head_dim, as RoPE needs.
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
