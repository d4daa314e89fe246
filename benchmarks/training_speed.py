"""Speed of a training step, relative to its matrix products alone and to Hugging Face's GPT-2.

    python -m benchmarks.training_speed [key=value ...]      the keys: configs/training_speed.yaml

Measures three steps on the CPU in float32: that of the default run, and those of a GPT-2 with 4 layers, 4 heads and
width 128 at two batch shapes. If the processor has bfloat16 units, the default step is also measured with bfloat16
products, which train.py then uses. A step is forward, backward and optimizer in a plain loop, without data loading or
logging.

The share is the speed of the step, divided by that of its matrix products alone. The speed of the step is its FLOPs by
formula (model/flops.py) divided by its time, which includes the optimizer, although the optimizer's FLOPs are not
counted. The products are those of the forward and backward pass, with the same shapes, type and library.

Hugging Face's model is GPT2LMHeadModel with the same shapes, fused attention, the same loss and torch.optim.AdamW, with
and without its fused kernel. All alternate, one round each; figures are medians over rounds. The last line is JSON.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.hugging_face import check_transformers_installed, hugging_face_gpt2
from configs.compose import compose
from configs.entry_point import entry_point
from configs.schema import TrainingSpeedConfig
from model import kernels
from model.config import GPTConfig
from model.flops import train_step_flops
from model.gpt import GPT
from model.kernels.bfloat16 import BF16_MATMUL, has_bf16_units, matmul_precision
from model.kernels.cross_entropy import CHUNK_ROWS
from model.kernels.onednn import onednn_is_faster, onednn_linear_no_grad, use_onednn_for_matmul
from model.layers import Linear
from system.machine import machine
from system.memory import disable_malloc_trim
from system.text import pluralize
from training.config import OptimizerConfig
from training.optim import build_optimizer

WARMUP_STEPS, STEPS, ROUNDS = 5, 15, 9
PROMISED_SHARE, PROMISED_RATIO, PROMISED_COMPILED_RATIO = 0.55, 1.3, 1.2


@dataclass(frozen=True)
class Case:
    """A network, its optimizer, and the shape of a batch."""

    name: str
    config: GPTConfig
    optimizer: OptimizerConfig
    batch_size: int
    precision: str = "32-true"

    @property
    def tokens(self) -> int:
        """Tokens per batch."""
        return self.batch_size * self.config.context_length

    def batch(self) -> tuple[Tensor, Tensor]:
        """Random inputs and targets, (B, T) each."""
        ids = torch.randint(self.config.vocab_size, (self.batch_size, self.config.context_length + 1))
        return ids[:, :-1], ids[:, 1:]


def cases(vocab_size: int) -> list[Case]:
    """The default run, and two GPT-2 shapes to compare with Hugging Face."""
    train = compose("train", [])
    default = replace(train.model, vocab_size=vocab_size)
    optimizer, batch_size = train.optimizer, train.data.batch_size
    first = [Case("default", default, optimizer, batch_size)]
    if has_bf16_units():
        first.append(Case("its bfloat16", default, optimizer, batch_size, BF16_MATMUL))
    adamw = OptimizerConfig(name="adamw", lr=1e-3)
    shapes = ((12, 64), (8, 256))
    return first + [
        Case(f"gpt2 {B} x {T}", GPTConfig(vocab_size, T, num_layers=4, num_heads=4, d_model=128), adamw, B)
        for B, T in shapes
    ]


# A step


def our_step(case: Case, compiled: bool = False) -> Callable[[], None]:
    """Returns a function that runs one training step of this project."""
    network = GPT(case.config)
    loss_of = torch.compile(network.loss) if compiled else network.loss
    optimizer, (inputs, targets) = build_optimizer(network, case.optimizer), case.batch()

    def step() -> None:
        with matmul_precision(case.precision):
            loss = loss_of(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def hugging_face_step(case: Case, fused: bool | None = None, compiled: bool = False) -> Callable[[], None]:
    """Returns a function that runs one training step of Hugging Face's model. `fused` is AdamW's."""
    network = hugging_face_gpt2(case.config).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=case.optimizer.lr, fused=fused)
    inputs, targets = case.batch()

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(network(inputs, use_cache=False).logits.flatten(0, 1), targets.flatten())

    if compiled:
        loss_of = torch.compile(loss_of)

    def step() -> None:
        loss_of(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# The products of a step


@dataclass(frozen=True)
class Product:
    """One call of a matrix product: of x (..., K) and w^T, w (M, K), or of (B H, T, K) and (B H, K, M) in attention."""

    run: Callable[[], Tensor]
    flops: int


def step_products(case: Case) -> tuple[list[Product], list[Product]]:
    """All matrix products of one step: those of linear layers, and those of attention."""
    network = GPT(case.config)
    linear = []
    for layer in network.modules():
        if isinstance(layer, Linear):
            # model/kernels/cross_entropy.py makes the output layer's in chunks.
            rows = CHUNK_ROWS if layer is network.lm_head and case.config.logit_soft_cap is None else case.tokens
            for first in range(0, case.tokens, rows):
                linear += linear_products(min(rows, case.tokens - first), layer, case.precision)
    return linear, [product for _ in network.blocks for product in attention_products(case)]


def linear_products(rows: int, layer: Linear, precision: str) -> Iterator[Product]:
    """Products of a linear layer: forward, and the gradients of inputs and weights."""
    dtype = torch.bfloat16 if precision == BF16_MATMUL else torch.float32
    weight = layer.weight.detach().to(dtype)
    x, grad = torch.randn(rows, layer.in_features).to(dtype), torch.randn(rows, layer.out_features).to(dtype)
    multiply = onednn_linear_no_grad if dtype == torch.float32 and onednn_is_faster() else F.linear
    for run in (lambda: multiply(x, weight), lambda: multiply(grad, weight.t()), lambda: product(grad.t(), x)):
        yield Product(run, 2 * rows * layer.in_features * layer.out_features)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product a b, batched or not, with the library that is faster on this processor."""
    with use_onednn_for_matmul():
        return a @ b


