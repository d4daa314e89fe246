"""Ablation: how much worse does the network predict without an attention head, or without an MLP?

Attention maps show where a head looks, not whether the network needs it (Jain and Wallace 2019, arXiv:1902.10186).
Ablation measures that: the output of the head is replaced with its mean, which removes what it says about this token
and leaves what it always says, or with zero (Michel et al. 2019, arXiv:1905.10650). The increase of the loss includes
how later layers react to the change.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from analysis.residual_stream import residual_stream, run_blocks, token_losses
from model.gpt import GPT
from sampling.decoder import evaluating
from system.errors import UserError

REPLACEMENTS = ("mean", "zero")


@dataclass(frozen=True)
class AblationCosts:
    """Increase of the mean loss without a part of the network, in nats per token. Negative: better without it."""

    loss: float
    """Mean loss of the whole network."""
    heads: Tensor
    """(L, H): of each attention head."""
    mlps: Tensor
    """(L,): of each MLP."""


@contextmanager
def ablate(
    network: GPT, layer: int, head: int | None = None, mlp: bool = False, replacement: str | Tensor = "mean"
) -> Iterator[None]:
    """Context in which the output of a part is replaced, in every forward pass.

    The output of a head is the slice of D = head_dim entries that it contributes to the input of `out_proj`, whose bias
    belongs to no head. The output of an MLP includes the bias of its last layer.

    Args:
        layer: from 0.
        head: from 0. None: all heads of the layer.
        mlp: replace the output of the MLP instead.
        replacement: "mean" over all positions of all sequences of the forward pass; "zero"; or a tensor that
            broadcasts to (B, T, D).

    Raises:
        UserError: there is no such layer or head, or replacement is another string.
    """
    check_part(network, layer, head)
    if isinstance(replacement, str) and replacement not in REPLACEMENTS:
        raise UserError(f"replacement is {replacement!r}, but must be one of {', '.join(REPLACEMENTS)}.")
    block, columns = network.blocks[layer], slice(None)
    if head is not None and not mlp:
        D = block.attention.head_dim
        columns = slice(head * D, (head + 1) * D)

    def replaced(y: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        y, part = y.clone(), y[..., columns]
        if isinstance(replacement, Tensor):
            y[..., columns] = replacement
        else:
            y[..., columns] = part.flatten(0, -2).mean(0) if replacement == "mean" else 0
        return y

    if mlp:
        hook = block.mlp.register_forward_hook(lambda module, args, output: replaced(output))
    else:
        hook = block.attention.out_proj.register_forward_pre_hook(lambda module, args: (replaced(args[0]),))
    try:
        yield
    finally:
        hook.remove()


def check_part(network: GPT, layer: int, head: int | None = None) -> None:
    """Raises UserError if the network does not have the layer or head."""
    shape = network.config
    for name, value, count in (("layer", layer, shape.num_layers), ("head", head, shape.num_heads)):
        if value is not None and not 0 <= value < count:
            raise UserError(f"{name} is {value}, but this model has {name}s 0 to {count - 1}.")


@torch.inference_mode()
def ablation_costs(
    network: GPT, tokens: Tensor, replacement: str = "mean", progress: Callable[[list], Iterable] = iter
) -> AblationCosts:
    """Measures the importance of every attention head and every MLP, by ablating one at a time.

    An ablation leaves the layers before it as they are, so only the later ones run again.

    Args:
        tokens: (N, T + 1), int64, the first T as inputs and the last T as targets. "mean" is over all N * T positions.
        replacement: "mean" or "zero".
        progress: wraps the list of parts, as tqdm does, and shows how far the measurement is.
    """
    with evaluating(network):
        ids, targets = tokens[:, :-1], tokens[:, 1:]
        stream, rope = residual_stream(network, ids)  # L + 1 tensors (N, T, C)

        def loss_from(layer: int) -> float:
            return token_losses(network, run_blocks(network, stream[layer], rope, layer), targets).mean()

        loss = token_losses(network, stream[-1], targets).mean()
        heads = torch.zeros(network.config.num_layers, network.config.num_heads)
        mlps = torch.zeros(network.config.num_layers)
        num_layers, num_heads = heads.shape
        parts = [(layer, head) for layer in range(num_layers) for head in (*range(num_heads), None)]
        for layer, head in progress(parts):
            with ablate(network, layer, head, mlp=head is None, replacement=replacement):
                increase = loss_from(layer) - loss
            if head is None:
                mlps[layer] = increase
            else:
                heads[layer, head] = increase
    return AblationCosts(loss.item(), heads, mlps)
