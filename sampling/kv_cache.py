"""KV caches: the keys and values of earlier tokens.

    DynamicCache               of any length, extended by concatenation; for GPT.forward
    KVCache, BatchedKVCache    of a fixed capacity, written in place, one slot per token; they also compute the
                               attention of a single query, for the fast step of sampling/decoder.py

Letters as in model/attention.py. S is the number of slots in use, and R = H / G query heads share a key head.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32  # slots whose keys are stored transposed, as one block


class DynamicCache:
    """Keys and values of all tokens so far in every layer: the `cache` of GPT.forward."""

    def __init__(self, num_layers: int):
        self.layers = [DynamicLayerCache() for _ in range(num_layers)]
        self.length = 0  # number of tokens
        self.prev_ids: Tensor | None = None  # the last token, (B,)

    def advance(self, ids: Tensor) -> None:
        """Counts tokens (B, T), after all layers have cached their keys and values."""
        self.length += ids.size(1)
        self.prev_ids = ids[:, -1]

    def expand(self, samples: int) -> None:
        """Repeats the only sequence `samples` times."""
        self.prev_ids = self.prev_ids.expand(samples)
        for layer in self.layers:
            layer.keys, layer.values = (x.expand(samples, -1, -1, -1) for x in (layer.keys, layer.values))


class DynamicLayerCache:
    """Keys and values of all tokens so far in one layer, (B, G, S, D) each."""

    def __init__(self):
        self.keys = self.values = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values of T tokens, (B, G, T, D); returns those of all tokens, (B, G, S, D)."""
        if self.keys is not None:
            k, v = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        self.keys, self.values = k, v
        return k, v


def make_kv_cache(x: Tensor, H: int, G: int, capacity: int) -> "KVCache":
    """Creates the fastest cache for `capacity` tokens, with the batch size, dtype and device of x (B, ..., D)."""
    if x.size(0) == 1:
        return (QKVCache if H == G else KVCache)(x, H, G, capacity)
    many = x.device.type == "cpu" and x.dtype == torch.float32
    return (BatchedKVCache if many else KVCache)(x, H, G, capacity)


