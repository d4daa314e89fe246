"""Attention is that of the textbook: shapes, masks, known tables, and equality with PyTorch's own module."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from model.attention import MultiHeadAttention, apply_rope, eager_attention
from model.layers import precompute_rope
from system.errors import UserError

D_MODEL, HEADS, HEAD_DIM, BATCH, QUERIES, KEYS = 24, 4, 6, 3, 5, 7
CAUSAL = torch.ones(QUERIES, QUERIES).tril()


def sequences(length: int, seed: int = 1) -> Tensor:
    return torch.randn(BATCH, length, D_MODEL, generator=torch.Generator().manual_seed(seed))


def attention(num_kv_heads: int | None = None, **options) -> MultiHeadAttention:
    """A small module with every weight and bias random."""
    torch.manual_seed(0)
    module = MultiHeadAttention(D_MODEL, HEADS, num_kv_heads, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def gradients(output: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a sum in which every output counts differently."""
    probe = torch.linspace(-1, 1, output.numel()).view_as(output)
    return torch.autograd.grad((output * probe).sum(), inputs)


# Parts and shapes


def test_projections_have_no_bias_and_the_output_has_one():
    module = MultiHeadAttention(D_MODEL, HEADS)
    assert module.head_dim == HEAD_DIM
    assert module.in_proj.weight.shape == (3 * D_MODEL, D_MODEL)
    assert module.in_proj.bias is None
    assert module.out_proj.weight.shape == (D_MODEL, D_MODEL)
    assert module.out_proj.bias.shape == (D_MODEL,)


def test_heads_that_do_not_divide_the_width_are_refused_with_both_numbers_and_the_choices():
    with pytest.raises(UserError, match=r"d_model 20 .* num_heads 3\b.* from 1, 2, 4, 5, 10, 20,"):
        MultiHeadAttention(20, 3)


def test_kv_heads_that_do_not_divide_the_heads_are_refused_with_both_numbers_and_the_choices():
    with pytest.raises(UserError, match=r"num_heads 6 .* num_kv_heads 4\b.* from 1, 2, 3, 6\."):
        MultiHeadAttention(24, 6, 4)


def test_heads_are_slices_of_the_projections():
    module, x = attention(), sequences(QUERIES)
    for index, heads in enumerate(module.project(x, None, None, None)):
        assert heads.shape == (BATCH, HEADS, QUERIES, HEAD_DIM)
        for h in range(HEADS):
            first_row = index * D_MODEL + h * HEAD_DIM
            assert_close(heads[:, h], x @ module.in_proj.weight[first_row : first_row + HEAD_DIM].T)


def test_heads_are_joined_side_by_side_before_the_output_projection():
    module, x = attention(), sequences(QUERIES)
    heads, _ = eager_attention(*module.project(x, None, None, None))
    joined = torch.cat([heads[:, h] for h in range(HEADS)], dim=-1)
    assert_close(module(x), joined @ module.out_proj.weight.T + module.out_proj.bias)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_queries_may_come_from_a_text_of_another_length_than_keys(num_kv_heads):
    module = attention(num_kv_heads)
    output, weights = module(sequences(QUERIES), sequences(KEYS, seed=2), need_weights=True)
    assert output.shape == (BATCH, QUERIES, D_MODEL)
    assert weights.shape == (BATCH, HEADS, QUERIES, KEYS)


def test_all_three_inputs_from_one_text_are_self_attention():
    module, x = attention(), sequences(QUERIES)
    assert_close(module(x, x, x), module(x))
    assert_close(module(x, x), module(x))


def test_values_may_differ_from_keys():
    module, query, key = attention(), sequences(QUERIES), sequences(KEYS, seed=2)
    _, weights = module(query, key, need_weights=True)
    output, same_weights = module(query, key, sequences(KEYS, seed=3), need_weights=True)
    assert torch.equal(weights, same_weights)
    assert not torch.allclose(output, module(query, key))


# The weights


@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["unmasked", "causal"])
def test_each_row_of_weights_sums_to_one(mask):
    _, weights = attention()(sequences(QUERIES), mask=mask, need_weights=True)
    assert (weights >= 0).all()
    assert_close(weights.sum(-1), torch.ones(BATCH, HEADS, QUERIES))


