"""The CUDA path of sliding window attention, checked on a CPU: which blocks, which numbers, when and when not.

PyTorch's flex attention has no gradient on a CPU: the last test checks it, and the kernel, where there is a GPU.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing import assert_close

from model.kernels import flex_attention, sliding_window
from model.kernels.flex_attention import (
    BLOCK,
    can_use_flex_attention,
    flex_attention_works,
    flex_sliding_window_attention,
    sliding_window_block_mask,
)
from tests.model.test_sliding_window_attention import HEADS, band, inputs

WINDOWS = [1, 2, 100, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 300, 4 * BLOCK - 1]


@pytest.fixture(autouse=True)
def forgotten():
    """Nothing found out about this machine goes from one test to the next."""
    flex_attention_works.cache_clear()
    yield
    flex_attention_works.cache_clear()


def values(length: int, num_kv_heads: int = HEADS):
    return [x.detach() for x in inputs(length, num_kv_heads)[:3]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_result_is_that_of_full_attention_under_a_band_mask(window, num_kv_heads):
    q, k, v = values(4 * BLOCK, num_kv_heads)
    expected = F.scaled_dot_product_attention(q, k, v, band(4 * BLOCK, window), enable_gqa=True)
    assert_close(flex_sliding_window_attention(q, k, v, window), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
def test_blocks_are_those_that_torch_finds_in_the_whole_matrix(window):
    length = 5 * BLOCK
    mine = sliding_window_block_mask(length, window, torch.device("cpu"))
    theirs = create_block_mask(mine.mask_mod, None, None, length, length, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    for count, index in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        for row, number in enumerate(getattr(theirs, count)[0, 0].tolist()):
            chosen = [getattr(blocks, index)[0, 0, row, :number].tolist() for blocks in (mine, theirs)]
            assert sorted(chosen[0]) == sorted(chosen[1]), (index, row)


def test_blocks_looked_into_grow_linearly_and_their_mask_is_the_band():
    blocks = [sliding_window_block_mask(n * BLOCK, 2 * BLOCK, torch.device("cpu")) for n in (8, 16, 32)]
    looked_into = [(b.kv_num_blocks.sum() + b.full_kv_num_blocks.sum()).item() for b in blocks]
    assert looked_into == [3 * n - 3 for n in (8, 16, 32)]  # three a block of queries, less at the start
    t = torch.arange(40)
    assert torch.equal(
        sliding_window_block_mask(BLOCK, 7, torch.device("cpu")).mask_mod(0, 0, t[:, None], t), band(40, 7)
    )


def test_blocks_made_in_a_validation_can_be_used_in_training():
    with torch.inference_mode():
        assert not sliding_window_block_mask(2 * BLOCK, 9, torch.device("cpu")).kv_indices.is_inference()


def test_a_compiled_network_takes_it_in_whole():
    q, k, v = values(2 * BLOCK, 2)
    compiled = torch.compile(flex_sliding_window_attention, backend="eager", fullgraph=True)
    expected = F.scaled_dot_product_attention(q, k, v, band(2 * BLOCK, 50), enable_gqa=True)
    assert_close(compiled(q, k, v, 50), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_under_autocast_it_takes_mixed_inputs_and_rounds_as_sdpa_does():
    q, k, v = values(2 * BLOCK)
    with torch.autocast("cpu", torch.bfloat16):
        found = flex_sliding_window_attention(q, k, v.bfloat16(), 50)
    assert found.dtype == torch.bfloat16
    expected = F.scaled_dot_product_attention(q, k, v, band(2 * BLOCK, 50))
    assert_close(found.float(), expected, atol=0.05, rtol=0.05)


def test_where_it_does_not_work_one_warning_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):  # a CPU has no backward pass: the trial fails as it does without Triton
            assert not flex_attention_works(torch.device("cpu"), torch.float32, 8)
    assert [record.getMessage() for record in caplog.records] == [
        "warning: FlexAttention does not work here (NotImplementedError); sliding window attention uses blocks instead."
    ]


@pytest.mark.parametrize(
    ("is_cuda", "length", "dropout", "works", "taken"),
    [
        (True, 4 * BLOCK, 0.0, True, True),
        (False, 4 * BLOCK, 0.0, True, False),
        (True, 4 * BLOCK + 1, 0.0, True, False),  # not whole blocks
        (True, 4 * BLOCK, 0.1, True, False),  # flex attention drops no weights
        (True, 4 * BLOCK, 0.0, False, False),
    ],
)
def test_it_is_taken_on_cuda_without_dropout_where_it_works(monkeypatch, is_cuda, length, dropout, works, taken):
    monkeypatch.setattr(flex_attention, "flex_attention_works", lambda *arguments: works)
    shape = (2, HEADS, length, 16)
    q = SimpleNamespace(is_cuda=is_cuda, size=lambda n: shape[n], device="cuda", dtype=torch.float32)
    assert can_use_flex_attention(q, dropout) is taken


@pytest.mark.parametrize("taken", [True, False])
def test_both_ways_of_a_window_give_the_same(monkeypatch, taken):
    q, k, v = values(4 * BLOCK, 2)
    calls = []

    def count(*arguments):
        calls.append(arguments)
        return flex_sliding_window_attention(*arguments)

    monkeypatch.setattr(sliding_window, "can_use_flex_attention", lambda q, dropout: taken)
    monkeypatch.setattr(sliding_window, "flex_sliding_window_attention", count)
    expected = F.scaled_dot_product_attention(q, k, v, band(4 * BLOCK, 60), enable_gqa=True)
    assert_close(sliding_window.sliding_window_attention(q, k, v, 60), expected, atol=1e-5, rtol=1e-5)
    assert len(calls) == taken


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_on_a_gpu_result_and_gradients_are_those_under_a_band_mask(num_kv_heads):
    found = []
    for on_flex in (True, False):
        q, k, v = (torch.cat([x, x], -1).detach().cuda().requires_grad_() for x in inputs(4 * BLOCK, num_kv_heads)[:3])
        if on_flex:  # heads of 16: the kernel takes no smaller
            assert can_use_flex_attention(q, 0.0)
            output = sliding_window.sliding_window_attention(q, k, v, 200)
        else:
            output = F.scaled_dot_product_attention(q, k, v, band(4 * BLOCK, 200).cuda(), enable_gqa=True)
        found.append([output, *torch.autograd.grad(output.square().sum(), (q, k, v))])
    for mine, theirs in zip(*found, strict=True):
        assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