class KVCache:
    """KV cache for F.scaled_dot_product_attention. Arguments as for `make_kv_cache`."""

    def __init__(self, x: Tensor, H: int, G: int, capacity: int):
        self.H, self.G, self.capacity = H, G, capacity
        self.signature = (x.size(0), x.dtype, x.device)
        self._allocate(x, x.size(0), x.size(-1))

    def _allocate(self, x: Tensor, B: int, D: int) -> None:
        kept = x.new_empty(B, 2 * self.G, self.capacity, D)  # [G keys | G values]
        self.keys, self.values = kept.split(self.G, 1)  # (B, G, capacity, D) each
        self.slots = kept.unbind(2)  # a view (B, 2G, D) for each slot

    def matches(self, x: Tensor) -> bool:
        """Whether x (B, ..., D) has the batch size, dtype and device of this cache."""
        return self.signature == (x.size(0), x.dtype, x.device)

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Stores the last of T tokens, (B, G, T, D), with token t in slot t % capacity."""
        T = k.size(2)
        if self.capacity < T:
            k, v = (x[:, :, -self.capacity :].roll(T, dims=2) for x in (k, v))
        self._write(k, v)

    def _write(self, k: Tensor, v: Tensor) -> None:
        """Writes keys and values to the first slots."""
        self.keys[:, :, : k.size(2)], self.values[:, :, : k.size(2)] = k, v

    def step(self, heads: Tensor, slot: int, length: int) -> Tensor:
        """Caches one more token and returns the attention output of its queries.

        Args:
            heads: (B, H + 2G, D), [queries | keys | values].
            length: S, including this token.

        Returns:
            (B, G, R, D), the same as (B, H, D).
        """
        H, G = self.H, self.G
        self.slots[slot].copy_(heads.narrow(1, H, 2 * G))
        # Query heads that share a key head are passed as several queries of it, which works because there is no mask.
        return self._attend(heads.narrow(1, 0, H).view(-1, G, H // G, heads.size(-1)), length)

    def _attend(self, q: Tensor, length: int) -> Tensor:
        keys, values = self.keys.narrow(2, 0, length), self.values.narrow(2, 0, length)  # (B, G, S, D)
        return F.scaled_dot_product_attention(q, keys, values)


class QKVCache(KVCache):
    """Also stores the queries, so that one operator copies the whole output of `in_proj`.

    They are never needed again, and take half as much memory again. But the number of operators determines the time of
    a step of a small model.
    """

    def _allocate(self, x: Tensor, B: int, D: int) -> None:
        kept = x.new_empty(B, 3 * self.G, self.capacity, D)  # [H queries | H keys | H values]
        queries, self.keys, self.values = kept.split(self.G, 1)
        self.slots = kept.unbind(2)  # a view (B, 3H, D) for each slot
        self.query_slots = queries.unsqueeze(3).unbind(2)  # (B, H, 1, D)

    def step(self, heads: Tensor, slot: int, length: int) -> Tensor:
        """As above -> (B, H, 1, D)."""
        self.slots[slot].copy_(heads)
        return self._attend(self.query_slots[slot], length)


class BatchedKVCache(KVCache):
    """KV cache for many sequences on a CPU, which do not fit into the processor's caches.

    The attention of a query is two weighted sums of rows: of the D rows of the transposed keys, weighted by the query,
    and of the rows of the values, weighted by the attention weights. F.embedding_bag computes them at the speed of
    reading memory; matrix products and SDPA take twice as long.
    """

    def _allocate(self, x: Tensor, B: int, D: int) -> None:
        self.keys = x.new_empty(B, self.G, -(-self.capacity // BLOCK), D, BLOCK)
        self.values = x.new_empty(B, self.G, self.capacity, D)

    def _write(self, k: Tensor, v: Tensor) -> None:
        blocks = F.pad(k.mT, (0, -k.size(2) % BLOCK)).unflatten(3, (-1, BLOCK))  # (B, G, D, blocks, BLOCK)
        self.keys[:, :, : blocks.size(3)] = blocks.transpose(2, 3)
        self.values[:, :, : v.size(2)] = v

    def step(self, heads: Tensor, slot: int, length: int) -> Tensor:
        """As above -> (B, H, D)."""
        B, G, blocks, D, _ = self.keys.shape
        H = self.H
        q, k, v = heads.split([H, G, G], 1)  # (B, H or G, D)
        self.keys[:, :, slot // BLOCK, :, slot % BLOCK] = k
        self.values[:, :, slot] = v
        used = -(-length // BLOCK)
        q = (
            q.mul(D**-0.5).unsqueeze(2).expand(-1, -1, used, -1).reshape(-1, D)
        )  # (B H used, D): repeated for each block
        key_rows = row_indices(B, H, G, blocks * D, used * D).view(-1, D)  # (B H used, D)
        scores = weighted_row_sums(self.keys, key_rows, q)  # (B H used, BLOCK)
        weights = scores.view(B * H, -1).narrow(1, 0, length).softmax(-1)  # (B H, S)
        return weighted_row_sums(self.values, row_indices(B, H, G, self.capacity, length), weights).view(B, H, D)


def weighted_row_sums(table: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
    """Returns weighted sums (N, D) of rows of a table (..., D), with row numbers (N, S) and weights (N, S)."""
    return F.embedding_bag(numbers, table.view(-1, table.size(-1)), per_sample_weights=weights, mode="sum")


@lru_cache(maxsize=4)  # equal for all layers of a step
def row_indices(B: int, H: int, G: int, num_rows: int, used: int) -> Tensor:
    """Returns the numbers of the first `used` of `num_rows` rows that each of G heads has in a table: (B H, used)."""
    head = torch.arange(B)[:, None] * G + torch.arange(G).repeat_interleave(H // G)  # (B, H)
    return head.view(-1, 1) * num_rows + torch.arange(used)  # (B H, used)
