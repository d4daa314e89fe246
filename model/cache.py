"""A network that writes: what it computed of earlier tokens is kept, so that a new one costs one token's work.

    prefill    all tokens of a prompt in one pass; their keys and values fill the cache
    step       one token a sequence: its query looks at the cache, to which its own key and value are added

Each layer keeps keys and values at a fixed shape and writes them in place. A layer with a window keeps that many,
the newest in the place of the oldest.

A context that is full is halved: its newest half goes through the network once more, as a prompt would, and from
there it fills up again. So the model always sees at least half of its context, and what it sees it sees as in
training: positions start at 0, and no layer remembers anything of a token that has left. A pass over many tokens
takes little of the time that many steps take, so a token costs as much as inside the context, on average.

Letters in shape comments are those of model/attention.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import fused_attention
from model.gpt import GPT, Block
from model.linear import inference_copy
from model.windowed_attention import windowed_attention


def dropped_when_full(context_length: int) -> int:
    """Tokens that leave a full context at once."""
    return max(1, context_length // 2)


class Layer:
    """A block of the network with the keys and values of the tokens in view.

    Args:
        block: of an `inference_copy`.
        slots: tokens whose keys and values it keeps.
    """

    def __init__(self, block: Block, slots: int):
        self.block, self.slots = block, slots
        self.attention, self.mlp = block.attention, block.mlp.forward  # calling a module takes longer
        self.hold(torch.empty(2, 0, self.attention.num_kv_heads, slots, self.attention.head_dim))

    def hold(self, cache: Tensor) -> None:
        """Takes this as the place of keys and values, (2, B, G, slots, D)."""
        self.keys, self.values = cache  # (B, G, slots, D) each
        self.in_slot = cache.transpose(0, 1).unbind(3)  # for each slot a view (B, 2, G, D)

    def prefill(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """The block for the first T tokens, (B, T, C) -> (B, T, C): Block.forward, and it fills the cache."""
        block = self.block
        q, k, v = block.attention.project(block.attention_norm(x), None, None, rope)  # (B, H or G, T, D)
        T = k.size(2)
        if self.keys.size(0) != k.size(0) or self.keys.dtype != k.dtype or self.keys.device != k.device:
            self.hold(k.new_empty(2, *k.shape[:2], self.slots, k.size(3)))
        for cached, new in ((self.keys, k), (self.values, v)):
            if self.slots < T:  # the last ones only, token t in slot t % slots
                new = new[:, :, -self.slots :].roll(T, dims=2)
            cached[:, :, :T] = new
        if block.window is None:
            heads = fused_attention(q, k, v, causal=True)  # (B, H, T, D)
        else:
            heads = windowed_attention(q, k, v, block.window)
        x = x + block.attention.out_proj(heads.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, C)
        return x + block.mlp(block.mlp_norm(x))

    def step(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, position: int) -> Tensor:
        """The block for one more token a sequence, (B, C) -> (B, C).

        The same as `prefill` on a text longer by that token, without a dimension for T.
        """
        block, attention = self.block, self.attention
        H, G, D = attention.num_heads, attention.num_kv_heads, attention.head_dim
        heads = attention.in_proj(block.attention_norm(x)).view(-1, H + 2 * G, D)  # [H queries | G keys | G values]
        if rope is not None or attention.qk_norm_eps is not None:
            qk = heads.narrow(1, 0, H + G)  # (B, H + G, D)
            qk.copy_(attention.norm_and_rotate(qk, rope))
        self.in_slot[position % self.slots].copy_(heads.narrow(1, H, 2 * G).view(-1, 2, G, D))
        filled = min(position + 1, self.slots)
        keys, values = self.keys.narrow(2, 0, filled), self.values.narrow(2, 0, filled)  # (B, G, S, D)
        # No mask: all in the cache may be seen. So the query heads that share a key head can pass for its queries.
        q = heads.narrow(1, 0, H).view(-1, G, H // G, D)  # (B, H, D) -> (B, G, H / G, D)
        x = x + attention.out_proj(unmasked_attention(q, keys, values).reshape(x.shape))
        return x + self.mlp(block.mlp_norm(x))

    def expand(self, samples: int) -> None:
        """One sequence becomes `samples` equal ones, each with keys and values of its own."""
        if samples > 1:
            self.hold(torch.stack([self.keys, self.values]).expand(-1, samples, -1, -1, -1).contiguous())


def unmasked_attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Few queries (B, G, R, D) gather from keys and values (B, G, S, D) -> (B, G, R, D)."""
    if q.size(0) == 1 or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, keys, values)
    # For many sequences on the CPU two products take an eighth less than PyTorch's fused attention.
    scores = torch.bmm(q.flatten(0, 1), keys.flatten(0, 1).mT)  # (B G, R, D) (B G, D, S) -> (B G, R, S)
    weights = scores.mul_(q.size(-1) ** -0.5).softmax(-1)
    return torch.bmm(weights, values.flatten(0, 1)).view(q.shape)


class Decoder:
    """Logits of the next token, for sequences that grow by a token at a time.

    Use it in torch.inference_mode(), and only as long as the network's weights stay as they are.
    """

    def __init__(self, network: GPT):
        config = network.config
        self.vocab_size, self.context_length = config.vocab_size, config.context_length
        self.device = next(network.parameters()).device
        self.network = inference_copy(network)
        self.layers = [Layer(block, min(block.window or self.context_length, self.context_length))
                       for block in self.network.blocks]  # fmt: skip
        self.ids = torch.empty(0)  # (B, context_length): the tokens in view, and room for more
        self.length = 0  # tokens in view

    @property
    def seen(self) -> Tensor:
        """The tokens that the next prediction depends on, (B, length)."""
        return self.ids.narrow(1, 0, self.length)

    def prefill(self, ids: Tensor) -> Tensor:
        """Starts anew with ids (B, T), T from 1 to context_length -> logits (B, vocab_size)."""
        if self.ids.size(0) != ids.size(0):
            self.ids = ids.new_empty(ids.size(0), self.context_length)
        self.length = ids.size(1)
        self.ids[:, : self.length] = ids
        x, rope = self.network.embed(self.seen)  # (B, T, C)
        for layer in self.layers:
            x = layer.prefill(x, rope)
        return self.network.logits(x[:, -1])

    def step(self, ids: Tensor) -> Tensor:
        """One more token a sequence, ids (B,) -> logits (B, vocab_size)."""
        position = self.length
        if position == self.context_length:
            kept = self.ids[:, dropped_when_full(self.context_length) :]
            return self.prefill(torch.cat([kept, ids[:, None]], dim=1))
        self.ids.select(1, position).copy_(ids)
        self.length += 1
        x, rope = self.network.embed(self.seen, position)  # (B, 1, C)
        x = x.select(1, 0)  # (B, C)
        for layer in self.layers:
            x = layer.step(x, rope, position)
        return self.network.logits(x)

    def expand(self, samples: int) -> None:
        """One sequence becomes `samples` equal ones, which may then differ."""
        self.ids = self.ids.expand(samples, -1).contiguous()
        for layer in self.layers:
            layer.expand(samples)
