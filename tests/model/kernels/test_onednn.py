"""Products go through another library on some machines; the numbers stay."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import library

import model.kernels.onednn
import training.muon
from model.attention import eager_attention, sdpa_attention
from model.config import GPTConfig
from model.gpt import GPT
from model.kernels.attention import MIN_LENGTH, short_attention
from model.kernels.onednn import use_onednn_for_matmul
from model.layers import Linear, linear
from sampling.fast_copy import MAX_MV_NUMEL_CACHED, MAX_MV_NUMEL_UNCACHED, max_mv_numel, packed_linear_function
from training.muon import MuonAdamW, newton_schulz


@pytest.fixture
def onednn(monkeypatch):
    """Takes the oneDNN path on any machine that has it."""
    if not model.kernels.onednn.has_onednn():
        pytest.skip("this PyTorch carries no oneDNN")
    monkeypatch.setattr(model.kernels.onednn, "_AMD_FAMILY", model.kernels.onednn.ZEN_5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 16), (7, 16), (1, 1, 16), (0, 4, 16), (16,)])
def test_output_and_gradients_equal_pytorchs_linear(onednn, shape, bias):
    torch.manual_seed(0)
    layer, x = Linear(16, 24, bias=bias), torch.randn(shape, requires_grad=True)
    inputs = [x, *layer.parameters()]
    theirs = F.linear(x, layer.weight, layer.bias)
    ours = layer(x)
    grad = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for our_grad, their_grad in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad), strict=True
    ):
        torch.testing.assert_close(our_grad, their_grad, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", ["linear", "short attention", "long attention"])
def test_second_derivative_is_refused_and_never_wrong(onednn, part):
    layer, x = Linear(16, 16), torch.randn(2, 3, 16, requires_grad=True)
    q = torch.randn(1, 2, 8 if part == "short attention" else MIN_LENGTH, 4, requires_grad=True)
    inputs = x if part == "linear" else q
    y = layer(x) if part == "linear" else sdpa_attention(q, q, q, causal=True)
    (grad,) = torch.autograd.grad(y.tanh().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_a_strided_input_gives_the_same(onednn):
    x = torch.randn(6, 5, 32)[:, ::2, :16]
    layer = Linear(16, 8, bias=False)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight), atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_compiled_it_is_one_graph_with_the_same_output_and_gradients(onednn):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 5, 16), torch.randn(24, 16), torch.randn(24)
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    torch._dynamo.reset()
    ours = torch.compile(linear, backend="aot_eager", fullgraph=True)(*inputs)
    theirs = F.linear(*inputs)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(theirs)
    for our_grad, their_grad in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad), strict=True
    ):
        torch.testing.assert_close(our_grad, their_grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("small", [0, 1 << 30], ids=["oneDNN alone", "a vector through PyTorch's product"])
@pytest.mark.parametrize("shape", [(16,), (1, 16), (3, 16), (2, 3, 16)])
def test_layer_laid_out_once_computes_the_same(onednn, small, bias, shape):
    torch.manual_seed(0)
    layer, x = Linear(16, 24, bias=bias), torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(
            packed_linear_function(layer, small)(x), F.linear(x, layer.weight, layer.bias), atol=1e-6, rtol=1e-5
        )


def test_fewer_matrices_are_small_where_the_network_exceeds_the_cache():
    assert max_mv_numel(GPT(GPTConfig(vocab_size=2048, num_layers=2))) == MAX_MV_NUMEL_CACHED
    assert (
        max_mv_numel(GPT(GPTConfig(vocab_size=2048, num_layers=8, d_model=384, num_heads=6))) == MAX_MV_NUMEL_UNCACHED
    )


def test_what_the_compiler_is_told_of_it_is_true(onednn):
    x, weight = torch.randn(3, 5, 16, requires_grad=True), torch.randn(24, 16, requires_grad=True)
    library.opcheck(torch.ops.tiny_gpt.onednn_product.default, (x, weight))
    library.opcheck(torch.ops.tiny_gpt.onednn_gradients.default, (torch.randn(3, 5, 24), x.detach(), weight.detach()))


def test_other_precisions_go_pytorchs_way(onednn):
    x = torch.randn(4, 16)
    assert Linear(16, 8).double()(x.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert Linear(16, 8)(x).dtype == torch.bfloat16


CPUINFO = "processor\t: 0\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: 17\nmodel name\t: a processor\n"


@pytest.mark.parametrize(
    ("cpuinfo", "avx512", "products", "short"),
    [
        (CPUINFO.format("AuthenticAMD", 26), True, True, True),
        (CPUINFO.format("AuthenticAMD", 25), True, True, False),
        (CPUINFO.format("AuthenticAMD", 25), False, False, False),
        (CPUINFO.format("GenuineIntel", 6), True, False, False),
        ("AMD64 Family 26 Model 68 Stepping 0, AuthenticAMD", True, True, True),
        ("", True, False, False),
    ],
    ids=["Zen 5", "Zen 4", "Zen 3", "Intel", "Zen 5 on Windows", "unknown"],
)
def test_onednn_is_used_only_on_processors_where_it_is_faster(monkeypatch, cpuinfo, avx512, products, short):
    onednn = model.kernels.onednn
    monkeypatch.setattr(onednn, "has_onednn", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if avx512 else "AVX2")
    monkeypatch.setattr(
        onednn, "Path", lambda path: SimpleNamespace(exists=lambda: True, read_text=lambda **_: cpuinfo)
    )
    monkeypatch.setattr(onednn, "_AMD_FAMILY", onednn._amd_family_with_avx512())
    assert (onednn.onednn_is_faster(), onednn.short_attention_is_faster()) == (products, short)


@pytest.mark.parametrize(("family", "length", "expected"), [
    (26, MIN_LENGTH - 1, ["short_attention"]), (25, MIN_LENGTH - 1, []),
    (26, MIN_LENGTH, ["onednn_attention"]), (25, MIN_LENGTH, ["onednn_attention"]), (0, MIN_LENGTH, []),
])  # fmt: skip
def test_attention_takes_the_kernel_of_the_processor_and_length(monkeypatch, family, length, expected):
    calls = []
    monkeypatch.setattr(model.kernels.onednn, "_AMD_FAMILY", family)
    for name in ("short_attention", "onednn_attention"):
        monkeypatch.setattr(f"model.kernels.attention.{name}", lambda q, *_, name=name, **__: calls.append(name) or q)
    q = torch.randn(1, 1, length, 8)
    sdpa_attention(q, q, q, causal=True)
    assert calls == expected


def test_linear_layers_keep_the_names_of_pytorchs():
    assert Linear(4, 4).state_dict().keys() == torch.nn.Linear(4, 4).state_dict().keys()


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("masked", [True, False])
def test_long_attention_and_its_gradients_keep_float32_precision(onednn, num_kv_heads, masked):
    torch.manual_seed(0)
    T = MIN_LENGTH
    q = torch.randn(1, 4, T, 16, requires_grad=True)
    k, v = (torch.randn(1, num_kv_heads, T, 16, requires_grad=True) for _ in range(2))
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    ours = sdpa_attention(q, k, v, causal) if masked else sdpa_attention(q, k, v, causal=True)
    exact = eager_attention(q.double(), k.double(), v.double(), causal)[0].float()
    torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(exact)
    for our_grad, exact_grad in zip(
        torch.autograd.grad(ours, (q, k, v), grad), torch.autograd.grad(exact, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(our_grad, exact_grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("T", [1, 7, 64, MIN_LENGTH - 1])
def test_short_attention_and_its_gradients_keep_float32_precision(onednn, T):
    torch.manual_seed(0)
    qkv = torch.randn(2, T, 3, 4, 16, requires_grad=True)
    q, k, v = qkv.transpose(1, 3).unbind(2)  # (B, H, T, D), strided as the model's are
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    ours = sdpa_attention(q, k, v, causal=True)
    exact = eager_attention(q.double(), k.double(), v.double(), causal)[0].float()
    torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(exact)
    (our_grad,), (exact_grad,) = (torch.autograd.grad(heads, qkv, grad, retain_graph=True) for heads in (ours, exact))
    torch.testing.assert_close(our_grad, exact_grad, atol=1e-5, rtol=1e-4)


def test_short_attention_with_dropout_differentiates_what_it_computed(onednn):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def seeded(q, k, v):
        torch.manual_seed(1)  # the same weights dropped at every call
        return short_attention(q, k, v, 0.4)

    assert torch.autograd.gradcheck(seeded, (q, k, v))
    assert not torch.allclose(seeded(q, k, v), short_attention(q, k, v))


def test_short_attention_drops_its_share_of_the_weights(onednn):
    torch.manual_seed(0)
    q, k = torch.zeros(2, 8, 16, 200, 8).unbind(0)
    v = torch.eye(200).expand(8, 16, 200, 200)  # so that what is gathered are the weights
    weights = short_attention(q, k, v, 0.25)
    seen = torch.ones(200, 200, dtype=torch.bool).tril()
    assert (weights[..., ~seen] == 0).all()
    assert (weights[..., seen] == 0).double().mean().item() == pytest.approx(0.25, abs=0.003)


def test_orthogonalising_keeps_float32_precision(onednn):
    torch.manual_seed(0)
    g = torch.randn(3, 96, 256)
    with use_onednn_for_matmul():
        (ours,) = newton_schulz([g])
    torch.testing.assert_close(ours, newton_schulz([g.double()])[0].float(), atol=1e-5, rtol=1e-4)


def test_the_precision_setting_is_left_as_it_was(onednn):
    q = torch.randn(1, 1, MIN_LENGTH, 8, requires_grad=True)
    sdpa_attention(q, q, q, causal=True).sum().backward()
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.isfinite(q.grad).all()
    with pytest.raises(ZeroDivisionError), use_onednn_for_matmul():
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "highest"


def test_muon_leaves_the_precision_setting_alone_on_other_devices(onednn, monkeypatch):
    settings = []

    def watched(stacks):
        settings.append(torch.get_float32_matmul_precision())
        return newton_schulz(stacks)

    monkeypatch.setattr(training.muon, "newton_schulz", watched)
    before = torch.get_float32_matmul_precision()
    for device in ("cpu", "meta"):
        weight = torch.ones(4, 6, device=device, requires_grad=True)
        weight.grad = torch.ones_like(weight)
        MuonAdamW([{"params": [weight], "lr": 0.1, "momentum": 0.9, "muon": True}]).step()
    assert settings == ["medium", before]


def test_the_precision_setting_is_not_touched_on_other_machines(monkeypatch):
    monkeypatch.setattr(model.kernels.onednn, "onednn_is_faster", lambda: False)
    with use_onednn_for_matmul():
        assert torch.get_float32_matmul_precision() == "highest"
