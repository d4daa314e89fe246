"""Workloads to measure: an attention pass and a training step, with a choice of attention implementation."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from model.attention import eager_attention, sdpa_attention
from model.config import GPTConfig
from model.gpt import GPT
from model.kernels.flex_attention import flex_sliding_window_attention
from model.kernels.sliding_window import attention_in_blocks
from model.layers import sliding_window_attention
from training.config import OptimizerConfig
from training.optim import build_optimizer

# "sliding_window" selects an implementation like the model does; the others are its two implementations on CUDA.
SLIDING_WINDOW = {
    "sliding_window": sliding_window_attention,
    "blocks": attention_in_blocks,
    "flex": flex_sliding_window_attention,
}


@dataclass(frozen=True)
class Workload:
    """A forward and a backward pass."""

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], None]  # of the output of forward; includes the optimizer in a training step

    def __call__(self) -> None:
        self.backward(self.forward())


def attention_pass(
    config: GPTConfig,
    implementation: str,
    context_length: int,
    sequences: int,
    device: str,
    dtype: torch.dtype = torch.float32,
) -> Workload:
    """Causal softmax(Q K^T / sqrt(D)) V of one layer and its gradients, without projections."""
    shape = (sequences, config.num_heads, context_length, config.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3))  # (B, H, T, D)
    upstream = torch.randn(shape, device=device, dtype=dtype)

    def forward() -> Tensor:
        if implementation == "sdpa":
            return sdpa_attention(q, k, v, causal=True)
        if implementation in SLIDING_WINDOW:
            return SLIDING_WINDOW[implementation](q, k, v, config.sliding_window)
        mask = torch.ones(context_length, context_length, dtype=torch.bool, device=device).tril()
        return eager_attention(q, k, v, mask)[0]

    def backward(output: Tensor) -> None:
        q.grad = k.grad = v.grad = None
        output.backward(upstream)

    return Workload(forward, backward)


def training_step(
    config: GPTConfig,
    optimizer_config: OptimizerConfig,
    implementation: str,
    context_length: int,
    sequences: int,
    device: str,
) -> Workload:
    """Forward pass, loss, backward pass and optimizer step of the whole model on random tokens."""
    window = config.sliding_window if implementation == "sliding_window" else None
    network = GPT(replace(config, context_length=context_length, sliding_window=window)).to(device)
    if implementation == "eager":
        for block in network.blocks:
            block.attention = EagerAttention(block.attention)
    optimizer = build_optimizer(network, optimizer_config)
    ids = torch.randint(config.vocab_size, (sequences, context_length + 1), device=device)

    def forward(ids: Tensor) -> Tensor:
        return network.loss(ids[:, :-1], ids[:, 1:])

    def backward(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    backward(forward(ids[:1, :9]))  # allocates the optimizer state
    return Workload(functools.partial(forward, ids), backward)


class EagerAttention(nn.Module):
    """Wraps an attention layer so that it computes its weights explicitly."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, **options) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.attention(x, **options, need_weights=True)[0]
