"""A window changes what a query sees and what it costs, and nothing else: in the function, the model and its maps."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.attention import MultiHeadAttention
from model.config import GPTConfig
from model.gpt import GPT
from model.layers import sliding_window_attention
from sampling.config import SamplingConfig
from sampling.sampler import generate
from system.errors import UserError

HEADS, HEAD_DIM = 4, 8
CONTEXT, WINDOW = 80, 7
TINY = {"vocab_size": 50, "context_length": CONTEXT, "num_layers": 2, "num_heads": HEADS, "d_model": 32}


def band(length: int, window: int) -> Tensor:
    """True where query i (a row) may see key j (a column)."""
    return torch.tensor([[i - window < j <= i for j in range(length)] for i in range(length)])


def inputs(length: int, num_kv_heads: int = HEADS, batch: int = 2, dtype=torch.float32) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output."""
    draws = torch.Generator().manual_seed(length)
    shapes = [(batch, heads, length, HEAD_DIM) for heads in (HEADS, num_kv_heads, num_kv_heads)]
    q, k, v = (torch.randn(shape, generator=draws, dtype=dtype).requires_grad_() for shape in shapes)
    return [q, k, v, torch.randn(shapes[0], generator=draws, dtype=dtype)]


def network(seed: int = 0, **fields) -> GPT:
    """A small model in which every weight matters."""
    torch.manual_seed(seed)
    gpt = GPT(GPTConfig(**TINY | fields))
    for parameter in gpt.parameters():
        nn.init.normal_(parameter, std=0.3)
    return gpt