def test_a_row_is_a_query_and_a_column_a_key():
    module, query, key = attention(), sequences(QUERIES), sequences(KEYS, seed=2)
    _, weights = module(query, key, need_weights=True)
    other_query, other_key = query.clone(), key.clone()
    other_query[:, 2] += 1
    _, changed = module(other_query, key, need_weights=True)
    assert [torch.allclose(weights[:, :, t], changed[:, :, t]) for t in range(QUERIES)] == [
        True,
        True,
        False,
        True,
        True,
    ]
    other_key[:, 3] = other_key[:, 4]
    _, changed = module(query, other_key, need_weights=True)
    assert_close(changed[..., 3], changed[..., 4])


# The two known tables: one head of width 8, five tokens


def table(text: str) -> Tensor:
    return torch.tensor([[float(cell) for cell in row.split()] for row in text.strip().splitlines()])


WITHOUT_MASK = table("""
    0.25 0.12 0.23 0.18 0.22
    0.17 0.20 0.15 0.20 0.28
    0.18 0.20 0.20 0.19 0.23
    0.18 0.25 0.17 0.21 0.19
    0.14 0.16 0.17 0.16 0.36
""")
WITH_MASK = table("""
    1.00 0.00 0.00 0.00 0.00
    0.45 0.55 0.00 0.00 0.00
    0.32 0.34 0.34 0.00 0.00
    0.22 0.31 0.21 0.26 0.00
    0.14 0.16 0.17 0.16 0.36
""")


@pytest.fixture
def five_tokens() -> tuple[MultiHeadAttention, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 8)
    query, key, value = (nn.Linear(8, 8, bias=False) for _ in range(3))
    module = MultiHeadAttention(8, 1)
    module.in_proj.weight.data = torch.cat([query.weight, key.weight, value.weight])
    return module, x


@pytest.mark.parametrize(("mask", "expected"), [(None, WITHOUT_MASK), (CAUSAL, WITH_MASK)], ids=["unmasked", "causal"])
def test_known_table_is_reproduced_to_two_decimals(five_tokens, mask, expected):
    module, x = five_tokens
    _, weights = module(x, mask=mask, need_weights=True)
    assert_close(weights[0, 0], expected, atol=0.00501, rtol=0)  # half of the last decimal


def test_first_token_sees_itself_alone_and_nothing_sees_the_future(five_tokens):
    module, x = five_tokens
    _, weights = module(x, causal=True, need_weights=True)
    assert weights[0, 0, 0, 0] == 1
    assert torch.equal(weights, weights.tril())


def test_last_token_sees_the_same_with_and_without_mask(five_tokens):
    module, x = five_tokens
    output, weights = module(x, need_weights=True)
    causal_output, causal_weights = module(x, causal=True, need_weights=True)
    assert_close(causal_weights[..., -1, :], weights[..., -1, :])
    assert_close(causal_output[:, -1], output[:, -1])


def test_causal_is_the_triangular_mask():
    module, x = attention(), sequences(QUERIES)
    assert_close(module(x, causal=True), module(x, mask=CAUSAL))
    for ours, masked in zip(
        module(x, causal=True, need_weights=True), module(x, mask=CAUSAL, need_weights=True), strict=True
    ):
        assert torch.equal(ours, masked)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [([1, 1, 1], [0.665, 0.245, 0.090]), ([1, 1, 0], [0.731, 0.269, 0.0])],
    ids=["all", "masked"],
)
def test_masked_scores_are_minus_infinity_before_the_softmax(mask, expected):
    mask = torch.tensor(mask)
    q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([[[[2.0], [1.0], [0.0]]]]), torch.eye(3)[None, None]
    output, weights = eager_attention(q, k, v, mask)  # scores are [2, 1, 0]; the output shows the weights
    assert_close(weights[0, 0, 0], torch.tensor(expected), atol=0.0005, rtol=0)
    assert_close(output, weights)
    assert (weights[..., mask == 0] == 0).all()
    assert_close(F.scaled_dot_product_attention(q, k, v, mask.bool()[None]), weights)


def test_a_hidden_key_gets_nothing_however_low_the_visible_scores():
    q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([[[[-1e30], [0.0]]]]), torch.eye(2)[None, None]
    _, weights = eager_attention(q, k, v, torch.tensor([1, 0]))
    assert weights.flatten().tolist() == [1, 0]


