"""Head scores: six numbers per attention head, computed from its attention maps.

Maps are (L, B, H, T, T), of L layers, B texts and H heads. Rows sum to 1 and are 0 above the diagonal. Scores are
(L, H), averaged over texts and queries. The first query is left out, because it can only attend to itself.
"""

import torch
from torch import Tensor

REPEATED_TOKENS = 32  # maximum length of the sequence that is repeated
REPEATED_SEQUENCES = 4


def entropy_bits(maps: Tensor) -> Tensor:
    """Entropy of attention: 0 bits means attending to one token, n bits to 2^n tokens equally.

    Vig and Belinkov 2019, arXiv:1906.04284; Clark et al. 2019, arXiv:1906.04341.
    """
    return _mean_over_queries(-torch.special.xlogy(maps, maps).sum(-1)) / torch.log(torch.tensor(2.0))


def mean_distance(maps: Tensor) -> Tensor:
    """Mean attention distance in tokens: Vig and Belinkov 2019, arXiv:1906.04284."""
    place = torch.arange(maps.size(-1), device=maps.device)
    return _mean_over_queries((maps * (place[:, None] - place)).sum(-1))  # above the diagonal the weights are 0


def previous_token_share(maps: Tensor) -> Tensor:
    """Share of attention on the previous token (positional heads): Voita et al. 2019, arXiv:1905.09418."""
    return maps.diagonal(-1, -2, -1).mean((1, -1))


def first_token_share(maps: Tensor) -> Tensor:
    """Share of attention on the first token (attention sinks): Xiao et al. 2023, arXiv:2309.17453."""
    return _mean_over_queries(maps[..., 0])


def induction_share(maps: Tensor) -> Tensor:
    """Prefix matching score (induction heads): Olsson et al. 2022, arXiv:2209.11895.

    In a repeated sequence "A B ... A", the share of attention from the second A to B.

    Args:
        maps: of a sequence of n tokens and its repetition, (L, B, H, 2n, 2n).
    """
    n = maps.size(-1) // 2
    return maps.diagonal(1 - n, -2, -1)[..., 1:].mean((1, -1))  # query t attends to key t - n + 1, for t >= n


def duplicate_token_share(maps: Tensor) -> Tensor:
    """Share of attention on the same token (duplicate token heads): Wang et al. 2022, arXiv:2211.00593.

    In a repeated sequence "A B ... A", the share of attention from the second A to the first.

    Args:
        maps: of a sequence of n distinct tokens and its repetition, (L, B, H, 2n, 2n).
    """
    return maps.diagonal(-(maps.size(-1) // 2), -2, -1).mean((1, -1))  # query t attends to key t - n, for t >= n


def head_scores(maps: Tensor, repeated_maps: Tensor) -> dict[str, Tensor]:
    """All six scores by name, (L, H) each.

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
        "duplicate": duplicate_token_share(repeated_maps),
    }


def repeated_sequences(passage: Tensor, context_length: int) -> Tensor:
    """Random sequences of n distinct tokens, each repeated once: ids (REPEATED_SEQUENCES, 2n), the same in every call.

    The tokens occur in the passage (T,), because a token that was never trained on would not show induction.
    """
    tokens = passage.unique()
    n = min(REPEATED_TOKENS, context_length // 2, len(tokens))
    draws = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(tokens), generator=draws)[:n] for _ in range(REPEATED_SEQUENCES)]
    return tokens[torch.stack(orders)].repeat(1, 2)


def _mean_over_queries(values: Tensor) -> Tensor:
    """(L, B, H, T) -> (L, H): mean over the texts and all queries except the first."""
    return values[..., 1:].mean((1, -1))
