"""What is written with a cache is what the network says without one, in every family, also past the context."""

import itertools
import math
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from data.config import TokenizerConfig
from data.tokenizer import build_tokenizer
from model.config import GPTConfig
from model.gpt import GPT
from sampling.config import SamplingConfig
from sampling.decoder import Decoder, context_shift
from sampling.sampler import generate, generate_batch, log_probabilities, probabilities, token_logprobs
from sampling.text import CompletionStream
from system.errors import UserError

LLAMA = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "tied_embeddings": False}
NANOCHAT = LLAMA | {"norm_affine": False, "mlp": "relu2", "qk_norm": True, "embedding_norm": True}
FAMILIES = {
    "gpt2": {},
    "llama": LLAMA,
    "nanochat": NANOCHAT | {"logit_soft_cap": 15.0},
    "tiny": NANOCHAT | {"bigram_table_size": 64},
    "grouped": LLAMA | {"num_kv_heads": 2},
    "one_kv_head": {"num_kv_heads": 1},
    "sliding_window": NANOCHAT | {"sliding_window": 7},
    "wider_window": LLAMA | {"sliding_window": 40},
    "sliding_window_and_full": LLAMA | {"sliding_window": 7, "window_pattern": "SL", "num_kv_heads": 2},
    "window_of_one": {"sliding_window": 1},
    "window_beyond_the_context": {"sliding_window": 1000},
}
GREEDY = SamplingConfig(max_new_tokens=300, temperature=0)


def network(context_length: int = 320, **fields) -> GPT:
    """A small network with weights so large that its predictions depend on all it sees."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocab_size=50, context_length=context_length, num_heads=4, d_model=32, **fields)).eval()
    with torch.no_grad():
        for weight in gpt.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.3)
    return gpt


def in_view(ids: list[int], context_length: int) -> list[int]:
    """What the model sees of a text, by the rule in sampling/decoder.py."""
    while len(ids) > context_length:
        ids = ids[context_shift(context_length) :]
    return ids


@torch.no_grad()
def without_cache(gpt: GPT, prompt: list[int], num_tokens: int) -> list[int]:
    """The likeliest tokens, by a full pass for each."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(gpt(torch.tensor([in_view(ids, gpt.config.context_length)]))[0, -1].argmax()))
    return ids[len(prompt) :]


# The cache


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_and_uncached_greedy_text_are_identical(family):
    gpt = network(**FAMILIES[family])
    for prompt in ([3], [7, 7, 1, 20, 33], list(range(20))):
        written = list(generate(gpt, prompt, GREEDY))
        with torch.no_grad():
            likeliest = gpt(torch.tensor([prompt + written]))[0].argmax(-1)  # all positions at once, as in training
        assert written == likeliest[len(prompt) - 1 : -1].tolist()
        assert len(set(written)) > 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("context_length", [1, 2, 16, 17])
