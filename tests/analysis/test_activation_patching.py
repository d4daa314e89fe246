"""Activation patching: restoring all that differs gives the clean answer, restoring what is equal changes nothing."""

import pytest
import tiktoken
import torch
from torch.testing import assert_close

from analysis import activation_patching
from analysis.activation_patching import answer_tokens, patching_effects
from system.errors import UserError
from tests.analysis.networks import FAMILIES, VOCAB_SIZE, random_network

CLEAN = torch.randint(VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(1))
CORRUPTED = CLEAN.clone()
CORRUPTED[4] = (CLEAN[4] + 1) % VOCAB_SIZE  # one token differs
ANSWERS = (7, 9)


def difference(network, ids) -> float:
    logits = network(ids[None])[0, -1]
    return (logits[7] - logits[9]).item()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_restoring_what_differs_gives_the_clean_logits_and_restoring_what_is_equal_changes_nothing(family):
    network = random_network(family)
    effects = patching_effects(network, CLEAN, CORRUPTED, ANSWERS)
    assert network.training and effects.stream.shape == (4, 12) and effects.heads.shape == (3, 4)
    network.eval()
    assert effects.clean == pytest.approx(difference(network, CLEAN), abs=1e-4)
    assert effects.corrupted == pytest.approx(difference(network, CORRUPTED), abs=1e-4)
    assert_close(effects.stream[:, :4], torch.zeros(4, 4), atol=1e-4, rtol=0)  # before the difference
    assert_close(effects.stream[-1], torch.eye(12)[-1], atol=1e-4, rtol=0)  # after the last block only the last counts
    if network.bigram_embedding is None:  # with it, the embedding of the next token differs too
        assert_close(effects.stream[0], torch.eye(12)[4], atol=1e-4, rtol=0)
    else:
        assert effects.stream[0, 4:6].abs().min() > 0.01
        assert_close(effects.stream[0, 6:], torch.zeros(6), atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_effects_are_those_of_hooks_that_replace_the_activation(family, monkeypatch):
    monkeypatch.setattr(activation_patching, "MAX_TOKENS", 5 * 12)  # 5 positions at once
    network = random_network(family)
    effects = patching_effects(network, CLEAN, CORRUPTED, ANSWERS)
    network.eval()
    stream, heads = (
        share * (effects.clean - effects.corrupted) + effects.corrupted for share in (effects.stream, effects.heads)
    )
    block, seen = network.blocks[1], {}
    hooks = [
        block.register_forward_pre_hook(lambda module, args: seen.update(x=args[0])),
        block.attention.out_proj.register_forward_pre_hook(lambda module, args: seen.update(y=args[0])),
    ]
    network(CLEAN[None])
    for hook in hooks:
        hook.remove()

    for position in range(12):

        def restore_stream(module, args, position=position):
            x = args[0].clone()
            x[:, position] = seen["x"][:, position]
            return x, *args[1:]

        hook = block.register_forward_pre_hook(restore_stream)
        expected = difference(network, CORRUPTED)
        hook.remove()
        assert stream[1, position] == pytest.approx(expected, abs=1e-4)

    for head in range(4):

        def restore_head(module, args, columns=slice(8 * head, 8 * head + 8)):
            y = args[0].clone()
            y[..., columns] = seen["y"][..., columns]
            return (y,)

        hook = block.attention.out_proj.register_forward_pre_hook(restore_head)
        expected = difference(network, CORRUPTED)
        hook.remove()
        assert heads[1, head] == pytest.approx(expected, abs=1e-4)
    assert effects.heads.abs().max() > 0.01


@pytest.mark.parametrize(
    ("clean", "corrupted", "message"),
    [
        (CLEAN, CORRUPTED[:11], "The clean prompt has 12 tokens and the corrupted one 11, but"),
        (CLEAN.repeat(2), CORRUPTED.repeat(2), "The prompts have 24 tokens, but the model sees 16."),
        (CLEAN, CLEAN, r"The logit difference of the answers is -?\d+\.\d{4} for both prompts"),
    ],
)
def test_prompts_that_cannot_be_compared_are_rejected_in_one_line(clean, corrupted, message):
    with pytest.raises(UserError, match=message) as error:
        patching_effects(random_network("llama"), clean, corrupted, ANSWERS)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def words() -> tiktoken.Encoding:
    """Bytes, and the tokens " M", " Ma" and "ry"."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b" M": 256, b" Ma": 257, b"ry": 258}
    return tiktoken.Encoding("words", pat_str=r"(?s).+", mergeable_ranks=ranks, special_tokens={})


def test_answers_are_two_tokens(words):
    assert answer_tokens(words, " Ma|ry") == (257, 258) and answer_tokens(words, "x| ") == (120, 32)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (" Mary|x", 'The answer \' Mary\' has 2 tokens ("·Ma", "ry"), but must have one.'),
        ("x|é", 'The answer \'é\' has 2 tokens ("\\xc3", "\\xa9"), but must have one.'),
        ("x", "answers is 'x', but must be two different ones"),
        ("x|", "answers is 'x|', but must be"),
        ("x|y|z", "answers is 'x|y|z', but must be"),
        ("x|x", "answers is 'x|x', but must be"),
        ("x|a\nb", 'The answer \'a\\nb\' has 3 tokens ("a", "↵", "b")'),
    ],
)
def test_answers_that_are_not_two_tokens_are_rejected_by_name(words, answers, message):
    with pytest.raises(UserError) as error:
        answer_tokens(words, answers)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