def test_scores_are_divided_by_the_root_of_the_head_width():
    q, k = torch.randn(2, 3, QUERIES, 16), torch.randn(2, 3, KEYS, 16)
    _, weights = eager_attention(q, k, k)
    assert_close(weights, torch.einsum("bhtd,bhsd->bhts", q, k).div(4).softmax(-1))


# Fast path, eager path and torch.nn.MultiheadAttention agree

PARTLY_VISIBLE = torch.randn(BATCH, HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(3)) > 0
PARTLY_VISIBLE[..., 0] = True  # a row without any key has no weights
PADDED_KEYS = (torch.arange(KEYS) < torch.tensor([[3], [7], [5]]))[:, None, None]  # (B, 1, 1, S)

CASES = {
    "self": (QUERIES, {}),
    "self_causal": (QUERIES, {"causal": True}),
    "self_masked": (QUERIES, {"mask": CAUSAL}),
    "cross": (KEYS, {}),
    "cross_masked": (KEYS, {"mask": PARTLY_VISIBLE}),
    "cross_padded": (KEYS, {"mask": PADDED_KEYS}),
}


def torch_twin(module: MultiHeadAttention) -> nn.MultiheadAttention:
    """PyTorch's module with the same weights; shared key/value heads become equal ones."""
    G, D = module.num_kv_heads, module.head_dim

    def one_a_head(rows: Tensor) -> Tensor:  # rows (H D + 2 G D, ...) -> (3 H D, ...)
        q, k, v = rows.split([D_MODEL, G * D, G * D])
        k, v = (part.unflatten(0, (G, D)).repeat_interleave(HEADS // G, dim=0).flatten(0, 1) for part in (k, v))
        return torch.cat([q, k, v])

    twin = nn.MultiheadAttention(D_MODEL, HEADS, batch_first=True)
    twin.in_proj_weight.data = one_a_head(module.in_proj.weight.data)
    if module.in_proj.bias is not None:
        twin.in_proj_bias.data = one_a_head(module.in_proj.bias.data)
    twin.out_proj.load_state_dict(module.out_proj.state_dict())
    return twin


def shared_heads(rows: Tensor, num_kv_heads: int) -> Tensor:
    """Gradients of equal key/value heads add up to the gradient of the one they stand for."""
    q, k, v = rows.split(D_MODEL)
    k, v = (part.unflatten(0, (num_kv_heads, HEADS // num_kv_heads, HEAD_DIM)).sum(1).flatten(0, 1) for part in (k, v))
    return torch.cat([q, k, v])


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("qkv_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("case", CASES)
def test_both_paths_equal_torch_multi_head_attention_forward_and_gradient(case, qkv_bias, num_kv_heads):
    key_length, options = CASES[case]
    module = attention(num_kv_heads, qkv_bias=qkv_bias)
    twin = torch_twin(module)
    query = sequences(QUERIES).requires_grad_()
    key, value = (sequences(key_length, seed).requires_grad_() for seed in (2, 3))
    # Self-attention takes the query alone, so all gradients meet in it.
    inputs = [query] if case.startswith("self") else [query, key, value]
    weights_and_biases = [module.in_proj.weight, *module.out_proj.parameters()]
    twin_weights_and_biases = [twin.in_proj_weight, *twin.out_proj.parameters()]
    if qkv_bias:
        weights_and_biases.append(module.in_proj.bias)
        twin_weights_and_biases.append(twin.in_proj_bias)

    allowed = CAUSAL if "causal" in options else options.get("mask")
    hidden = None
    if allowed is not None:  # torch wants True where a query may not look, and (B H, T, S)
        hidden = (allowed == 0).expand(BATCH, HEADS, QUERIES, key_length).flatten(0, 1)
    all_three = inputs * 3 if len(inputs) == 1 else inputs
    expected, expected_weights = twin(*all_three, attn_mask=hidden, average_attn_weights=False)
    expected_gradients = [
        shared_heads(gradient, num_kv_heads) if len(gradient) == 3 * D_MODEL else gradient
        for gradient in gradients(expected, inputs + twin_weights_and_biases)
    ]

    fast = module(*inputs, **options)
    eager, weights = module(*inputs, **options, need_weights=True)
    assert_close(weights, expected_weights)
    for output in (fast, eager):
        assert_close(output, expected)
        for ours, torchs in zip(gradients(output, inputs + weights_and_biases), expected_gradients, strict=True):
            assert_close(ours, torchs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("qk_norm_eps", [None, 1e-6], ids=["plain", "qk_norm"])
@pytest.mark.parametrize("positions", ["none", "rope"])
@pytest.mark.parametrize("causal", [False, True], ids=["unmasked", "causal"])
def test_fast_path_equals_eager_path_with_every_option(causal, positions, qk_norm_eps, num_kv_heads):
    module, x = attention(num_kv_heads, qk_norm_eps=qk_norm_eps), sequences(QUERIES).requires_grad_()
    rope = precompute_rope(QUERIES, HEAD_DIM, 100.0) if positions == "rope" else None
    fast = module(x, causal=causal, rope=rope)
    eager, weights = module(x, causal=causal, rope=rope, need_weights=True)
    assert weights.shape == (BATCH, HEADS, QUERIES, QUERIES)
    assert_close(fast, eager)
    inputs = [x, *module.parameters()]
    for ours, readable in zip(gradients(fast, inputs), gradients(eager, inputs), strict=True):
        assert_close(ours, readable, atol=2e-5, rtol=1e-4)


def test_heads_of_a_group_share_their_keys_and_values():
    module, x = attention(num_kv_heads=2), sequences(QUERIES)
    q, k, v = module.project(x, None, None, None)
    assert [part.shape[1] for part in (q, k, v)] == [HEADS, 2, 2]
    k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
    heads = F.scaled_dot_product_attention(q, k, v)
    assert_close(module(x), module.out_proj(heads.transpose(1, 2).flatten(2)))


def test_qk_norm_makes_scores_cosines():
    module, x = attention(qk_norm_eps=1e-9), 100 * sequences(QUERIES)
    _, weights = module(x, need_weights=True)
    q, k = (
        (x @ rows.T).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        for rows in module.in_proj.weight.split(D_MODEL)[:2]
    )
    cosines = F.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)  # (B, H, T, S)
    assert_close(weights, (cosines * math.sqrt(HEAD_DIM)).softmax(-1))


def test_dropout_is_off_in_evaluation_and_on_in_training():
    module, x = attention(dropout=0.5), sequences(QUERIES)
    without = attention(dropout=0.0)
    assert torch.equal(module.eval()(x), without(x))
    assert not torch.allclose(module.train()(x), without(x))


# Rotary positions


@pytest.mark.parametrize("head_dim", [2, 6, 16])
@pytest.mark.parametrize("base", [100.0, 10_000.0])
def test_rotation_is_multiplication_by_a_complex_number(head_dim, base):
    length = 11
    x = torch.randn(2, length, 3, head_dim)
    turned = torch.empty_like(x, dtype=torch.complex64)[..., : head_dim // 2]
    for position in range(length):
        for pair in range(head_dim // 2):
            angle = position * base ** (-2 * pair / head_dim)
            number = torch.complex(x[:, position, :, pair], x[:, position, :, pair + head_dim // 2])
            turned[:, position, :, pair] = number * complex(math.cos(angle), math.sin(angle))
    assert_close(apply_rope(x, *precompute_rope(length, head_dim, base)), torch.cat([turned.real, turned.imag], dim=-1))


def test_scores_depend_on_the_distance_between_two_tokens_alone():
    length, head_dim = 12, 16
    q, k = torch.randn(1, 1, 1, head_dim), torch.randn(1, 1, 1, head_dim)
    tables = precompute_rope(length, head_dim, 10_000.0)
    q, k = (apply_rope(x.expand(1, length, 1, head_dim), *tables)[0, :, 0] for x in (q, k))
    scores = q @ k.T  # the same two vectors at every pair of positions
    by_distance = [scores.diagonal(distance) for distance in range(1 - length, length)]
    for same_distance in by_distance:
        assert_close(same_distance, same_distance[:1].expand_as(same_distance), atol=1e-4, rtol=1e-4)
    assert all(abs(a[0] - b[0]) > 1e-3 for a, b in pairwise(by_distance))


def test_rope_equals_that_of_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    length, head_dim = 9, 8
    config = llama.LlamaConfig(
        hidden_size=3 * head_dim,
        num_attention_heads=3,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    q, k = torch.randn(2, length, 3, head_dim), torch.randn(2, length, 3, head_dim)
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, torch.arange(length)[None])
    expected = llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    tables = precompute_rope(length, head_dim, 500.0)
    assert_close(apply_rope(q, *tables), expected[0])
    assert_close(apply_rope(k, *tables), expected[1])
