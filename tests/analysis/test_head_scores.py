"""Head scores are right on maps whose scores one knows, and are written at every validation."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from analysis.head_detector import (
    duplicate_token_share,
    entropy_bits,
    first_token_share,
    head_scores,
    induction_share,
    mean_distance,
    previous_token_share,
    repeated_sequences,
)
from model.config import GPTConfig
from model.gpt import GPT

T = 12


def looks_at(keys: list[int]) -> Tensor:
    """A head that gives each query's key all its weight."""
    return torch.eye(len(keys))[torch.tensor(keys)][None, None, None]


UNIFORM = torch.ones(T, T).tril()[None, None, None] / torch.arange(1, T + 1)[:, None]
PREVIOUS = looks_at([0, *range(T - 1)])
FIRST = looks_at([0] * T)
ITSELF = looks_at(list(range(T)))
DUPLICATE = looks_at([0] * (T // 2) + [t - T // 2 for t in range(T // 2, T)])
INDUCTION = looks_at([0] * (T // 2) + [t - T // 2 + 1 for t in range(T // 2, T)])


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


CHOICES = range(1, T)  # queries that see more than themselves


@pytest.mark.parametrize(
    ("score", "maps", "expected"),
    [
        (entropy_bits, UNIFORM, mean(math.log2(t + 1) for t in CHOICES)),
        (entropy_bits, PREVIOUS, 0),
        (entropy_bits, FIRST, 0),
        (mean_distance, UNIFORM, mean(t / 2 for t in CHOICES)),
        (mean_distance, PREVIOUS, 1),
        (mean_distance, FIRST, mean(CHOICES)),
        (mean_distance, ITSELF, 0),
        (previous_token_share, UNIFORM, mean(1 / (t + 1) for t in CHOICES)),
        (previous_token_share, PREVIOUS, 1),
        (previous_token_share, ITSELF, 0),
        (first_token_share, UNIFORM, mean(1 / (t + 1) for t in CHOICES)),
        (first_token_share, FIRST, 1),
        (first_token_share, ITSELF, 0),
        (induction_share, INDUCTION, 1),
        (induction_share, UNIFORM, mean(1 / (t + 1) for t in range(T // 2, T))),
        (induction_share, PREVIOUS, 0),
        (induction_share, ITSELF, 0),
        (induction_share, DUPLICATE, 0),
        (duplicate_token_share, DUPLICATE, 1),
        (duplicate_token_share, UNIFORM, mean(1 / (t + 1) for t in range(T // 2, T))),
        (duplicate_token_share, INDUCTION, 0),
        (duplicate_token_share, ITSELF, 0),
    ],
)
def test_scores_of_hand_made_heads(score, maps, expected):
    assert_close(score(maps), torch.tensor([[float(expected)]]))


def test_entropy_is_that_of_the_formula():
    weights = torch.tensor([0.5, 0.25, 0.125, 0.125])  # 1.75 bits, from the powers of two
    maps = torch.zeros(1, 1, 1, 4, 4)
    maps[..., 0, 0] = maps[..., 1, 0] = maps[..., 2, 1] = 1
    maps[..., 3, :] = weights
    assert_close(entropy_bits(maps), torch.tensor([[1.75 / 3]]))


def test_scores_are_averages_over_texts_and_keep_layers_and_heads_apart():
    maps = torch.stack([torch.cat([PREVIOUS[0], FIRST[0]], 1), torch.cat([FIRST[0], FIRST[0]], 1)])  # (2, 1, 2, T, T)
    assert_close(first_token_share(maps)[:, 1], torch.ones(2))
    assert previous_token_share(maps)[0, 0] == 1 and previous_token_share(maps)[1, 0] < 0.2
    both = torch.cat([PREVIOUS, ITSELF], 1)  # two texts
    assert_close(previous_token_share(both), torch.tensor([[0.5]]))


@pytest.mark.parametrize("context_length", [4, 5, 64, 200])
def test_scores_of_a_network_are_finite_and_shares(context_length):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=50, context_length=context_length, num_layers=3, num_heads=2, d_model=16)
    network = GPT(config)
    ids = repeated_sequences(torch.tensor([7, 30, 30, 31, 40, 49]), context_length)
    assert set(ids.flatten().tolist()) <= {7, 30, 31, 40, 49}
    half = ids.size(1) // 2
    assert all(len(set(row.tolist())) == half for row in ids)
    assert ids.size(1) <= context_length and torch.equal(ids[:, :half], ids[:, half:])
    assert torch.equal(ids, repeated_sequences(torch.tensor([49, 40, 31, 30, 7]), context_length))
    maps = torch.stack(network.attention_maps(ids))
    for name, score in head_scores(maps, maps).items():
        assert score.shape == (3, 2) and score.isfinite().all(), name
        assert (score >= 0).all() and (name in ("entropy", "distance") or (score <= 1).all()), name


def test_every_validation_writes_one_picture_and_the_strongest_head_of_each_score(tiny_run, events):
    written = events(tiny_run.path)
    scalars = [tag for tag in written.Tags()["scalars"] if tag.startswith("attention/")]
    names = ("distance_max", "duplicate_max", "entropy_min", "first_max", "induction_max", "previous_max")
    assert sorted(scalars) == [f"attention/{name}" for name in names]
    steps = [event.step for event in written.Scalars("Loss/validation")]
    for tag in scalars:
        assert [event.step for event in written.Scalars(tag)] == steps
    for tag in ("attention/heads", "attention/heads_ablated", "attention/maps"):
        assert [event.step for event in written.Images(tag)] == steps
