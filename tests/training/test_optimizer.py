"""AdamW is PyTorch's, Muon the published one; each is one optimizer that saves, resumes and is scheduled."""

import copy
import dataclasses
import io
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.testing import assert_close

from configs.compose import compose
from configs.defaults import CONFIG_DIR
from model.config import GPTConfig
from model.gpt import GPT
from system.errors import UserError
from training import muon as optimizer_module
from training.config import OptimizerConfig
from training.lr_scheduler import warmup_stable_decay
from training.muon import newton_schulz
from training.optim import OPTIMIZERS, build_optimizer

PROJECT = Path(__file__).resolve().parents[2]
TINY = {"vocab_size": 30, "context_length": 8, "num_layers": 2, "num_heads": 2, "d_model": 16}
NAMES = ("adamw", "muon")


def network(**fields) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**TINY, **fields}))


def set_random_gradients(gpt: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in gpt.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def learn(gpt: GPT, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    """Real steps on batches that depend on the step's number alone; returns the losses."""
    losses = []
    for step in range(first, first + steps):
        ids = torch.randint(30, (4, 9), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = F.cross_entropy(gpt(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# Which parameter goes where


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fields", [{}, {"tied_embeddings": False, "norm": "rmsnorm", "bias": False, "mlp": "swiglu"}])
def test_every_parameter_is_in_exactly_one_group(name, fields):
    gpt = network(**fields)
    grouped = [
        id(p) for group in build_optimizer(gpt, OptimizerConfig(name=name)).param_groups for p in group["params"]
    ]
    assert sorted(grouped) == sorted(id(p) for p in gpt.parameters())


def test_muon_takes_the_matrices_inside_blocks_and_nothing_else():
    gpt = network(tied_embeddings=False)
    groups = build_optimizer(gpt, OptimizerConfig(name="muon")).param_groups
    muon = {id(p) for group in groups if group["muon"] for p in group["params"]}
    assert muon == {id(p) for path, p in gpt.named_parameters() if path.startswith("blocks.") and p.ndim == 2}
    assert len(muon) == 4 * TINY["num_layers"]
    assert not any(group["muon"] for group in build_optimizer(gpt, OptimizerConfig(name="adamw")).param_groups)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("fields", "tables"),
    [
        ({"tied_embeddings": False}, {"token_embedding"}),
        ({"tied_embeddings": False, "bigram_table_size": 11}, {"token_embedding", "bigram_embedding"}),
        ({"tied_embeddings": True, "bigram_table_size": 11}, {"bigram_embedding"}),
        ({"tied_embeddings": True}, set()),
    ],
    ids=lambda value: "-".join(sorted(value)) if isinstance(value, set) else "",
)
def test_embeddings_that_are_not_the_output_layer_have_their_own_learning_rate(name, fields, tables):
    gpt = network(**fields)  # learned positions, which keep to the common one
    config = OptimizerConfig(name=name, lr=0.01, embedding_lr=0.3, muon_lr=0.04)
    groups = build_optimizer(gpt, config).param_groups
    rates = {id(p): (group["lr"], group["name"]) for group in groups for p in group["params"]}
    for path, p in gpt.named_parameters():
        if path.split(".")[0] in tables:
            expected = 0.3, "embeddings"
        elif name == "muon" and path.startswith("blocks.") and p.ndim == 2:
            expected = 0.04, "muon"
        else:
            expected = 0.01, "adamw"
        assert rates.pop(id(p)) == expected, path
    assert rates == {}


@pytest.mark.parametrize("name", NAMES)
def test_without_one_of_their_own_embeddings_learn_at_the_common_rate(name):
    gpt = network(tied_embeddings=False, bigram_table_size=11)
    groups = build_optimizer(gpt, OptimizerConfig(name=name, lr=0.01, embedding_lr=None)).param_groups
    assert {group["lr"] for group in groups if not group["muon"]} == {0.01}
    assert {group["name"] for group in groups} == {"adamw", "muon"} & {"adamw", name}


@pytest.mark.parametrize("name", NAMES)
def test_decay_shrinks_matrices_and_leaves_vectors_alone(name):
    gpt = network()
    config = OptimizerConfig(name=name, lr=0.1, muon_lr=0.3, weight_decay=0.5)
    optimizer = build_optimizer(gpt, config)
    before = {path: p.detach().clone() for path, p in gpt.named_parameters()}
    for p in gpt.parameters():
        p.grad = torch.zeros_like(p)  # no direction, so decay alone moves a weight
    optimizer.step()
    for path, p in gpt.named_parameters():
        lr = 0.3 if name == "muon" and path.startswith("blocks.") else 0.1
        assert_close(p.data, before[path] * (1 - lr * 0.5) if p.ndim == 2 else before[path], msg=path)


# AdamW


def test_adamw_equals_that_of_torch_step_by_step():
    ours = network()
    theirs = copy.deepcopy(ours)
    config = OptimizerConfig(name="adamw", lr=0.01, beta1=0.8, beta2=0.97, weight_decay=0.2)
    optimizer = build_optimizer(ours, config)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.ndim == 2], "weight_decay": 0.2},
            {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.8, 0.97),
        foreach=False,
    )
    for step in range(6):
        for group in optimizer.param_groups + reference.param_groups:
            group["lr"] = 0.01 / (step + 1)
        for gpt in (ours, theirs):
            set_random_gradients(gpt, seed=step)
        optimizer.step()
        reference.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_close(p, q, atol=1e-6, rtol=1e-5)


# Muon

LOW, HIGH = 0.68, 1.21  # as documented, for singular values that start above SMALLEST of the norm
SMALLEST = 1 / 30
SHAPES = [(16, 16), (8, 32), (32, 8), (1, 12), (12, 1)]


def with_singular_values(rows: int, columns: int, values: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix with these singular values, and the orthogonal matrix nearest to it."""
    torch.manual_seed(rows)
    u = torch.linalg.qr(torch.randn(rows, len(values))).Q
    v = torch.linalg.qr(torch.randn(columns, len(values))).Q
    return u * values @ v.T, u @ v.T


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_brings_singular_values_near_one(shape, scale):
    values = torch.logspace(0, -1.2, min(shape))  # from 1 down to 0.063
    assert values.min() > SMALLEST * values.norm()
    g, orthogonal = with_singular_values(*shape, values)
    result = newton_schulz([scale * g[None]])[0][0]
    singular = torch.linalg.svdvals(result)
    assert singular.min() > LOW
    assert singular.max() < HIGH
    # The directions stay: what is left of the nearest orthogonal matrix is the error of the singular values.
    assert torch.linalg.matrix_norm(result - orthogonal, ord=2) < 1 - LOW


def test_newton_schulz_keeps_the_documented_edges_from_the_documented_start_on():
    # One small singular value beside equal ones: there it is the smallest possible share of the norm.
    share = torch.linspace(SMALLEST, 1, 2000)
    g = torch.zeros(2000, 2, 2)
    g[:, 0, 0], g[:, 1, 1] = share, (1 - share.square()).sqrt()
    singular = newton_schulz([g])[0].diagonal(dim1=1, dim2=2)[:, 0]
    assert singular.min() > LOW
    assert singular.max() < HIGH
    g[:, 0, 0] *= 1e-3  # below the documented start: it may end smaller, but never turned over
    assert ((newton_schulz([g])[0][:, 0, 0] > 0) & (newton_schulz([g])[0][:, 0, 0] < HIGH)).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_of_noise_stays_below_the_upper_edge(shape):
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(newton_schulz([torch.randn(20, *shape)])[0])
    assert singular.max() < HIGH
    if shape[0] != shape[1]:  # square noise has singular values near 0
        assert singular.min() > LOW


def test_newton_schulz_takes_each_matrix_on_its_own_whatever_comes_with_it():
    torch.manual_seed(0)
    sizes = torch.logspace(-3, 3, 5)[:, None, None]
    stacks = [torch.randn(5, *shape) * sizes for shape in ((12, 7), (7, 12), (7, 7), (7, 3), (3, 20))]
    for stack, together in zip(stacks, newton_schulz(stacks), strict=True):
        alone = torch.cat([newton_schulz([g[None]])[0] for g in stack])
        assert_close(together, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_equals_its_steps_done_one_by_one(shape):
    torch.manual_seed(0)
    g = torch.randn(*shape, dtype=torch.float64)
    x = g / (g.norm() * 1.02)
    for _ in range(3):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    assert_close(newton_schulz([g[None]])[0][0], x, atol=1e-6, rtol=1e-6)


def test_newton_schulz_leaves_zero_zero():
    assert (newton_schulz([torch.zeros(2, 4, 6)])[0] == 0).all()


def test_newton_schulz_keeps_the_type():
    assert newton_schulz([torch.randn(1, 4, 6, dtype=torch.bfloat16)])[0].dtype == torch.bfloat16


def test_muon_step_equals_a_plain_loop_over_matrices():
    ours = network()
    config = OptimizerConfig(name="muon", muon_lr=0.05, muon_momentum=0.9, weight_decay=0.3)
    optimizer = build_optimizer(ours, config)
    matrices = {path: p for path, p in ours.named_parameters() if path.startswith("blocks.") and p.ndim == 2}
    weights = {path: p.detach().clone() for path, p in matrices.items()}
    averages = {path: torch.zeros_like(p) for path, p in matrices.items()}
    for step in range(4):
        set_random_gradients(ours, seed=step)
        optimizer.step()
        for path, p in matrices.items():
            rows, columns = p.shape
            averages[path] = 0.9 * averages[path] + 0.1 * p.grad
            update = 0.9 * averages[path] + 0.1 * p.grad
            direction = newton_schulz([update[None]])[0][0]
            decayed = weights[path] * (1 - 0.05 * 0.3)
            weights[path] = decayed - 0.05 * math.sqrt(max(1, rows / columns)) * direction
            assert_close(p.data, weights[path], atol=1e-5, rtol=1e-4, msg=path)


def test_muon_equals_that_of_torch_where_both_orthogonalize_fully(monkeypatch):
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no torch.optim.Muon")
    # The two use different polynomials that stop early. With the classic one, which converges, both must
    # agree up to the bfloat16 of PyTorch's.
    classic, rounds = (1.875, -1.25, 0.375), 40
    monkeypatch.setattr(optimizer_module, "NS_COEFFICIENTS", classic)
    monkeypatch.setattr(optimizer_module, "NS_STEPS", rounds)
    ours = network()
    theirs = copy.deepcopy(ours)
    optimizer = build_optimizer(ours, OptimizerConfig(name="muon", muon_lr=0.05, muon_momentum=0.9, weight_decay=0.3))
    reference = torch.optim.Muon(
        [p for p in theirs.blocks.parameters() if p.ndim == 2],
        lr=0.05,
        momentum=0.9,
        weight_decay=0.3,
        ns_coefficients=classic,
        ns_steps=rounds,
        adjust_lr_fn="original",
    )
    for step in range(3):
        before = [p.detach().clone() for p in ours.blocks.parameters()]
        for gpt in (ours, theirs):
            set_random_gradients(gpt, seed=step)
        optimizer.step()
        reference.step()
        for old, p, q in zip(before, ours.blocks.parameters(), theirs.blocks.parameters(), strict=True):
            if p.ndim == 2:
                assert (p - q).norm() < 0.03 * (p - old).norm()
        theirs.load_state_dict(ours.state_dict())


# One optimizer


@pytest.mark.parametrize("name", NAMES)
def test_loss_falls_on_a_batch_it_sees_again_and_again(name):
    gpt = network()
    optimizer = build_optimizer(gpt, OptimizerConfig(name=name, lr=0.01))
    losses = [learn(gpt, optimizer, steps=1)[0] for _ in range(40)]
    assert losses[0] == pytest.approx(math.log(30), rel=0.02)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_state_continues_bit_for_bit(name):
    whole = network()
    whole_optimizer = build_optimizer(whole, OptimizerConfig(name=name))
    expected = learn(whole, whole_optimizer, steps=8)

    stopped = network()
    optimizer = build_optimizer(stopped, OptimizerConfig(name=name))
    losses = learn(stopped, optimizer, steps=4)
    file = io.BytesIO()
    torch.save({"network": stopped.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    resumed = GPT(GPTConfig(**TINY))
    resumed.load_state_dict(saved["network"])
    optimizer = build_optimizer(resumed, OptimizerConfig(name=name))
    optimizer.load_state_dict(saved["optimizer"])
    assert losses + learn(resumed, optimizer, steps=4, first=4) == expected
    assert same(resumed, whole)


@pytest.mark.parametrize("name", NAMES)
def test_copied_optimizer_continues_bit_for_bit(name):
    gpt = network()
    optimizer = build_optimizer(gpt, OptimizerConfig(name=name))
    learn(gpt, optimizer, steps=2)
    twin, twin_optimizer = copy.deepcopy((gpt, optimizer))
    assert learn(gpt, optimizer, steps=2) == learn(twin, twin_optimizer, steps=2)
    assert same(gpt, twin)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_scheduled_and_cleared_like_any_optimizer(name):
    gpt, config = (
        network(),
        OptimizerConfig(name=name, lr=0.01, muon_lr=0.04, warmup_fraction=0.25, cooldown_fraction=0.5),
    )
    optimizer = build_optimizer(gpt, config)
    assert isinstance(optimizer, torch.optim.Optimizer)
    peaks = [0.04 if group["muon"] else 0.01 for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_stable_decay(step / 8, config))
    for factor in (0, 0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([factor * peak for peak in peaks])
        before = copy.deepcopy(gpt)
        learn(gpt, optimizer, steps=1)
        assert same(gpt, before) == (factor == 0)
        schedule.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in gpt.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_closure_is_called_with_gradients_on_and_its_loss_returned(name):
    gpt = network()
    optimizer = build_optimizer(gpt, OptimizerConfig(name=name))
    before = copy.deepcopy(gpt)

    def closure() -> Tensor:
        loss = gpt(torch.arange(8)[None]).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(before(torch.arange(8)[None]).square().mean().item())
    assert not same(gpt, before)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_without_gradient_stay(name):
    gpt = network()
    optimizer = build_optimizer(gpt, OptimizerConfig(name=name))
    before = copy.deepcopy(gpt)
    optimizer.step()
    assert same(gpt, before)
    set_random_gradients(gpt.blocks[1], seed=0)
    optimizer.step()
    assert same(gpt.blocks[0], before.blocks[0])
    assert not any(
        torch.equal(p, q) for p, q in zip(gpt.blocks[1].parameters(), before.blocks[1].parameters(), strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_gradient_scaler_changes_no_step_and_skips_an_infinite_one(name):
    plain, scaled = network(), network()
    optimizers = [build_optimizer(gpt, OptimizerConfig(name=name)) for gpt in (plain, scaled)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(3):
        for gpt in (plain, scaled):
            set_random_gradients(gpt, seed)
        scaler.scale(torch.zeros(()))  # a scaler wakes up with the first loss it scales
        for p in scaled.parameters():
            p.grad *= 1024
        optimizers[0].step()
        scaler.step(optimizers[1])
        scaler.update()
        assert same(plain, scaled)
    before = copy.deepcopy(scaled)
    for p in scaled.parameters():
        p.grad.fill_(math.inf)
    scaler.step(optimizers[1])
    assert same(scaled, before)


# The schedule


def test_learning_rate_grows_stays_and_falls_to_zero():
    config = OptimizerConfig(warmup_fraction=0.1, cooldown_fraction=0.4)
    factors = [warmup_stable_decay(step / 1000, config) for step in range(1001)]
    assert factors[0] == factors[1000] == 0
    assert factors[50] == pytest.approx(0.5)
    assert factors[800] == pytest.approx(0.5)
    assert set(factors[101:600]) == {1.0}
    assert factors[:100] == sorted(set(factors[:100]))
    assert factors[600:] == sorted(set(factors[600:]), reverse=True)


def test_warm_up_counts_the_step_it_is_for_and_cool_down_what_is_over_so_every_step_learns():
    config = OptimizerConfig(warmup_fraction=0.2, cooldown_fraction=0.4)
    factors = [warmup_stable_decay(step / 10, config, (step + 1) / 10) for step in range(10)]
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    assert warmup_stable_decay(0.0, OptimizerConfig(), 1.0) == 1.0  # the only step of its run


@pytest.mark.parametrize(
    ("warmup", "cooldown", "expected"),
    [
        (0, 0, [1, 1, 1, 1, 1]),
        (0, 0.5, [1, 1, 1, 0.5, 0]),
        (0.5, 0, [0, 0.5, 1, 1, 1]),
        (0.5, 0.5, [0, 0.5, 1, 0.5, 0]),
    ],
)
def test_warmup_and_cooldown_may_be_absent_or_fill_the_run(warmup, cooldown, expected):
    config = OptimizerConfig(warmup_fraction=warmup, cooldown_fraction=cooldown)
    assert [warmup_stable_decay(progress, config) for progress in (0, 0.25, 0.5, 0.75, 1)] == pytest.approx(expected)


def test_learning_rate_is_never_negative():
    assert warmup_stable_decay(1.01, OptimizerConfig()) == 0  # a time limit may be overrun


# The config


@pytest.mark.parametrize("name", NAMES)
def test_yaml_file_gives_the_optimizer_of_its_name(name):
    assert compose("train", [f"optimizer={name}"]).optimizer.name == name


def test_each_optimizer_has_a_file_and_each_file_an_optimizer():
    files = {yaml.safe_load(path.read_text())["name"] for path in (CONFIG_DIR / "optimizer").glob("*.yaml")}
    assert files == set(OPTIMIZERS)
    for optimizer in OPTIMIZERS.values():  # its rates are keys
        assert set(optimizer.learning_rates) <= {field.name for field in dataclasses.fields(OptimizerConfig)}


def test_name_of_an_optimizer_is_checked_without_torch():
    code = (
        "import sys; from training.config import OptimizerConfig; OptimizerConfig(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT).returncode == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "nonsense"}, ["name is 'nonsense'", "adamw, muon"]),
        ({"lr": 0.0}, ["optimizer.lr is 0.0", "above 0"]),
        ({"lr": math.nan}, ["optimizer.lr is nan"]),
        ({"muon_lr": -0.1}, ["muon_lr is -0.1", "above 0"]),
        ({"embedding_lr": 0.0}, ["optimizer.embedding_lr is 0.0", "above 0"]),
        ({"embedding_lr": -0.02}, ["optimizer.embedding_lr is -0.02", "above 0"]),
        ({"embedding_lr": math.nan}, ["optimizer.embedding_lr is nan", "above 0"]),
        ({"embedding_lr": math.inf}, ["optimizer.embedding_lr is inf", "above 0"]),
        ({"lr": math.inf}, ["optimizer.lr is inf"]),
        ({"muon_momentum": 1.0}, ["muon_momentum is 1.0", "below 1"]),
        ({"beta1": -0.1}, ["beta1 is -0.1", "at least 0"]),
        ({"beta2": 1.0}, ["beta2 is 1.0", "below 1"]),
        ({"weight_decay": -1.0}, ["weight_decay is -1.0", "at least 0"]),
        ({"warmup_fraction": -0.1}, ["warmup_fraction -0.1", "at least 0"]),
        (
            {"warmup_fraction": 0.6, "cooldown_fraction": 0.5},
            ["warmup_fraction 0.6", "cooldown_fraction 0.5", "at most 1"],
        ),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_config_that_cannot_work_is_refused_by_name_and_value(fields, said):
    with pytest.raises(UserError) as refusal:
        OptimizerConfig(**fields)
    assert "\n" not in str(refusal.value)
    assert [part for part in said if part not in str(refusal.value)] == []
