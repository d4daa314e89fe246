"""Direct logit attribution: which parts of the network raise the logit of a token, and by how much?

Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits" (transformer-circuits.pub/2021/framework). The
last residual stream is a sum: embeddings, one vector per head, one per MLP, and biases. The final norm divides it by
one number, its scale, and the output layer is linear. With that number fixed, each logit is the sum of what the parts
contribute. This is the direct effect only: what a part does through later layers counts as theirs.
"""

import torch
from torch import Tensor, nn

from analysis.residual_stream import layer_outputs, residual_stream
from model.gpt import GPT
from sampling.decoder import evaluating
from system.errors import UserError


@torch.inference_mode()
def logit_attribution(
    network: GPT, ids: Tensor, token: int, versus: int | None = None, position: int = -1
) -> dict[str, float]:
    """Splits the logit of a token into the contributions of the parts of the network.

    Args:
        ids: (T,) token ids, the text.
        token: the next token whose logit is explained.
        versus: explain the difference to the logit of this token instead.
        position: of the token after which `token` is predicted. -1: the last.

    Returns:
        Contributions by label, in the order of the network: "token embedding", "position embedding", "bigram
        embedding", "embedding norm bias", "layer 0 head 0", "layer 0 attention bias", "layer 0 MLP", ..., "final norm
        bias", each only if the network has it. They sum to the logit, before a soft cap.

    Raises:
        UserError: the blocks were edited and do more than add the outputs of attention and MLP.
    """
    with evaluating(network):
        stream, _ = residual_stream(network, ids[None])
        x = stream[-1][0, position]  # (C,)
        parts = residual_parts(network, ids, position)  # C numbers each
    if not torch.allclose(sum(parts.values()), x, rtol=1e-3, atol=1e-3 * x.abs().max().item()):
        raise UserError(
            "The attribution needs blocks that add the outputs of attention and MLP to their input, but those of this "
            "network do something else. Use ablation instead, for example ablate=0.0."
        )
    direction = network.lm_head.weight[token]  # (C,)
    if versus is not None:
        direction = direction - network.lm_head.weight[versus]
    norm = network.final_norm
    contributions = {label: scale_like(norm, part, x) @ direction for label, part in parts.items()}
    if getattr(norm, "bias", None) is not None:
        contributions["final norm bias"] = norm.bias @ direction
    return {label: value.item() for label, value in contributions.items()}


def residual_parts(network: GPT, ids: Tensor, position: int = -1) -> dict[str, Tensor]:
    """The vectors (C,) that sum to the last residual stream at a position of the text ids (T,), by label."""
    embeddings = {"token embedding": network.token_embedding(ids[position])}
    if network.config.positions == "learned":
        embeddings["position embedding"] = network.position_embedding.weight[: len(ids)][position]
    if network.bigram_embedding is not None:
        embeddings["bigram embedding"] = network.bigram_embedding(ids[None])[0, position]
    norm, x = network.embedding_norm, sum(embeddings.values())
    parts = {label: scale_like(norm, part, x) for label, part in embeddings.items()}
    if getattr(norm, "bias", None) is not None:
        parts["embedding norm bias"] = norm.bias
    for layer, outputs in enumerate(layer_outputs(network, ids[None])):
        out_proj = network.blocks[layer].attention.out_proj
        heads = outputs.heads[0, position]  # (H, D)
        weights = out_proj.weight.unflatten(1, heads.shape)  # (C, H, D)
        for head, vector in enumerate(torch.einsum("hd,chd->hc", heads, weights)):
            parts[f"layer {layer} head {head}"] = vector
        if out_proj.bias is not None:
            parts[f"layer {layer} attention bias"] = out_proj.bias
        parts[f"layer {layer} MLP"] = outputs.mlp[0, position]
    return parts


def scale_like(norm: nn.Module, part: Tensor, x: Tensor) -> Tensor:
    """What `part`, one summand of x, becomes in norm(x), without the norm's bias. Both (C,)."""
    if isinstance(norm, nn.LayerNorm):
        part, scale = part - part.mean(), torch.rsqrt(x.var(correction=0) + norm.eps)
    elif isinstance(norm, nn.RMSNorm):
        scale = torch.rsqrt(x.square().mean() + norm.eps)
    else:  # nn.Identity: no norm
        return part
    return part * scale if norm.weight is None else part * scale * norm.weight
