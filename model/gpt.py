"""The network, bottom-up: norm, MLP, block, GPT. Plain PyTorch; needs torch alone.

A token's way, with shapes as in model/attention.py:

    ids (B, T) -> embeddings (B, T, C) -> [x + attention(norm(x)), x + mlp(norm(x))] x num_layers
               -> norm -> output layer -> logits (B, T, vocab_size)
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import MultiHeadAttention, rope_tables
from model.config import GPTConfig
from model.kernels.activation import gelu, squared_relu
from model.kernels.cross_entropy import output_loss
from model.kernels.dropout import Dropout
from model.kernels.linear import Linear
from model.kernels.norm import RMSNorm


def build_norm(config: GPTConfig) -> nn.Module:
    """LayerNorm (arXiv:1607.06450) or RMSNorm (arXiv:1910.07467) over the last dimension."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.d_model, config.norm_eps, config.norm_affine, bias=config.bias)
    return RMSNorm(config.d_model, config.norm_eps, config.norm_affine)


class BigramEmbedding(nn.Embedding):
    """A vector for each token together with the one before it, looked up by hash.

    Gives the first block at once what an attention head would first have to learn: to look one token back.
    Rows shared by hash: Svenstrup et al. 2017, arXiv:1709.03933.
    """

    def __init__(self, rows: int, d_model: int, dropout: float = 0.0):
        super().__init__(rows, d_model)
        self.dropout = dropout

    def forward(self, ids: Tensor, before: Tensor | None = None) -> Tensor:
        """Vectors for ids (B, T), the first of which is paired with none; or for ids (B,) after those `before`, (B,).

        Returns:
            (B, T, C) or (B, C).
        """
        if before is None:
            before = F.pad(ids[:, :-1], (1, 0), value=-1)  # (B, T)
        # Odd factors, so that each of the two alone reaches every row of a table of 2^n.
        vectors = super().forward((before * 40_503 ^ ids * 30_011) % self.num_embeddings)  # (..., C)
        return F.dropout1d(vectors, self.dropout, self.training)  # drops whole vectors


class MLP(nn.Module):
    """Widens every token on its own, bends, narrows again: (..., C) -> (..., C)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.kind = config.mlp
        gates = 2 if config.mlp == "swiglu" else 1  # SwiGLU's gate and value come from one matrix: [gate | value]
        self.up = Linear(config.d_model, gates * config.mlp_width, bias=config.bias)
        self.down = Linear(config.mlp_width, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)  # (B, T, mlp_width), twice as wide for swiglu
        if self.kind == "gelu":
            h = gelu(h)
        elif self.kind == "relu2":
            h = squared_relu(h)
        else:  # SwiGLU, arXiv:2002.05202
            gate, value = h.chunk(2, dim=-1)  # (B, T, mlp_width) each
            h = F.silu(gate) * value
        return self.down(h)


class Block(nn.Module):
    """Two residual lines: tokens talk to each other, then each thinks alone.

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

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), causal=True, window=self.window, rope=rope))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A decoder-only transformer (GPT-2, Llama, nanochat or our own tiny, by `config`)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.bigram_embedding = None
        if config.bigram_rows:
            self.bigram_embedding = BigramEmbedding(config.bigram_rows, config.d_model, config.bigram_dropout)
        if config.positions == "learned":
            self.position_embedding = nn.Embedding(config.context_length, config.d_model)
        else:
            cos, sin = rope_tables(config.context_length, config.head_dim, config.rope_base)
            # Recomputed from the config, so not part of a checkpoint.
            self.register_buffer("rope_cos", cos, persistent=False)  # (context_length, D)
            self.register_buffer("rope_sin", sin, persistent=False)
        self.embedding_norm = build_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, config.window_of(layer)) for layer in range(config.num_layers))
        self.final_norm = build_norm(config)
        self.output = Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.output.weight = self.token_embedding.weight
        self.init_weights()

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position.

        Args:
            ids: (B, T) token ids, T <= context_length.

        Returns:
            (B, T, vocab_size), from which softmax makes probabilities.
        """
        return self.logits(self.stream(ids))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the next tokens in nats: of `forward`'s logits, which it need not make at once.

        Args:
            ids, targets: (B, T) each.
        """
        # What `compile` compiles is `forward` alone, so a compiled network makes its logits there.
        if self.config.logit_soft_cap is not None or self._compiled_call_impl is not None:
            return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())
        x = self.final_norm(self.stream(ids))  # (B, T, C)
        return output_loss(x.flatten(0, 1), self.output.weight, targets.flatten())

    def stream(self, ids: Tensor) -> Tensor:
        """(B, T) ids -> the stream leaving the last block, (B, T, C)."""
        x, rope = self.embed(ids)
        for block in self.blocks:
            x = block(x, rope)
        return x

    def embed(
        self, ids: Tensor, place: int | None = None, before: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The stream entering the first block.

        Args:
            ids: token ids, (B, T): a context from its beginning. Or (B,): one token each, at `place` in it.
            before: for (B,) the token before each.

        Returns:
            (B, T, C) or (B, C), and RoPE's tables, (T, D) or (D,) each, if it has them.
        """
        places = slice(ids.size(1)) if place is None else place
        x = self.token_embedding(ids)  # (B, T, C) or (B, C), as all below
        if self.bigram_embedding is not None:
            x = x + self.bigram_embedding(ids, before)
        if self.config.positions == "learned":
            x = x + self.position_embedding.weight[places]
            rope = None
        else:
            rope = self.rope_cos[places], self.rope_sin[places]
        return self.dropout(self.embedding_norm(x)), rope

    def logits(self, x: Tensor) -> Tensor:
        """The stream leaving the last block (..., C) -> (..., vocab_size)."""
        logits = self.output(self.final_norm(x))
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.no_grad()
    def attention_maps(self, ids: Tensor) -> list[Tensor]:
        """The attention weights of every layer: num_layers tensors (B, H, T, T), rows summing to 1.

        Runs the trained projections, norms and positions through the written-out path, without dropout.
        """
        training, maps = self.training, []
        self.eval()
        x, rope = self.embed(ids)
        for block in self.blocks:
            _, weights = block.attention(
                block.attention_norm(x), causal=True, window=block.window, rope=rope, need_weights=True
            )
            maps.append(weights)
            x = block(x, rope)
        self.train(training)
        return maps

    def num_parameters(self) -> int:
        """Trainable numbers, shared ones counted once."""
        return sum(p.numel() for p in self.parameters())

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
            nn.init.normal_(self.output.weight, std=0.02 if gpt2 else 0.001)
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
