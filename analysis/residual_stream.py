"""The residual stream: recorded at every layer, continued from any layer, and scored against the next tokens.

Every function calls the blocks of the network themselves, so an edited `Block.forward` is used as edited.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.gpt import GPT
from model.layers import Rope

MAX_LOGITS = 1 << 19  # computed at once: 2 MB in float32, which stay in the cache of a processor


def residual_stream(network: GPT, ids: Tensor) -> tuple[list[Tensor], Rope | None]:
    """Runs the network and keeps the residual stream.

    Args:
        ids: (B, T) token ids.

    Returns:
        L + 1 tensors (B, T, C): after the embedding, and after each block. And the RoPE tables, for `run_blocks`.
    """
    x, rope = network.embed(ids)
    stream = [x]
    for block in network.blocks:
        x = block(x, rope)
        stream.append(x)
    return stream, rope


def run_blocks(network: GPT, x: Tensor, rope: Rope | None, first: int) -> Tensor:
    """Runs the blocks first, first + 1, ... on the residual stream before block `first`: (B, T, C) -> (B, T, C)."""
    for block in network.blocks[first:]:
        x = block(x, rope)
    return x


@dataclass(frozen=True)
class LayerOutputs:
    """What one block adds to the residual stream, before the output projection of attention mixes the heads."""

    heads: Tensor
    """(B, T, H, D), the input of `attention.out_proj`: head h contributes its rows to columns h D ... (h + 1) D - 1."""
    mlp: Tensor
    """(B, T, C), the output of the MLP."""


def layer_outputs(network: GPT, ids: Tensor) -> list[LayerOutputs]:
    """Runs the network on ids (B, T) and records the outputs of all heads and MLPs with forward hooks."""
    heads, mlps, hooks = {}, {}, []
    for layer, block in enumerate(network.blocks):

        def record_heads(module, args, layer=layer) -> None:
            heads[layer] = args[0].unflatten(-1, (network.config.num_heads, -1))

        def record_mlp(module, args, output, layer=layer) -> None:
            mlps[layer] = output

        hooks.append(block.attention.out_proj.register_forward_pre_hook(record_heads))
        hooks.append(block.mlp.register_forward_hook(record_mlp))
    try:
        network.hidden_states(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return [LayerOutputs(heads[layer], mlps[layer]) for layer in range(len(network.blocks))]


def token_losses(network: GPT, x: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every next token, in nats, without holding all logits: (N, T).

    Args:
        x: residual stream, (N, T, C), to which the final norm and the output layer are applied.
        targets: (N, T) token ids.
    """
    rows = max(1, MAX_LOGITS // network.config.vocab_size)
    pieces = zip(x.flatten(0, 1).split(rows), targets.flatten().split(rows), strict=True)
    losses = [F.cross_entropy(network.logits(piece).float(), target, reduction="none") for piece, target in pieces]
    return torch.cat(losses).view(targets.shape)
