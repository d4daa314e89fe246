"""Where the keys and values of earlier tokens are kept, and how the newest token looks at them.

Both places have a fixed shape and are written in place, a slot a token. Letters as in model/attention.py; R = H / G
query heads share a key head.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32  # slots whose keys lie transposed side by side


def place_for(x: Tensor, H: int, G: int, slots: int) -> "Kept":
    """The faster place for keys and values of tokens like x, (B, ..., D), with H query heads."""
    many = x.size(0) > 1 and x.device.type == "cpu" and x.dtype == torch.float32
    return (KeptForMany if many else Kept)(x, H, G, slots)


class Kept:
    """For PyTorch's fused attention.

    Queries are kept as well, which nobody needs later. But so all that `in_proj` makes of a token is put away by one
    operator, and operators are what a small model's step is made of.

    Args:
        x: like what will be kept, (B, ..., D).
        H, G: query heads and key heads.
        slots: tokens to be kept.
    """

    def __init__(self, x: Tensor, H: int, G: int, slots: int):
        B, D = x.size(0), x.size(-1)
        self.slots, self.like = slots, (B, x.dtype, x.device)
        kept = x.new_empty(B, H + 2 * G, slots, D)  # [H queries | G keys | G values]
        queries, self.keys, self.values = kept.split([H, G, G], 1)
        self.in_slot = kept.unbind(2)  # for each slot a view (B, H + 2G, D)
        # Query heads that share a key head can pass for its queries: there is no mask, all that is kept may be seen.
        self.query_in_slot = queries.unflatten(1, (G, H // G)).unbind(3)  # (B, G, R, D)

    def fits(self, x: Tensor) -> bool:
        """Whether tokens like these, (B, ..., D), can be kept here."""
        return self.like == (x.size(0), x.dtype, x.device)

    def fill(self, k: Tensor, v: Tensor) -> None:
        """Keeps the last of T tokens, (B, G, T, D): token t in slot t % slots."""
        T = k.size(2)
        if self.slots < T:
            k, v = (x[:, :, -self.slots :].roll(T, dims=2) for x in (k, v))
        self._put(k, v)

    def _put(self, k: Tensor, v: Tensor) -> None:
        """Into the first slots."""
        self.keys[:, :, : k.size(2)], self.values[:, :, : k.size(2)] = k, v

    def step(self, heads: Tensor, slot: int, filled: int) -> Tensor:
        """Keeps one more token, and its queries gather from all that are kept.

        Args:
            heads: (B, H + 2G, D), [queries | keys | values].
            filled: slots in use, this one among them.

        Returns:
            (B, G, R, D), the same as (B, H, D).
        """
        self.in_slot[slot].copy_(heads)
        keys, values = self.keys.narrow(2, 0, filled), self.values.narrow(2, 0, filled)
        return F.scaled_dot_product_attention(self.query_in_slot[slot], keys, values)


class KeptForMany(Kept):
    """For many sequences on a CPU, whose keys and values don't fit into the processor's caches.

    One query's attention is two weighted sums of rows: the values' rows, weighted by the scores; and before, if keys
    lie transposed, their D rows weighted by the query. `F.embedding_bag` computes such sums as fast as memory can be
    read, which PyTorch's products and its fused attention miss by half.
    """

    def __init__(self, x: Tensor, H: int, G: int, slots: int):
        B, D = x.size(0), x.size(-1)
        self.num_heads, self.slots, self.like = H, slots, (B, x.dtype, x.device)
        self.keys = x.new_empty(B, G, -(-slots // BLOCK), D, BLOCK)
        self.values = x.new_empty(B, G, slots, D)

    def _put(self, k: Tensor, v: Tensor) -> None:
        blocks = F.pad(k.mT, (0, -k.size(2) % BLOCK)).unflatten(3, (-1, BLOCK))  # (B, G, D, blocks, BLOCK)
        self.keys[:, :, : blocks.size(3)] = blocks.transpose(2, 3)
        self.values[:, :, : v.size(2)] = v

    def step(self, heads: Tensor, slot: int, filled: int) -> Tensor:
        """As above -> (B, H, D)."""
        B, G, blocks, D, _ = self.keys.shape
        H = self.num_heads
        q, k, v = heads.split([H, G, G], 1)  # (B, H or G, D)
        self.keys[:, :, slot // BLOCK, :, slot % BLOCK] = k
        self.values[:, :, slot] = v
        used = -(-filled // BLOCK)
        q = q.mul(D**-0.5).unsqueeze(2).expand(-1, -1, used, -1).reshape(-1, D)  # (B H used, D): once for each block
        scores = weighted_sums(self.keys, rows(B, H, G, blocks * D, used * D).view(-1, D), q)  # (B H used, BLOCK)
        weights = scores.view(B * H, -1).narrow(1, 0, filled).softmax(-1)  # (B H, S)
        return weighted_sums(self.values, rows(B, H, G, self.slots, filled), weights).view(B, H, D)


def weighted_sums(table: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """For each line of row numbers (N, S) and weights (N, S) the weighted sum of a table's rows (..., D) -> (N, D)."""
    return F.embedding_bag(rows, table.view(-1, table.size(-1)), per_sample_weights=weights, mode="sum")


@lru_cache(maxsize=4)  # the same for all layers of a step
def rows(B: int, H: int, G: int, length: int, used: int) -> Tensor:
    """Numbers of the first `used` of `length` rows that each of G heads has in a table, for H heads: (B H, used)."""
    head = torch.arange(B)[:, None] * G + torch.arange(G).repeat_interleave(H // G)  # (B, H)
    return head.view(-1, 1) * length + torch.arange(used)
