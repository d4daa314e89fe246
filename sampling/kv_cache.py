"""KV caches: keys and values of earlier tokens, kept so that a new token costs one token's work.

    KVCache, BatchedKVCache    of a fixed capacity and written in place, a slot a token; with the attention of one
                               query, for the fast step of sampling/decoder.py
    DynamicCache               of any length, grown by concatenation; for GPT.forward

Letters as in model/attention.py; S slots are in use, and R = H / G query heads share a key head.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32  # slots whose keys lie transposed side by side


class DynamicCache:
    """Keys and values of all tokens so far in every layer: the `cache` of GPT.forward."""

    def __init__(self, num_layers: int):
        self.layers = [DynamicLayerCache() for _ in range(num_layers)]
        self.length = 0  # tokens in it
        self.prev_ids: Tensor | None = None  # the last of them, (B,)

    def advance(self, ids: Tensor) -> None:
        """Counts tokens (B, T) whose keys and values all layers have taken."""
        self.length += ids.size(1)
        self.prev_ids = ids[:, -1]

    def expand(self, samples: int) -> None:
        """One sequence becomes `samples` equal ones."""
        self.prev_ids = self.prev_ids.expand(samples)
        for layer in self.layers:
            layer.keys, layer.values = (x.expand(samples, -1, -1, -1) for x in (layer.keys, layer.values))


class DynamicLayerCache:
    """Keys and values of all tokens so far in one layer, (B, G, S, D) each."""

    def __init__(self):
        self.keys = self.values = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds those of T more tokens, (B, G, T, D); returns all, (B, G, S, D)."""
        if self.keys is not None:
            k, v = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        self.keys, self.values = k, v
        return k, v


def make_kv_cache(x: Tensor, H: int, G: int, capacity: int) -> "KVCache":
    """The best cache for tokens like x, (B, ..., D), with H query heads and G key heads, that keeps `capacity`."""
    if x.size(0) == 1:
        return (QKVCache if H == G else KVCache)(x, H, G, capacity)
    many = x.device.type == "cpu" and x.dtype == torch.float32
    return (BatchedKVCache if many else KVCache)(x, H, G, capacity)


