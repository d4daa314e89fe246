"""The network, bottom-up: norm, MLP, block, GPT. Plain PyTorch; needs torch alone.

Shapes as in model/attention.py:

    ids (B, T) -> embeddings (B, T, C) -> [x + attention(norm(x)), x + mlp(norm(x))] x num_layers
               -> norm -> output layer -> logits (B, T, vocab_size)
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.activations import ACTIVATIONS
from model.attention import MultiHeadAttention
from model.config import GPTConfig
from model.layers import (
    BigramEmbedding,
    Dropout,
    Linear,
    RMSNorm,
    Rope,
    cross_entropy,
    precompute_rope,
)


def build_norm(config: GPTConfig) -> nn.Module:
    """LayerNorm (arXiv:1607.06450) or RMSNorm (arXiv:1910.07467) over the last dimension."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.d_model, config.norm_eps, config.norm_affine, bias=config.bias)
    return RMSNorm(config.d_model, config.norm_eps, config.norm_affine)


class MLP(nn.Module):
    """The feed-forward layer, on every token alone: widen, activate, narrow. (..., C) -> (..., C)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        activation = ACTIVATIONS[config.mlp]
        self.activation = activation.build()
        self.up = Linear(config.d_model, activation.inputs * config.mlp_width, bias=config.bias)
        self.down = Linear(config.mlp_width, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)  # (B, T, mlp_width), twice as wide for a gated activation: [gate | value]
        return self.down(self.activation(h))


class Block(nn.Module):
    """Pre-norm transformer block: tokens talk to each other, then each thinks alone.

    Training, prefill, decoding and attention maps all go through this `forward`.

    Args:
        window: tokens a query can look at. None: all before it.
    """

    def __init__(self, config: GPTConfig, window: int | None = None):
        super().__init__()
        self.window = window
        self.attention_norm = build_norm(config)
        self.attention = MultiHeadAttention(
            config.d_model,
            config.num_heads,
            config.num_kv_heads,
            qkv_bias=config.bias,
            out_bias=config.bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            dropout=config.dropout,
        )
        self.mlp_norm = build_norm(config)
        self.mlp = MLP(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, rope: Rope | None = None, cache: Any = None) -> Tensor:
        """(B, T, C) -> (B, T, C). rope: the positions' angles. cache: keys and values of earlier tokens."""
        h = self.attention_norm(x)
        x = x + self.dropout(self.attention(h, causal=True, window=self.window, rope=rope, cache=cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A decoder-only transformer: GPT-2, Llama, nanochat or our own tiny, by `config`."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("a network needs its vocab_size: dataclasses.replace(config, vocab_size=...)")
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.bigram_embedding = None
        if config.bigram_table_size:
            self.bigram_embedding = BigramEmbedding(config.bigram_table_size, config.d_model, config.bigram_dropout)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.context_length, config.d_model)
        else:
            cos, sin = precompute_rope(config.context_length, config.head_dim, config.rope_base)
            self.register_buffer("rope_cos", cos, persistent=False)  # (context_length, D/2); in no checkpoint
            self.register_buffer("rope_sin", sin, persistent=False)
        self.embedding_norm = build_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, config.window_of(layer)) for layer in range(config.num_layers))
        self.final_norm = build_norm(config)
        self.lm_head = Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.lm_head.weight = self.token_embedding.weight
        self.init_weights()

    def forward(self, ids: Tensor, cache: Any = None) -> Tensor:
        """Logits of the next token at every position.

        Args:
            ids: (B, T) token ids, T <= context_length.
            cache: has keys and values of the tokens before these, and takes theirs: sampling.kv_cache.DynamicCache.

        Returns:
            (B, T, vocab_size), from which softmax makes probabilities.
        """
        return self.logits(self.hidden_states(ids, cache))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the next tokens in nats: of `forward`'s logits, which it need not make at once.

        Args:
            ids, targets: (B, T) each.
        """
        # What `compile` compiles is `forward` alone, so a compiled network makes its logits there.
        if self.config.logit_soft_cap is not None or self._compiled_call_impl is not None:
            return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())
        x = self.final_norm(self.hidden_states(ids))  # (B, T, C)
        return cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten())

    def hidden_states(self, ids: Tensor, cache: Any = None) -> Tensor:
        """(B, T) ids -> the residual stream after the last block, (B, T, C)."""
        x, rope = self.embed(ids) if cache is None else self.embed(ids, cache.length, cache.prev_ids)
        for block, layer in zip(self.blocks, cache.layers if cache else [None] * len(self.blocks), strict=True):
            x = block(x, rope, layer)
        if cache is not None:
            cache.advance(ids)
        return x

    def embed(self, ids: Tensor, position: int = 0, prev_ids: Tensor | None = None) -> tuple[Tensor, Rope | None]:
        """The stream entering the first block, (B, T, C), and RoPE's angles at these positions, if it has them.

        Args:
            ids: (B, T), the tokens from `position` in the context on.
            prev_ids: those before the first of them, (B,); None: there are none.
        """
        positions = slice(position, position + ids.size(1))
        x = self.token_embedding(ids)  # (B, T, C), as all below
        if self.bigram_embedding is not None:
            x = x + self.bigram_embedding(ids, prev_ids)
        rope = None
        if self.config.positions == "learned":
            x = x + self.position_embedding.weight[positions]
        else:
            rope = self.rope_cos[positions], self.rope_sin[positions]  # (T, D/2) each
        return self.dropout(self.embedding_norm(x)), rope

    def logits(self, x: Tensor) -> Tensor:
        """The stream after the last block (..., C) -> (..., vocab_size)."""
        logits = self.lm_head(self.final_norm(x))
        return logits if (cap := self.config.logit_soft_cap) is None else cap * torch.tanh(logits / cap)

    @torch.no_grad()
    def attention_maps(self, ids: Tensor) -> list[Tensor]:
        """The attention weights of every layer: num_layers tensors (B, H, T, T), rows summing to 1.

        The network runs as it is, without dropout; beside it each layer's eager attention is computed once more.
        """
        training, maps = self.training, []

        def write_out(attention: nn.Module, args: tuple, options: dict, output: Tensor) -> None:
            maps.append(attention.forward(*args, **options, need_weights=True)[1])

        attentions = (module for module in self.modules() if isinstance(module, MultiHeadAttention))
        hooks = [attention.register_forward_hook(write_out, with_kwargs=True) for attention in attentions]
        try:
            self.eval().hidden_states(ids)
        finally:
            for hook in hooks:
                hook.remove()
            self.train(training)
        return maps

    def num_parameters(self) -> int:
        """Trainable numbers, shared ones counted once."""
        return sum(p.numel() for p in self.parameters())

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args) -> None:
        """Also takes weights from before `lm_head` had its name: it was called `output`."""
        if f"{prefix}output.weight" in state_dict:
            state_dict[f"{prefix}lm_head.weight"] = state_dict.pop(f"{prefix}output.weight")
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.no_grad()
    def init_weights(self) -> None:
        """All random starts in one table (normal distributions, standard deviations):

        |                               | gpt2                   | nanochat     |
        |-------------------------------|------------------------|--------------|
        | token embedding               | 0.02                   | 1 (tied 0.02)|
        | bigram embedding              | 0                      | 0            |
        | position embedding            | 0.02                   | 0.02         |
        | output layer, where not tied  | 0.02                   | 0.001        |
        | matrices that read the stream | 0.02                   | 1 / sqrt(C)  |
        | matrices that write to it     | 0.02 / sqrt(2 x layers)| 0            |
        | biases 0, norm weights 1      |                        |              |

        Small output weights make the first prediction uniform: the loss starts at ln(vocab_size).
        """
        c = self.config
        gpt2 = c.init == "gpt2"
        read = 0.02 if gpt2 else c.d_model**-0.5
        write = 0.02 / math.sqrt(2 * c.num_layers) if gpt2 else 0.0
        nn.init.normal_(self.token_embedding.weight, std=0.02 if gpt2 or c.tied_embeddings else 1.0)
        if self.bigram_embedding is not None:
            nn.init.zeros_(self.bigram_embedding.weight)
        if c.positions == "learned":
            nn.init.normal_(self.position_embedding.weight, std=0.02)
        if not c.tied_embeddings:
            nn.init.normal_(self.lm_head.weight, std=0.02 if gpt2 else 0.001)
        for block in self.blocks:
            for layer, std in (
                (block.attention.in_proj, read),
                (block.attention.out_proj, write),
                (block.mlp.up, read),
                (block.mlp.down, write),
            ):
                nn.init.normal_(layer.weight, std=std)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
