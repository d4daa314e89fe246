"""A network that writes: what it computed of earlier tokens is kept, so that a new one costs one token's work.

    prefill    all tokens of a prompt in one pass; their keys and values are kept (sampling/kv_cache.py)
    step       one token a sequence: its key and value are added, and its query looks at all that are kept

A layer with a window keeps those of that many tokens, the newest in the place of the oldest.

A context that is full is halved: its newest half goes through the network once more, as a prompt would, and from
there it fills up again. So the model always sees at least half of its context, and what it sees it sees as in
training: positions start at 0, and no layer remembers anything of a token that has left. A pass over many tokens
takes little of the time that many steps take, so a token costs as much as inside the context, on average.

Letters in shape comments are those of model/attention.py.
"""

import torch
from torch import Tensor

from model.attention import fused_attention
from model.gpt import GPT, Block
from model.kernels.linear import inference_copy
from model.kernels.sliding_window import windowed_attention
from sampling.kv_cache import place_for


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
        self.attention = attention = block.attention
        self.window, self.slots, self.kept = block.window, slots, None
        self.H, self.G, self.D = attention.num_heads, attention.num_kv_heads, attention.head_dim
        # Plain functions: to look a layer up in its module, and to call a module, takes longer.
        self.attention_norm, self.in_proj, self.out_proj = block.attention_norm, attention.in_proj, attention.out_proj
        self.mlp_norm, self.mlp = block.mlp_norm, block.mlp.forward

    def prefill(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """The block for the first T tokens, (B, T, C) -> (B, T, C): Block.forward, and it keeps keys and values."""
        q, k, v = self.attention.project(self.attention_norm(x), None, None, rope)  # (B, H or G, T, D)
        self.make_room(k)
        self.kept.fill(k, v)
        if self.window is None:
            heads = fused_attention(q, k, v, causal=True)  # (B, H, T, D)
        else:
            heads = windowed_attention(q, k, v, self.window)
        x = x + self.out_proj(heads.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, C)
        return x + self.mlp(self.mlp_norm(x))

    def step(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, position: int) -> Tensor:
        """The block for one more token a sequence, (B, C) -> (B, C), or for a single sequence (C,) -> (C,).

        The same as `prefill` on a text longer by that token, without a dimension for T.
        """
        H, G = self.H, self.G
        heads = self.in_proj(self.attention_norm(x)).view(-1, H + 2 * G, self.D)  # (B, H + 2G, D)
        if position == 0:
            self.make_room(heads)
        if rope is not None or self.attention.qk_norm_eps is not None:
            qk = heads.narrow(1, 0, H + G)  # (B, H + G, D)
            qk.copy_(self.attention.norm_and_rotate(qk, rope))
        gathered = self.kept.step(heads, position % self.slots, min(position + 1, self.slots))
        x = self.out_proj(gathered.reshape_as(x)).add_(x)  # (B, C) or (C,)
        return self.mlp(self.mlp_norm(x)).add_(x)

    def expand(self, samples: int) -> None:
        """One sequence becomes `samples` equal ones, each with keys and values of its own."""
        k, v = (x.expand(samples, -1, -1, -1) for x in (self.kept.keys, self.kept.values))  # (B, G, slots, D)
        self.make_room(k)
        self.kept.fill(k, v)

    def make_room(self, x: Tensor) -> None:
        """Sees to a place for keys and values of tokens like these, (B, ..., D)."""
        if self.kept is None or not self.kept.fits(x):
            self.kept = place_for(x, self.H, self.G, self.slots)


class Decoder:
    """Logits of the next token, for sequences that grow by a token at a time.

    Use it in torch.inference_mode(), not under autocast, and only as long as the network's weights stay as they are.
    """

    def __init__(self, network: GPT):
        config = network.config
        self.vocab_size, self.context_length = config.vocab_size, config.context_length
        self.device = next(network.parameters()).device
        self.network = inference_copy(network)
        self.layers = [Layer(block, min(block.window or self.context_length, self.context_length))
                       for block in self.network.blocks]  # fmt: skip
        self.hold(torch.empty(0, self.context_length))
        self.length = 0  # tokens in view

    def hold(self, ids: Tensor) -> None:
        """Takes this as the place of the tokens in view and those to come, (B, context_length)."""
        self.ids, self.at_place = ids, ids.unbind(1)  # for each place a view (B,)
        self.before_first = torch.full_like(self.at_place[0], -1)  # no token, (B,)

    @property
    def seen(self) -> Tensor:
        """The tokens that the next prediction depends on, (B, length)."""
        return self.ids.narrow(1, 0, self.length)

    def prefill(self, ids: Tensor) -> Tensor:
        """Starts anew with ids (B, T), T from 1 to context_length -> logits (B, vocab_size)."""
        if self.ids.size(0) != ids.size(0):
            self.hold(ids.new_empty(ids.size(0), self.context_length))
        if ids.size(1) == 1:  # a step into an empty context: the same, in fewer operators
            self.length = 0
            return self.step(ids.select(1, 0))
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
        self.at_place[position].copy_(ids)
        self.length += 1
        before = self.at_place[position - 1] if position else self.before_first  # (B,)
        x, rope = self.network.embed(ids, position, before)  # (B, C)
        if x.size(0) == 1:
            x = x.view(-1)  # (C,): a matrix times a vector takes less than times a matrix of one column
        for layer in self.layers:
            x = layer.step(x, rope, position)
        return self.network.logits(x).view(-1, self.vocab_size)  # (B, vocab_size)

    def expand(self, samples: int) -> None:
        """One sequence becomes `samples` equal ones, which may then differ."""
        if samples > 1:
            self.hold(self.ids.expand(samples, -1).contiguous())
            for layer in self.layers:
                layer.expand(samples)
