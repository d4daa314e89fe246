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
from model.gpt import GPT
from model.linear import inference_copy
from model.windowed_attention import windowed_attention


def dropped_when_full(context_length: int) -> int:
    """Tokens that leave a full context at once."""
    return max(1, context_length // 2)


class LayerCache:
    """Keys and values of one layer.

    Args:
        slots: tokens it holds.
        window: tokens a query can look at, at most `slots`. None: all.
    """

    def __init__(self, slots: int, window: int | None):
        self.slots, self.window = slots, window
        self.keys = self.values = torch.empty(0)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the first T tokens to each other, q (B, H, T, D) and k, v (B, G, T, D) -> (B, H, T, D)."""
        B, G, T, D = k.shape
        if self.keys.shape != (B, G, self.slots, D):
            self.keys, self.values = k.new_empty(B, G, self.slots, D), v.new_empty(B, G, self.slots, D)
        for cached, new in ((self.keys, k), (self.values, v)):
            if self.slots < T:  # the last ones only, token t in slot t % slots
                new = new[:, :, -self.slots :].roll(T, dims=2)
            cached[:, :, :T] = new
        if self.window is None:
            return fused_attention(q, k, v, causal=True)
        return windowed_attention(q, k, v, self.window)

    def step(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        """Attention of one more token, q (B, H, 1, D) and k, v (B, G, 1, D), to all in the cache -> (B, H, 1, D)."""
        slot, filled = position % self.slots, min(position + 1, self.slots)
        self.keys.narrow(2, slot, 1).copy_(k)
        self.values.narrow(2, slot, 1).copy_(v)
        keys, values = self.keys.narrow(2, 0, filled), self.values.narrow(2, 0, filled)  # (B, G, S, D)
        # Without a mask, the query heads that share a key head can pass for its queries.
        grouped = q.view(q.size(0), k.size(1), -1, q.size(3))  # (B, H, 1, D) -> (B, G, H / G, D)
        return F.scaled_dot_product_attention(grouped, keys, values).view(q.shape)

    def expand(self, samples: int) -> None:
        """One sequence becomes `samples` equal ones, each with keys and values of its own."""
        self.keys = self.keys.expand(samples, -1, -1, -1).contiguous()
        self.values = self.values.expand(samples, -1, -1, -1).contiguous()


class Decoder:
    """Logits of the next token, for sequences that grow by a token at a time.

    Use it in torch.inference_mode(), and only as long as the network's weights stay as they are.
    """

    def __init__(self, network: GPT):
        self.network = inference_copy(network)
        config = network.config
        self.context_length = config.context_length
        windows = [config.window_of(layer) for layer in range(config.num_layers)]
        self.layers = [LayerCache(min(window or self.context_length, self.context_length), window)
                       for window in windows]  # fmt: skip
        self.ids = torch.empty(0)  # (B, context_length): the tokens in view, and room for more
        self.length = 0  # tokens in view

    @property
    def seen(self) -> Tensor:
        """The tokens that the next prediction depends on, (B, length)."""
        return self.ids[:, : self.length]

    def prefill(self, ids: Tensor) -> Tensor:
        """Starts anew with ids (B, T), T from 1 to context_length -> logits (B, vocab_size)."""
        if self.ids.size(0) != ids.size(0):
            self.ids = ids.new_empty(ids.size(0), self.context_length)
        self.length = ids.size(1)
        self.ids[:, : self.length] = ids
        return self._forward(0)

    def step(self, ids: Tensor) -> Tensor:
        """One more token a sequence, ids (B,) -> logits (B, vocab_size)."""
        if self.length == self.context_length:
            kept = self.ids[:, dropped_when_full(self.context_length) :]
            return self.prefill(torch.cat([kept, ids[:, None]], dim=1))
        self.ids[:, self.length] = ids
        self.length += 1
        return self._forward(self.length - 1)

    def expand(self, samples: int) -> None:
        """One sequence becomes `samples` equal ones, which may then differ."""
        self.ids = self.ids.expand(samples, -1).contiguous()
        for layer in self.layers:
            layer.expand(samples)

    def _forward(self, start: int) -> Tensor:
        """Sends the tokens in view from `start` on through the network: GPT.forward, with the cache in attention."""
        x, rope = self.network.embed(self.seen, start)  # (B, T, C)
        for block, cache in zip(self.network.blocks, self.layers, strict=True):
            q, k, v = block.attention.project(block.attention_norm(x), None, None, rope)
            heads = cache.step(q, k, v, start) if start else cache.prefill(q, k, v)  # (B, H, T, D)
            x = x + block.attention.out_proj(heads.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, C)
            x = x + block.mlp(block.mlp_norm(x))
        return self.network.logits(x[:, -1:])[:, 0]  # (B, vocab_size)
