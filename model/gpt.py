"""The GPT model in plain PyTorch: MLP, Block, GPT. Attention is in model/attention.py, where the shapes are explained.

ids (B, T) -> embeddings (B, T, C) -> num_layers x Block -> norm -> lm_head -> logits (B, T, vocab_size)
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.activations import ACTIVATIONS
from model.attention import MultiHeadAttention
from model.config import GPTConfig
from model.layers import BigramEmbedding, Dropout, Linear, RMSNorm, Rope, cross_entropy, precompute_rope


def build_norm(config: GPTConfig) -> nn.Module:
    """LayerNorm (arXiv:1607.06450) or RMSNorm (arXiv:1910.07467)."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.d_model, config.norm_eps, config.norm_affine, bias=config.bias)
    return RMSNorm(config.d_model, config.norm_eps, config.norm_affine)


class MLP(nn.Module):
    """Position-wise feed-forward network: (..., C) -> (..., C)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        activation = ACTIVATIONS[config.mlp]
        self.activation = activation.build()
        self.up = Linear(config.d_model, activation.inputs * config.resolved_mlp_hidden, bias=config.bias)
        self.down = Linear(config.resolved_mlp_hidden, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)  # (..., hidden), or (..., 2 x hidden) for a gated activation: [gate | value]
        x = self.activation(x)  # (..., hidden)
        return self.down(x)


class Block(nn.Module):
    """Pre-norm transformer block: attention and MLP, each with a residual connection.

    Training, prefill, decoding and attention maps all use this `forward`.

    Args:
        window: number of tokens a query attends to. None: all previous tokens.
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
        """(B, T, C) -> (B, T, C). For `rope` and `cache` see MultiHeadAttention.forward."""
        h = self.attention_norm(x)
        x = x + self.dropout(self.attention(h, causal=True, window=self.window, rope=rope, cache=cache))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class GPT(nn.Module):
    """Decoder-only transformer language model. The config selects the architecture: GPT-2, Llama, nanochat or tiny."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("config.vocab_size is None; set it with dataclasses.replace(config, vocab_size=...)")
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.bigram_embedding = None
        if config.bigram_table_size:
            self.bigram_embedding = BigramEmbedding(config.bigram_table_size, config.d_model, config.bigram_dropout)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.context_length, config.d_model)
        else:
            cos, sin = precompute_rope(config.context_length, config.head_dim, config.rope_base)
            self.register_buffer("rope_cos", cos, persistent=False)  # (context_length, D/2)
            self.register_buffer("rope_sin", sin, persistent=False)  # (context_length, D/2)
        self.embedding_norm = build_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, config.window_of(layer)) for layer in range(config.num_layers))
        self.final_norm = build_norm(config)
        self.lm_head = Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.lm_head.weight = self.token_embedding.weight
        self.init_weights()

    def forward(self, ids: Tensor, cache: Any = None) -> Tensor:
        """Returns the logits of the next token at every position, (B, T, vocab_size).

        Args:
            ids: (B, T) token ids, T <= context_length.
            cache: KV cache of the preceding tokens, which is extended: sampling.kv_cache.DynamicCache.
        """
        return self.logits(self.hidden_states(ids, cache))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy of the next tokens, in nats.

        Args:
            ids, targets: (B, T) token ids.
        """
        # torch.compile compiles `forward` only, so a compiled network has to compute its logits there.
        if self.config.logit_soft_cap is not None or self._compiled_call_impl is not None:
            return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())
        x = self.final_norm(self.hidden_states(ids))  # (B, T, C)
        return cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten())  # does not hold all logits

    def hidden_states(self, ids: Tensor, cache: Any = None) -> Tensor:
        """Returns the output of the last block for ids (B, T): (B, T, C)."""
        x, rope = self.embed(ids) if cache is None else self.embed(ids, cache.length, cache.prev_ids)
        for i, block in enumerate(self.blocks):
            x = block(x, rope, None if cache is None else cache.layers[i])
        if cache is not None:
            cache.advance(ids)
        return x

    def embed(self, ids: Tensor, position: int = 0, prev_ids: Tensor | None = None) -> tuple[Tensor, Rope | None]:
        """Returns the input of the first block, (B, T, C), and the RoPE tables of these positions (None without RoPE).

        Args:
            ids: (B, T) token ids.
            position: position of the first of these tokens in the context.
            prev_ids: (B,), the token before it. None: it is the first one.
        """
        positions = slice(position, position + ids.size(1))
        x = self.token_embedding(ids)  # (B, T, C)
        if self.bigram_embedding is not None:
            x = x + self.bigram_embedding(ids, prev_ids)
        rope = None
        if self.config.positions == "learned":
            x = x + self.position_embedding.weight[positions]
        else:
            rope = self.rope_cos[positions], self.rope_sin[positions]  # (T, D/2) each
        return self.dropout(self.embedding_norm(x)), rope

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and output layer: (..., C) -> (..., vocab_size)."""
        logits = self.lm_head(self.final_norm(x))
        return logits if (cap := self.config.logit_soft_cap) is None else cap * torch.tanh(logits / cap)

    @torch.no_grad()
    def attention_maps(self, ids: Tensor) -> list[Tensor]:
        """Returns the attention weights of every layer for ids (B, T): num_layers tensors (B, H, T, T).

        Runs the network without dropout. A forward hook on each attention layer computes its weights with eager
        attention, from the same inputs.
        """
        training, maps = self.training, []

        def record_weights(attention: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
            maps.append(attention.forward(*args, **kwargs, need_weights=True)[1])

        attentions = (module for module in self.modules() if isinstance(module, MultiHeadAttention))
        hooks = [attention.register_forward_hook(record_weights, with_kwargs=True) for attention in attentions]
        try:
            self.eval().hidden_states(ids)
        finally:
            for hook in hooks:
                hook.remove()
            self.train(training)
        return maps

    def num_parameters(self) -> int:
        """Number of parameters. Tied ones count once."""
        return sum(p.numel() for p in self.parameters())

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args) -> None:
        """Also accepts weights of format 1, in which `lm_head` was called `output`."""
        if f"{prefix}output.weight" in state_dict:
            state_dict[f"{prefix}lm_head.weight"] = state_dict.pop(f"{prefix}output.weight")
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initializes the weights from normal distributions with these standard deviations:

        |                            | gpt2                        | nanochat             |
        |----------------------------|-----------------------------|----------------------|
        | token_embedding            | 0.02                        | 1 (0.02 if tied)     |
        | bigram_embedding           | 0                           | 0                    |
        | position_embedding         | 0.02                        | 0.02                 |
        | lm_head, unless tied       | 0.02                        | 0.001                |
        | attention.in_proj, mlp.up  | 0.02                        | 1 / sqrt(d_model)    |
        | attention.out_proj, .down  | 0.02 / sqrt(2 x num_layers) | 0                    |

        Biases start at 0 and norm weights at 1. Small lm_head weights make the first prediction nearly uniform, so the
        loss starts at ln(vocab_size).
        """
        c = self.config
        gpt2 = c.init == "gpt2"
        in_std = 0.02 if gpt2 else c.d_model**-0.5
        out_std = 0.02 / math.sqrt(2 * c.num_layers) if gpt2 else 0.0
        nn.init.normal_(self.token_embedding.weight, std=0.02 if gpt2 or c.tied_embeddings else 1.0)
        if self.bigram_embedding is not None:
            nn.init.zeros_(self.bigram_embedding.weight)
        if c.positions == "learned":
            nn.init.normal_(self.position_embedding.weight, std=0.02)
        if not c.tied_embeddings:
            nn.init.normal_(self.lm_head.weight, std=0.02 if gpt2 else 0.001)
        for block in self.blocks:
            for layer, std in (
                (block.attention.in_proj, in_std),
                (block.attention.out_proj, out_std),
                (block.mlp.up, in_std),
                (block.mlp.down, out_std),
            ):
                nn.init.normal_(layer.weight, std=std)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
