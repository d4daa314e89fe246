"""What kind of head is it? Five numbers a head, from its attention maps alone.

Maps are (L, B, H, T, T), those of B texts in L layers and H heads, rows summing to 1 and nothing above the
diagonal. Scores are (L, H): averages over the texts, and over the queries that have a choice, which the first
token of a text has not.
"""

import torch
from torch import Tensor

REPEATED_TOKENS = 32  # at most, in the sequence that is repeated
REPEATED_SEQUENCES = 4


def entropy_bits(maps: Tensor) -> Tensor:
    """How widely a head spreads its attention: 0 looks at one token, n bits at 2^n tokens alike.

    Entropy of attention: Vig and Belinkov 2019, arXiv:1906.04284; Clark et al. 2019, arXiv:1906.04341.
    """
    return _mean_over_queries(-torch.special.xlogy(maps, maps).sum(-1)) / torch.log(torch.tensor(2.0))


def mean_distance(maps: Tensor) -> Tensor:
    """How many tokens back a head looks on average: Vig and Belinkov 2019, arXiv:1906.04284."""
    place = torch.arange(maps.size(-1), device=maps.device)
    return _mean_over_queries((maps * (place[:, None] - place)).sum(-1))  # above the diagonal the weights are 0


def previous_token_share(maps: Tensor) -> Tensor:
    """Share of attention on the token before: positional heads, Voita et al. 2019, arXiv:1905.09418."""
    return maps.diagonal(-1, -2, -1).mean((1, -1))


def first_token_share(maps: Tensor) -> Tensor:
    """Share of attention on the first token, an attention sink: Xiao et al. 2023, arXiv:2309.17453."""
    return _mean_over_queries(maps[..., 0])


def induction_share(maps: Tensor) -> Tensor:
    """Share of attention that the second half of a repeated sequence pays to what came next the first time.

    "A B ... A" looks at B: the prefix matching score of Olsson et al. 2022, arXiv:2209.11895.

    Args:
        maps: of a sequence of n tokens and the same n tokens again, (L, B, H, 2n, 2n).
    """
    n = maps.size(-1) // 2
    return maps.diagonal(1 - n, -2, -1)[..., 1:].mean((1, -1))  # query t looks at key t - n + 1, from t = n on


def head_scores(maps: Tensor, repeated_maps: Tensor) -> dict[str, Tensor]:
    """All five by name, (L, H) each.

    Args:
        maps: of some text, (L, B, H, T, T).
        repeated_maps: of `repeated_sequences`, (L, B, H, 2n, 2n).
    """
    return {
        "entropy": entropy_bits(maps),
        "distance": mean_distance(maps),
        "previous": previous_token_share(maps),
        "first": first_token_share(maps),
        "induction": induction_share(repeated_maps),
    }


def repeated_sequences(passage: Tensor, context_length: int) -> Tensor:
    """Different tokens in random order and the same ones again: (REPEATED_SEQUENCES, 2n) ids, the same at every call.

    They are tokens that occur in the passage (T,): one never trained on tells nothing.
    """
    tokens = passage.unique()
    n = min(REPEATED_TOKENS, context_length // 2, len(tokens))
    draws = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(tokens), generator=draws)[:n] for _ in range(REPEATED_SEQUENCES)]
    return tokens[torch.stack(orders)].repeat(1, 2)


def _mean_over_queries(values: Tensor) -> Tensor:
    """(L, B, H, T) -> (L, H): the mean over the texts and over all queries but the first."""
    return values[..., 1:].mean((1, -1))
