"""The examples of docs/extending.md do what the page says: training, maps and sampling follow the edit."""

import re

import pytest
import torch
from torch.testing import assert_close

import model.attention
import model.gpt
from model.gpt import GPT, Block
from sampling import decoder
from sampling.config import SamplingConfig
from sampling.sampler import generate
from tests.conftest import PROJECT
from tests.test_gpt import FAMILIES, family

SIZES = {"vocab_size": 50, "context_length": 16, "num_layers": 2, "num_heads": 4, "d_model": 32}
PAGE = (PROJECT / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCK, ATTENTION = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(params=["block", "attention"])
def edited(request, monkeypatch):
    """One of the two edits, made to this process's modules as the page makes it to the files."""
    decoder.warn_once.cache_clear()
    if request.param == "block":
        names = dict(vars(model.gpt))
        exec(BLOCK, names)
        monkeypatch.setattr(Block, "forward", names["forward"])
    else:
        names = dict(vars(model.attention))
        exec(ATTENTION, names)
        monkeypatch.setattr(model.gpt, "MultiHeadAttention", names["MuPAttention"])
    yield request.param
    decoder.warn_once.cache_clear()


def network(name: str) -> GPT:
    torch.manual_seed(0)
    gpt = GPT(family(name, **SIZES)).eval()
    with torch.no_grad():
        for weight in gpt.parameters():
            weight.normal_(std=0.3)
    return gpt


@pytest.mark.parametrize("name", FAMILIES)
def test_an_edited_network_learns_is_looked_at_and_sampled_from(edited, name, caplog, monkeypatch):
    ids = torch.arange(16)[None] % 5
    gpt = network(name)
    logits = gpt(ids)
    with monkeypatch.context() as unedited:  # the same weights in the network as it was
        unedited.setattr(Block, "forward", ORIGINAL_FORWARD)
        unedited.setattr(model.gpt, "MultiHeadAttention", ORIGINAL_ATTENTION)
        assert (network(name)(ids) - logits).abs().max() > 0.01

    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = gpt.train().loss(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2

    gpt.eval()
    maps = gpt.attention_maps(ids)
    assert len(maps) == 2
    for weights in maps:
        assert_close(weights.sum(-1), torch.ones(1, 4, 16))

    written = list(generate(gpt, [0, 1], SamplingConfig(max_new_tokens=12, temperature=0)))
    with torch.no_grad():
        likeliest = gpt(torch.tensor([[0, 1, *written]]))[0].argmax(-1)
    assert written == likeliest[1:-1].tolist()
    (warning,) = caplog.messages
    assert warning in PAGE


ORIGINAL_FORWARD, ORIGINAL_ATTENTION = Block.forward, model.gpt.MultiHeadAttention