def attention_products(case: Case) -> Iterator[Product]:
    """Products of one attention layer, over all pairs of tokens: Q K^T, weights V, and the four gradients."""
    c = case.config
    heads, T, D = case.batch_size * c.num_heads, c.context_length, c.head_dim
    wide, narrow = torch.randn(heads, T, T), torch.randn(heads, T, D)  # (B H, T, T), (B H, T, D)
    for a, b in 2 * [(narrow, narrow.mT)] + 2 * [(wide, narrow)] + 2 * [(wide.mT, narrow)]:
        yield Product(lambda a=a, b=b: product(a, b), 2 * heads * T * T * D)


def run_all(products: list[Product]) -> Callable[[], None]:
    """Returns a function that runs all products in order."""

    def step() -> None:
        for product in products:
            product.run()

    return step


# Measuring


def medians_in_turns(steps: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Milliseconds per step of each function in every round."""
    for step in steps.values():
        for _ in range(WARMUP_STEPS):
            step()
    rounds = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            step()  # refills the processor's caches
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            rounds[name].append(1000 * (time.perf_counter() - start) / STEPS)
    return rounds


def measure(case: Case, against: bool, compiled: bool) -> dict[str, float]:
    """Measures step times, speeds, the share, and the ratio to Hugging Face."""
    linear, attention = step_products(case)
    steps = {"ours": our_step(case), "linear": run_all(linear), "attention": run_all(attention)}
    if against:
        steps |= {"theirs": hugging_face_step(case), "theirs_fused": hugging_face_step(case, fused=True)}
        if compiled:
            steps["ours_compiled"] = our_step(case, compiled=True)
            steps["theirs_compiled"] = hugging_face_step(case, fused=True, compiled=True)
    rounds = medians_in_turns(steps)
    ms = {name: statistics.median(each) for name, each in rounds.items()}
    flops = case.batch_size * train_step_flops(case.config, case.config.context_length, "sdpa")
    linear_flops, attention_flops = (sum(product.flops for product in some) for some in (linear, attention))
    found = {
        **{f"{name}_ms": value for name, value in ms.items()},
        "step_gflops": flops / 1e9,
        "gflops_per_second": flops / ms["ours"] / 1e6,
        "products_gflops_per_second": (linear_flops + attention_flops) / (ms["linear"] + ms["attention"]) / 1e6,
        "linear_gflops_per_second": linear_flops / ms["linear"] / 1e6,
    }
    found["share"] = found["gflops_per_second"] / found["products_gflops_per_second"]
    found["share_of_linear"] = found["gflops_per_second"] / found["linear_gflops_per_second"]
    for name, ours in (("theirs", "ours"), ("theirs_fused", "ours"), ("theirs_compiled", "ours_compiled")):
        if name in rounds:
            pairs = zip(rounds[name], rounds[ours], strict=True)
            found[f"{name}_over_ours"] = statistics.median(theirs / own for theirs, own in pairs)
    return found


def main(config: TrainingSpeedConfig) -> None:
    """Prints measured and promised figures, and one JSON line. Raises UserError."""
    check_transformers_installed()
    torch.manual_seed(0)
    kernels.set_enabled(config.kernels)
    if config.keep_memory:
        disable_malloc_trim()
    print(f"vocabulary {config.vocab_size:,}; float32 on {pluralize(torch.get_num_threads(), 'thread')}; "
          f"medians of {ROUNDS} rounds of {STEPS} steps, in turns\n")  # fmt: skip
    results = {}
    print(f"{'':14} {'':>8} {'GFLOP/s of':^28}  {'share, of':^18}")
    print(f"{'':14} {'step, ms':>8} {'step':>8} {'products':>9} {'linear':>9}  {'products':>9} {'linear':>8}")
    for case in cases(config.vocab_size):
        results[case.name] = found = measure(case, case.name.startswith("gpt2"), config.compiled)
        speeds = (found[f"{name}gflops_per_second"] for name in ("", "products_", "linear_"))
        print(f"{case.name:14} {found['ours_ms']:8.2f}" + " {:8.0f} {:9.0f} {:9.0f}".format(*speeds)
              + f"  {found['share']:9.1%} {found['share_of_linear']:8.1%}", flush=True)  # fmt: skip
    print(f"promised: {PROMISED_SHARE:.0%} of all products; linear: those of the linear layers alone\n")
    for name, found in results.items():
        for side, words, promised in (
            ("theirs", "with AdamW as it comes", PROMISED_RATIO),
            ("theirs_fused", "with fused AdamW", PROMISED_RATIO),
            ("theirs_compiled", "with fused AdamW, both compiled", PROMISED_COMPILED_RATIO),
        ):
            if f"{side}_ms" in found:
                ours = found["ours_compiled_ms" if side == "theirs_compiled" else "ours_ms"]
                print(f"{name}: {ours:.2f} ms, Hugging Face {words} {found[f'{side}_ms']:.2f} ms, "
                      f"{found[f'{side}_over_ours']:.2f} times ours; promised: at least {promised}")  # fmt: skip
    rounded = {name: {key: float(f"{value:.4g}") for key, value in found.items()} for name, found in results.items()}
    print(json.dumps({"benchmark": "training_speed", "machine": machine(), "threads": torch.get_num_threads(),
                      "vocab_size": config.vocab_size, **rounded}))  # fmt: skip


if __name__ == "__main__":
    entry_point(main, "training_speed")