def test_past_the_context_what_is_seen_is_what_the_page_says(family, context_length):
    gpt = network(context_length, **FAMILIES[family])
    prompt = [5, 2, 9][:context_length]
    assert list(generate(gpt, prompt, SamplingConfig(max_new_tokens=80, temperature=0))) == without_cache(
        gpt, prompt, 80
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize(("context_length", "end"), [(16, 40), (70, 150)])
def test_logits_of_a_step_are_those_of_a_full_pass(family, sequences, context_length, end):
    gpt = network(context_length, **FAMILIES[family])
    ids = torch.randint(50, (sequences, end))
    with torch.inference_mode():
        decoder = Decoder(gpt)
        logits = decoder.prefill(ids[:, :5])
        for length in range(5, end):
            seen = torch.stack([torch.tensor(in_view(row[:length].tolist(), context_length)) for row in ids])
            assert_close(logits, gpt(seen)[:, -1], atol=3e-5, rtol=1e-5)
            logits = decoder.step(ids[:, length])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_left_the_context_has_no_influence(family):
    gpt = network(16, **FAMILIES[family])
    ids = torch.randint(50, (1, 60))
    other = ids.clone()
    for length in range(17, 60):
        gone = length - len(in_view(ids[0, :length].tolist(), 16))
        other[:, :gone] = (ids[:, :gone] + 1) % 50  # another text, but for what is in view
        with torch.inference_mode():
            found = []
            for text in (ids, other):
                decoder = Decoder(gpt)
                logits = decoder.prefill(text[:, :1])
                for place in range(1, length):
                    logits = decoder.step(text[:, place])
                found.append(logits)
        assert torch.equal(*found)


def test_cache_keeps_its_place_in_memory():
    gpt = network(16, sliding_window=5, window_pattern="SL")
    with torch.inference_mode():
        decoder = Decoder(gpt)
        decoder.prefill(torch.tensor([[1, 2]]))
        blocks = decoder.backend.blocks
        places = [(block.cache.keys.data_ptr(), block.cache.values.data_ptr()) for block in blocks]
        for _ in range(50):
            decoder.step(torch.tensor([3]))
        assert [block.cache.keys.size(2) for block in blocks] == [5, 16]
        assert places == [
            (block.cache.keys.data_ptr(), block.cache.values.data_ptr()) for block in decoder.backend.blocks
        ]


def test_writing_leaves_the_network_as_it_was():
    gpt = network(16, dropout=0.5).train()
    before = {name: weight.clone() for name, weight in gpt.named_parameters()}
    modules = [type(module) for module in gpt.modules()]
    assert list(generate(gpt, [1], GREEDY)) == list(generate(gpt, [1], GREEDY))  # nothing is dropped
    assert gpt.training and modules == [type(module) for module in gpt.modules()]
    for name, weight in gpt.named_parameters():
        assert torch.equal(weight, before[name]) and weight.requires_grad


def test_compiled_network_writes_the_same():
    gpt = network(16)
    expected = list(generate(gpt, [1], GREEDY))
    gpt.compile(backend="eager")
    assert list(generate(gpt, [1], GREEDY)) == expected


# Several samples


@pytest.mark.parametrize("family", FAMILIES)
def test_nth_sample_is_the_same_however_many_are_drawn_at_once(family):
    gpt, config = network(16, **FAMILIES[family]), SamplingConfig(max_new_tokens=60, temperature=1.0)

    def written(samples: range) -> list[list[int]]:
        return torch.stack([ids for ids, _ in generate_batch(Decoder(gpt), [4, 2], config, samples)], dim=1).tolist()

    many = written(range(9))
    assert len({tuple(sample) for sample in many}) == 9
    assert written(range(3)) == many[:3] and written(range(4, 7)) == many[4:7]
    assert [list(generate(gpt, [4, 2], config, index)) for index in (0, 8)] == [many[0], many[8]]


def test_tokens_are_drawn_with_their_probabilities():
    gpt, draws = network(16), 4000
    config = SamplingConfig(max_new_tokens=1, temperature=1.3, top_k=6)
    ids, _ = next(generate_batch(Decoder(gpt), [4, 2], config, range(draws)))
    expected = probabilities(gpt(torch.tensor([[4, 2]]))[0, -1].detach(), config)
    found = ids.bincount(minlength=50) / draws
    assert (found[expected == 0] == 0).all()
    assert_close(found, expected, atol=4 * math.sqrt(0.25 / draws), rtol=0)  # four standard deviations at most


# Filters, against transformers


FILTERS = itertools.product(
    [0.3, 1.0, 1.7], [1.0, 0.7, 1.5], [None, 0, 1, 5, 50, 80], [None, 0.1, 0.8, 1.0], [None, 0.0, 0.05, 0.5, 1.0]
)


@pytest.mark.parametrize(
    ("temperature", "penalty", "top_k", "top_p", "min_p"), random.Random(0).sample(sorted(FILTERS, key=str), 60)
)
def test_probabilities_are_those_of_transformers(temperature, penalty, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 50, generator=generator).double() * 3
    seen = torch.randint(50, (4, 20), generator=generator)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(seen, logits.clone())
    expected = TemperatureLogitsWarper(temperature)(None, expected)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    config = SamplingConfig(temperature=temperature, repetition_penalty=penalty, **filters)
    assert_close(probabilities(logits, config, seen), expected.softmax(-1))


def test_logits_that_are_no_numbers_spoil_their_own_row_alone():
    logits = torch.tensor([[math.nan] * 9, [2.0, 1.0, 0.0] * 3])
    config = SamplingConfig(temperature=1.0, top_k=8, top_p=0.6)
    assert_close(probabilities(logits, config)[1], probabilities(logits[1:], config)[0])


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-9, 1e30])
def test_no_temperature_breaks_the_probabilities(temperature):
    logits = torch.tensor([3.0, -80.0, 2.5])
    probs = probabilities(logits, SamplingConfig(temperature=temperature))
    assert_close(probs, torch.tensor([1.0, 0, 0]) if temperature < 1 else torch.full((3,), 1 / 3))


def test_penalty_counts_only_what_is_in_view():
    gpt = network(4)
    config = SamplingConfig(max_new_tokens=60, temperature=0, repetition_penalty=1e6)
    ids = [1]
    for token in generate(gpt, [1], config):
        logits = gpt(torch.tensor([in_view(ids, 4)]))[0, -1]
        assert (
            token
            == probabilities(logits, SamplingConfig(repetition_penalty=1e6), torch.tensor(in_view(ids, 4))).argmax()
        )
        ids.append(token)
    assert len(set(ids)) < len(ids)