def random_ids(length: int = CONTEXT, batch: int = 2) -> Tensor:
    return torch.randint(TINY["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


# The function


@settings(max_examples=80, deadline=None)
@given(
    length=st.integers(1, 300),
    window=st.integers(1, 150),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 3),
)
@example(length=1, window=1, num_kv_heads=4, batch=1)
@example(length=100, window=1, num_kv_heads=2, batch=2)  # every token sees itself alone
@example(length=20, window=50, num_kv_heads=4, batch=2)  # shorter than the window
@example(length=50, window=50, num_kv_heads=4, batch=2)
@example(length=51, window=50, num_kv_heads=1, batch=2)
@example(length=114, window=50, num_kv_heads=2, batch=2)  # the longest without blocks
@example(length=115, window=50, num_kv_heads=2, batch=2)  # the shortest with blocks
@example(length=192, window=64, num_kv_heads=4, batch=1)  # whole blocks
@example(length=193, window=64, num_kv_heads=4, batch=3)
@example(length=300, window=150, num_kv_heads=2, batch=2)  # blocks of a size that does not divide the window
@example(length=1024, window=16, num_kv_heads=2, batch=2)  # sequences long enough to be taken one at a time
def test_result_and_gradients_are_those_of_full_attention_under_a_band_mask(length, window, num_kv_heads, batch):
    q, k, v, upstream = inputs(length, num_kv_heads, batch)
    output = sliding_window_attention(q, k, v, window)
    ours = [output, *torch.autograd.grad(output, (q, k, v), upstream)]

    q, k, v, upstream = inputs(length, num_kv_heads, batch)
    group = HEADS // num_kv_heads
    scores = q @ k.repeat_interleave(group, 1).mT / math.sqrt(HEAD_DIM)  # (B, H, T, T)
    weights = scores.masked_fill(~band(length, window), -math.inf).softmax(-1)
    output = weights @ v.repeat_interleave(group, 1)
    expected = [output, *torch.autograd.grad(output, (q, k, v), upstream)]
    for mine, textbook in zip(ours, expected, strict=True):
        assert_close(mine, textbook, atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_finite_differences():
    q, k, v, _ = inputs(80, num_kv_heads=2, batch=1, dtype=torch.float64)
    q, k, v = (x[..., :2].detach().requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(lambda *qkv: sliding_window_attention(*qkv, window=3), (q, k, v), fast_mode=True)


@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
def test_result_does_not_depend_on_how_the_input_lies_in_memory(layout):
    q, k, v, _ = inputs(150)
    if layout == "tokens first":  # as the projections of a model make it
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, band(150, 20))
    assert_close(sliding_window_attention(q, k, v, 20), expected, atol=1e-5, rtol=1e-5)


def test_dropout_drops_weights():
    q, k, v, _ = inputs(100)
    torch.manual_seed(0)
    dropped = sliding_window_attention(q, k, torch.ones_like(v), 20, dropout=0.5)  # without dropout all ones
    assert_close(dropped.mean().item(), 1.0, atol=0.1, rtol=0)
    assert dropped.std() > 0.1


class TensorsMade(TorchDispatchMode):
    """Bytes of every tensor that comes into being, those that live for a moment too."""

    def __init__(self):
        super().__init__()
        self.sizes, self.kept = {}, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.sizes:
                self.sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                self.kept.append(tensor)  # so that its address is not given away again
        return result


def bytes_made(length: int, window: int) -> list[int]:
    """Sizes of the tensors that forward and backward make, beside the inputs."""
    q, k, v, upstream = inputs(length)
    with TensorsMade() as made:
        for x in (q, k, v, upstream):
            made.sizes[x.untyped_storage().data_ptr()] = 0
        torch.autograd.grad(sliding_window_attention(q, k, v, window), (q, k, v), upstream)
    return list(made.sizes.values())


def test_four_times_the_length_takes_four_times_the_memory_and_never_a_square_of_it():
    short, long = bytes_made(512, 32), bytes_made(2048, 32)
    assert 3.5 < sum(long) / sum(short) < 4.5
    assert max(long) < 4 * 2048**2 / 4  # a single head's matrix of float32 would be four times that


# The module


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("qk_norm_eps", [None, 1e-6], ids=["plain", "qk_norm"])
def test_fast_path_equals_the_path_that_shows_its_weights(num_kv_heads, qk_norm_eps):
    torch.manual_seed(0)
    module, x = MultiHeadAttention(32, 4, num_kv_heads, qk_norm_eps=qk_norm_eps), torch.randn(2, 75, 32)
    fast = module(x, causal=True, window=WINDOW)
    shown, weights = module(x, causal=True, window=WINDOW, need_weights=True)
    assert_close(fast, shown, atol=1e-5, rtol=1e-5)
    assert_close(fast, module(x, mask=band(75, WINDOW)), atol=1e-5, rtol=1e-5)
    assert (weights[..., ~band(75, WINDOW)] == 0).all()


@pytest.mark.parametrize("options", [{}, {"mask": band(5, 2)}, {"causal": True, "key": torch.ones(1, 5, 32)}])
def test_a_window_without_causal_self_attention_is_refused(options):
    with pytest.raises(ValueError, match="causal self-attention"):
        MultiHeadAttention(32, 4)(torch.ones(1, 5, 32), window=2, **options)


# The model


def test_a_token_outside_the_window_has_no_influence():
    gpt, ids = network(num_layers=1, sliding_window=WINDOW), random_ids()
    with torch.no_grad():
        logits = gpt(ids)
        for t in (0, 1, 30, CONTEXT - WINDOW):
            changed = ids.clone()
            changed[:, t] = (ids[:, t] + 1) % TINY["vocab_size"]
            differs = (gpt(changed) != logits).any(-1).all(0)  # (T,)
            assert differs.nonzero().flatten().tolist() == list(range(t, t + WINDOW))


@pytest.mark.parametrize("window", [1, WINDOW, 33, CONTEXT - 1])
def test_nothing_leaks_from_the_future_bit_for_bit(window):
    gpt, ids = network(sliding_window=window), random_ids()
    with torch.no_grad():
        logits = gpt(ids)
        for t in range(CONTEXT - 1):
            changed = ids.clone()
            changed[:, t + 1 :] = (ids[:, t + 1 :] + 1) % TINY["vocab_size"]
            assert torch.equal(gpt(changed)[:, : t + 1], logits[:, : t + 1])


@pytest.mark.parametrize("window", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_a_window_of_the_context_or_more_changes_nothing_at_all(window):
    results = []
    for options in ({}, {"sliding_window": window}):
        gpt = network(**options, num_kv_heads=2)
        logits = gpt(random_ids())
        results.append([logits, *torch.autograd.grad(logits.square().mean(), list(gpt.parameters()))])
    for without, with_window in zip(*results, strict=True):
        assert torch.equal(without, with_window)


@pytest.mark.parametrize(
    ("pattern", "local"),
    [("S", [True] * 5), ("L", [False] * 5), ("SL", [True, False, True, False, True]), ("SSL", [True, True, False] * 2)],
)
def test_each_layer_sees_what_its_letter_of_the_pattern_says(pattern, local):
    gpt = network(num_layers=5, num_kv_heads=2, sliding_window=WINDOW, window_pattern=pattern)
    outside = band(CONTEXT, CONTEXT) & ~band(CONTEXT, WINDOW)
    for weights, is_local in zip(gpt.attention_maps(random_ids()), local[:5], strict=True):
        assert_close(weights.sum(-1), torch.ones(2, HEADS, CONTEXT))
        assert (weights[..., ~band(CONTEXT, CONTEXT)] == 0).all()
        assert (weights[..., outside] == 0).all() if is_local else (weights[..., outside] > 0).any()


def test_a_pattern_without_a_window_does_nothing():
    ids = random_ids()
    assert torch.equal(network(window_pattern="SL")(ids), network()(ids))


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_maps_are_those_the_model_used(positions):
    gpt = network(sliding_window=WINDOW, positions=positions, num_kv_heads=2).eval()
    ids, used = random_ids(), []

    def look(module, args, options, output):
        used.append((output, module.forward(*args, **options, need_weights=True)))

    for block in gpt.blocks:
        block.attention.register_forward_hook(look, with_kwargs=True)
    maps = gpt.attention_maps(ids)
    assert len(maps) == len(used) == 2
    for weights, (fast, (shown, expected)) in zip(maps, used, strict=True):
        assert torch.equal(weights, expected)
        assert_close(shown, fast, atol=1e-5, rtol=1e-5)


def test_sampling_follows_the_same_model():
    gpt = network(sliding_window=WINDOW, window_pattern="SL").eval()
    prompt = random_ids(3, batch=1)[0].tolist()
    written = list(generate(gpt, prompt, SamplingConfig(max_new_tokens=CONTEXT - 3, temperature=0)))
    with torch.no_grad():
        likeliest = gpt(torch.tensor([prompt + written]))[0].argmax(-1)  # all positions at once, as in training
    assert written == likeliest[2:-1].tolist()


def test_a_model_with_a_window_learns():
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(**TINY, sliding_window=WINDOW, window_pattern="SL"))
    ids = torch.arange(CONTEXT + 1).remainder(5).expand(2, -1)  # 0 1 2 3 4 0 1 ...
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(gpt(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    local, full = gpt.attention_maps(ids[:, :-1])
    assert (local.tril(-WINDOW) == 0).all() and (full.tril(-WINDOW) > 0).any()


# The config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sliding_window": 0}, r"model\.sliding_window is 0, but must be at least 1\."),
        ({"sliding_window": -5}, r"model\.sliding_window is -5, but must be at least 1\."),
        ({"window_pattern": ""}, r"model\.window_pattern is '', but must consist of the letters S \(short"),
        ({"window_pattern": "SX"}, r"model\.window_pattern is 'SX', but must consist of the letters S \(short"),
        ({"window_pattern": "sl"}, r"model\.window_pattern is 'sl', but must consist of the letters S \(short"),
    ],
)
def test_what_cannot_work_is_refused_with_the_mend(fields, message):
    with pytest.raises(UserError, match=message):
        GPTConfig(vocab_size=50, **fields)
