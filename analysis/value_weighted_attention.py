"""Value-weighted attention: how long is the vector that a head moves from one token to another?

Kobayashi et al. 2020, "Attention is Not Only a Weight", arXiv:2004.10102. A head can attend to a token whose value
vector is almost zero, as to an attention sink, and then moves nothing. The weight times the norm of the projected value
vector shows what is added to the residual stream.
"""

import torch
from torch import Tensor, nn

from model.gpt import GPT
from sampling.decoder import evaluating


@torch.inference_mode()
def value_norms(network: GPT, ids: Tensor) -> Tensor:
    """Norms of the value vectors after the output projection, ||W_O^h v_j||, for ids (B, T): (L, B, H, T)."""
    norms, hooks = {}, []
    for layer, block in enumerate(network.blocks):

        def record(attention: nn.Module, args: tuple, layer=layer) -> None:
            heads, head_dim = attention.num_heads, attention.head_dim
            values = attention.project(args[0])[2]  # (B, G, T, D); positions do not change values
            values = values.repeat_interleave(heads // attention.num_kv_heads, dim=1)  # (B, H, T, D)
            weights = attention.out_proj.weight.unflatten(1, (heads, head_dim))  # (C, H, D)
            norms[layer] = torch.einsum("bhtd,chd->bhtc", values, weights).norm(dim=-1)  # (B, H, T)

        hooks.append(block.attention.register_forward_pre_hook(record))
    try:
        with evaluating(network):
            network.hidden_states(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([norms[layer] for layer in range(len(network.blocks))])


def value_weighted_maps(network: GPT, ids: Tensor) -> Tensor:
    """Attention weights times the norms of the projected values, for ids (B, T): (L, B, H, T, T).

    Rows do not sum to 1: the unit is that of the residual stream.
    """
    return torch.stack(network.attention_maps(ids)) * value_norms(network, ids).unsqueeze(-2)