# Scores


@pytest.mark.parametrize("family", FAMILIES)
def test_text_scores_as_it_was_written(family):
    gpt = network(16, **FAMILIES[family])
    config = SamplingConfig(max_new_tokens=75, temperature=1.0)
    ids, logits = (torch.cat(each) for each in zip(*generate_batch(Decoder(gpt), [4], config, range(1)), strict=True))
    assert_close(token_logprobs(gpt, torch.cat([torch.tensor([4]), ids])), log_probabilities(logits, ids))


@pytest.mark.parametrize("length", [2, 3, 16, 17, 18, 24, 25, 33, 100])
def test_score_is_the_mean_over_what_is_in_view(length):
    gpt, ids = network(16), torch.randint(50, (length,))
    with torch.no_grad():
        expected = [
            gpt(torch.tensor([in_view(ids[:end].tolist(), 16)]))[0, -1].log_softmax(-1)[ids[end]]
            for end in range(1, length)
        ]
    assert_close(token_logprobs(gpt, ids), torch.stack(expected))


def test_long_text_scores_within_a_hundredth_of_a_full_pass_per_token():
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocab_size=8, context_length=16, num_layers=2, num_heads=2, d_model=32))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3)

    def text(length: int) -> torch.Tensor:
        """Mostly the token of six places before, and seldom another: the context helps."""
        ids = torch.randint(8, (length,))
        for place in range(6, length):
            if torch.rand(()) < 0.8:
                ids[place] = ids[place - 6]
        return ids

    for _ in range(300):
        batch = text(16 * 17).view(16, 17)
        loss = F.cross_entropy(gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ids = text(3000)
    ours = -token_logprobs(gpt, ids)[15:].mean()
    windows, targets = ids[:-1].unfold(0, 16, 1), ids[16:]  # each token after the 16 before it
    with torch.no_grad():
        full = F.cross_entropy(gpt(windows)[:, -1], targets)
    assert full < 0.75 * math.log(8)  # it has learned to look back
    assert abs(ours / full - 1) < 0.01


# Stop texts


def stream(text: str, stops: list[str]) -> tuple[list[str], bool]:
    """What comes out of a stream of one token a byte, and whether it stopped."""
    written = CompletionStream(build_tokenizer(TokenizerConfig(kind="byte"), None, Path()), stops)
    pieces = []
    for byte in text.encode():
        pieces.append(written.push(byte))
        if written.stopped:
            return pieces, True
    return [*pieces, written.flush()], written.stopped


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["four"], "one two three"),
        ("aab aaab", ["aaab"], "aab "),
        ("ababac", ["abac"], "ab"),
        ("ends with tw", ["two"], "ends with tw"),
        ("漢字 и ғазал 👑!", ["👑"], "漢字 и ғазал "),
        ("xyz", ["yz", "y"], "x"),
        ("stop", ["stop"], ""),
    ],
)
def test_text_ends_before_a_stop_text_that_spans_tokens(text, stops, expected):
    pieces, stopped = stream(text, stops)
    assert "".join(pieces) == expected and stopped == (expected != text)


def test_text_that_cannot_become_a_stop_text_is_not_held_back():
    pieces, _ = stream("abcd", ["bx"])
    assert pieces == ["a", "", "bc", "d", ""]


@pytest.mark.parametrize("stop", ["[", "[1]", '["a", ""]', '{"a": 1}x', '["a"'])
def test_stop_is_a_text_or_a_list_of_texts(stop):
    if stop.startswith("["):
        with pytest.raises(UserError, match="JSON list of texts"):
            SamplingConfig(stop=stop)
    else:
        assert SamplingConfig(stop=stop).stop_sequences == [stop]
    assert SamplingConfig(stop='["[", "\\n\\n"]').stop_sequences == ["[", "\n\n"]


@pytest.mark.parametrize(
    "fields",
    [{"min_p": -0.1}, {"min_p": 1.1}, {"repetition_penalty": 0}, {"repetition_penalty": 1e300},
     {"repetition_penalty": math.nan}, {"seed": -1}, {"seed": 2**32},
     {"num_samples": 0}, {"max_new_tokens": 0}, {"temperature": math.nan}, {"top_p": 0},
     {"top_k": -1}, {"min_p": math.nan}],
    ids=str,
)  # fmt: skip
def test_what_is_out_of_range_is_refused(fields):
    with pytest.raises(UserError, match=f"^{next(iter(fields))} is "):
        SamplingConfig(**fields)