class KVCache:
    """For PyTorch's fused attention. The arguments are those of `make_kv_cache`."""

    def __init__(self, x: Tensor, H: int, G: int, capacity: int):
        self.H, self.G, self.capacity = H, G, capacity
        self.fitting = (x.size(0), x.dtype, x.device)
        self._allocate(x, x.size(0), x.size(-1))

    def _allocate(self, x: Tensor, B: int, D: int) -> None:
        kept = x.new_empty(B, 2 * self.G, self.capacity, D)  # [G keys | G values]
        self.keys, self.values = kept.split(self.G, 1)  # (B, G, capacity, D) each
        self.in_slot = kept.unbind(2)  # for each slot a view (B, 2G, D)

    def fits(self, x: Tensor) -> bool:
        """Whether tokens like these, (B, ..., D), can be kept here."""
        return self.fitting == (x.size(0), x.dtype, x.device)

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Keeps the last of T tokens, (B, G, T, D): token t in slot t % capacity."""
        T = k.size(2)
        if self.capacity < T:
            k, v = (x[:, :, -self.capacity :].roll(T, dims=2) for x in (k, v))
        self._put(k, v)

    def _put(self, k: Tensor, v: Tensor) -> None:
        """Into the first slots."""
        self.keys[:, :, : k.size(2)], self.values[:, :, : k.size(2)] = k, v

    def step(self, heads: Tensor, slot: int, filled: int) -> Tensor:
        """Keeps one more token, and its queries gather from all that are kept.

        Args:
            heads: (B, H + 2G, D), [queries | keys | values].
            filled: S, this token among them.

        Returns:
            (B, G, R, D), the same as (B, H, D).
        """
        H, G = self.H, self.G
        self.in_slot[slot].copy_(heads.narrow(1, H, 2 * G))
        # Query heads that share a key head can pass for its queries: there is no mask, all that is kept may be seen.
        return self._look(heads.narrow(1, 0, H).view(-1, G, H // G, heads.size(-1)), filled)

    def _look(self, q: Tensor, filled: int) -> Tensor:
        keys, values = self.keys.narrow(2, 0, filled), self.values.narrow(2, 0, filled)  # (B, G, S, D)
        return F.scaled_dot_product_attention(q, keys, values)


class QKVCache(KVCache):
    """Keeps queries as well, which nobody needs later, and takes half as much memory again.

    But so all that `in_proj` makes of a token is put away by one operator, and operators are what a small model's step
    is made of.
    """

    def _allocate(self, x: Tensor, B: int, D: int) -> None:
        kept = x.new_empty(B, 3 * self.G, self.capacity, D)  # [H queries | H keys | H values]
        queries, self.keys, self.values = kept.split(self.G, 1)
        self.in_slot = kept.unbind(2)  # for each slot a view (B, 3H, D)
        self.query_in_slot = queries.unsqueeze(3).unbind(2)  # (B, H, 1, D)

    def step(self, heads: Tensor, slot: int, filled: int) -> Tensor:
        """As above -> (B, H, 1, D)."""
        self.in_slot[slot].copy_(heads)
        return self._look(self.query_in_slot[slot], filled)


class BatchedKVCache(KVCache):
    """For many sequences on a CPU, whose keys and values don't fit into the processor's caches.

    One query's attention is two weighted sums of rows: the values' rows, weighted by the scores; and before, if keys
    lie transposed, their D rows weighted by the query. `F.embedding_bag` computes such sums as fast as memory can be
    read, which PyTorch's products and its fused attention miss by half.
    """

    def _allocate(self, x: Tensor, B: int, D: int) -> None:
        self.keys = x.new_empty(B, self.G, -(-self.capacity // BLOCK), D, BLOCK)
        self.values = x.new_empty(B, self.G, self.capacity, D)

    def _put(self, k: Tensor, v: Tensor) -> None:
        blocks = F.pad(k.mT, (0, -k.size(2) % BLOCK)).unflatten(3, (-1, BLOCK))  # (B, G, D, blocks, BLOCK)
        self.keys[:, :, : blocks.size(3)] = blocks.transpose(2, 3)
        self.values[:, :, : v.size(2)] = v

    def step(self, heads: Tensor, slot: int, filled: int) -> Tensor:
        """As above -> (B, H, D)."""
        B, G, blocks, D, _ = self.keys.shape
        H = self.H
        q, k, v = heads.split([H, G, G], 1)  # (B, H or G, D)
        self.keys[:, :, slot // BLOCK, :, slot % BLOCK] = k
        self.values[:, :, slot] = v
        used = -(-filled // BLOCK)
        q = q.mul(D**-0.5).unsqueeze(2).expand(-1, -1, used, -1).reshape(-1, D)  # (B H used, D): once for each block
        key_rows = rows(B, H, G, blocks * D, used * D).view(-1, D)  # (B H used, D)
        scores = weighted_sums(self.keys, key_rows, q)  # (B H used, BLOCK)
        weights = scores.view(B * H, -1).narrow(1, 0, filled).softmax(-1)  # (B H, S)
        return weighted_sums(self.values, rows(B, H, G, self.capacity, filled), weights).view(B, H, D)


def weighted_sums(table: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
    """Of a table's rows (..., D), for each line of row numbers (N, S) and weights (N, S) the weighted sum: (N, D)."""
    return F.embedding_bag(numbers, table.view(-1, table.size(-1)), per_sample_weights=weights, mode="sum")


@lru_cache(maxsize=4)  # the same for all layers of a step
def rows(B: int, H: int, G: int, length: int, used: int) -> Tensor:
    """Numbers of the first `used` of `length` rows that each of G heads has in a table, for H heads: (B H, used)."""
    head = torch.arange(B)[:, None] * G + torch.arange(G).repeat_interleave(H // G)  # (B, H)
    return head.view(-1, 1) * length + torch.arange(used)  # (B H, used)
