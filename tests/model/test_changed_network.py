"""A network that was changed trains and samples as changed: nothing else computes it once more."""

import logging

import pytest
import torch
from torch.testing import assert_close

from model.attention import MultiHeadAttention
from model.gpt import GPT, Block
from sampling import decoder
from sampling.decoder import Decoder, FastDecoder, GeneralDecoder
from sampling.kv_cache import DynamicCache
from tests.sampling.test_generation import FAMILIES, in_view, network


@pytest.fixture(autouse=True)
def unwarned():
    """What was warned of in one test can be warned of in the next."""
    decoder.warn_once.cache_clear()
    yield
    decoder.warn_once.cache_clear()


@torch.inference_mode()
def assert_samples_as_changed(gpt: GPT, prompt_length: int, end: int = 40) -> Decoder:
    """Logits in sampling, also past the context, are those of forward passes over what is in view."""
    context_length = gpt.config.context_length
    ids = torch.randint(50, (1, end))
    written = Decoder(gpt)
    logits = written.prefill(ids[:, :prompt_length])
    for length in range(prompt_length, end):
        seen = torch.tensor([in_view(ids[0, :length].tolist(), context_length)])
        assert_close(logits, gpt.forward(seen)[:, -1], atol=3e-5, rtol=1e-5)
        logits = written.step(ids[:, length])
    return written


def in_parallel(self, x, rope=None, cache=None):
    """Attention and MLP side by side, as in GPT-J."""
    h = self.attention(self.attention_norm(x), causal=True, window=self.window, rope=rope, cache=cache)
    return x + self.dropout(h) + self.dropout(self.mlp(self.mlp_norm(x)))


@pytest.mark.parametrize("prompt_length", [1, 2, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_of_the_block_is_found_in_sampled_logits(monkeypatch, caplog, family, prompt_length):
    gpt = network(16, **FAMILIES[family])
    ids = torch.arange(prompt_length)[None]
    before = gpt(ids)
    monkeypatch.setattr(Block, "forward", in_parallel)
    assert (gpt(ids) - before).abs().max() > 0.01
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            written = assert_samples_as_changed(gpt, prompt_length)
    assert type(written.backend) is GeneralDecoder and written.backend.use_cache
    (warning,) = caplog.messages  # once
    assert "FastDecoder gives other logits than the network; sampling goes through GPT.forward" in warning


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unchanged_network_takes_the_fast_step_and_warns_of_nothing(caplog, family):
    written = assert_samples_as_changed(network(16, **FAMILIES[family]), 3)
    assert type(written.backend) is FastDecoder and caplog.messages == []


def test_an_edit_of_attention_that_one_token_alone_would_not_show_is_found(monkeypatch):
    def cold(q, k, v, mask=None, dropout=0.0, causal=False):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=0.1)

    monkeypatch.setattr("model.attention.sdpa_attention", cold)
    assert type(assert_samples_as_changed(network(16), 1).backend) is GeneralDecoder


def test_an_edit_of_a_window_is_found(monkeypatch):
    plain = MultiHeadAttention.forward

    def narrow(self, *args, window=None, **options):
        return plain(self, *args, window=window and window // 2, **options)

    monkeypatch.setattr(MultiHeadAttention, "forward", narrow)
    written = assert_samples_as_changed(network(64, sliding_window=30), 1, end=80)
    assert type(written.backend) is GeneralDecoder


def test_what_attention_does_on_the_way_is_done_in_sampling(monkeypatch):
    calls, plain = [], MultiHeadAttention.forward

    def count(self, query, *args, **options):
        calls.append(query.shape[1])
        return plain(self, query, *args, **options)

    monkeypatch.setattr(MultiHeadAttention, "forward", count)
    assert_samples_as_changed(network(16), 5)
    assert 5 in calls


def test_a_network_with_other_parts_samples_too(monkeypatch, caplog):
    gpt = network(16)
    for block in gpt.blocks:
        del block.mlp_norm

    def one_norm(self, x, rope=None, cache=None):
        h = self.attention_norm(x)
        return x + self.attention(h, causal=True, rope=rope, cache=cache) + self.mlp(h)

    monkeypatch.setattr(Block, "forward", one_norm)
    assert type(assert_samples_as_changed(gpt, 3).backend) is GeneralDecoder
    assert "FastDecoder does not work for this network (AttributeError" in caplog.text


def test_an_edit_that_forgets_the_cache_still_samples_what_the_network_says(monkeypatch, caplog):
    def forgetful(self, x, rope=None, cache=None):
        x = x + self.attention(self.attention_norm(x), causal=True, rope=rope)
        return x + self.mlp(self.mlp_norm(x)) * 2

    monkeypatch.setattr(Block, "forward", forgetful)
    written = assert_samples_as_changed(network(16), 3)
    assert type(written.backend) is GeneralDecoder and not written.backend.use_cache
    assert len(caplog.messages) == 2 and "over all tokens" in caplog.messages[1]


def test_several_samples_of_a_changed_network_are_those_of_one(monkeypatch):
    monkeypatch.setattr(Block, "forward", in_parallel)
    gpt, ids = network(16), torch.randint(50, (3, 30))
    ids[:, :4] = ids[0, :4]
    with torch.inference_mode():
        written = Decoder(gpt)
        written.prefill(ids[:1, :4])
        written.expand(3)
        for length in range(4, 30):
            logits = written.step(ids[:, length])
            seen = torch.stack([torch.tensor(in_view(row[: length + 1].tolist(), 16)) for row in ids])
            assert_close(logits, gpt.forward(seen)[:, -1], atol=3e-5, rtol=1e-5)


# The cache of GPT.forward


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", [[30], [1] * 30, [7, 1, 12, 10]])
def test_a_text_in_parts_through_a_cache_gives_the_logits_of_the_whole(family, parts):
    gpt, ids = network(32, **FAMILIES[family]), torch.randint(50, (2, 30))
    cache = DynamicCache(len(gpt.blocks))
    with torch.no_grad():
        found = torch.cat([gpt(part, cache) for part in ids.split(parts, dim=1)], dim=1)
        assert_close(found, gpt(ids), atol=3e-5, rtol=1e-5)
    assert cache.length == 30
