"""Direct logit attribution: which parts of the network raise the logit of a token, and by how much?

Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits" (transformer-circuits.pub/2021/framework). The
last residual stream is a sum: embeddings, one vector per head, one per MLP, and biases. The final norm divides it by
one number, its scale, and the output layer is linear. With that number fixed, each logit is the sum of what the parts
contribute. This is the direct effect only: what a part does through later layers counts as theirs.
"""

from collections.abc import Iterator

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
    tokens = torch.full_like(ids, token)
    contributions = logit_attributions(network, ids, tokens, None if versus is None else torch.full_like(ids, versus))
    return {label: values[position].item() for label, values in contributions.items()}


@torch.inference_mode()
def logit_attributions(network: GPT, ids: Tensor, tokens: Tensor, versus: Tensor | None = None) -> dict[str, Tensor]:
    """`logit_attribution` at every position of a text.

    Args:
        ids: (T,) token ids, the text.
        tokens: (T,), for each position the next token whose logit is explained.
        versus: (T,), explain the difference to the logits of these tokens instead.

    Returns:
        Contributions (T,) by label.

    Raises:
        UserError: the blocks were edited and do more than add the outputs of attention and MLP.
    """
    directions = network.lm_head.weight[tokens]  # (T, C)
    if versus is not None:
        directions = directions - network.lm_head.weight[versus]
    norm, contributions = network.final_norm, {}
    with evaluating(network):
        stream, _ = residual_stream(network, ids[None])
        x, total = stream[-1][0], torch.zeros_like(stream[-1][0])  # (T, C)
        for label, part in residual_parts(network, ids):
            contributions[label] = (scale_like(norm, part, x) * directions).sum(-1)
            total += part
    if not torch.allclose(total, x, rtol=1e-3, atol=1e-3 * x.abs().max().item()):
        raise UserError(
            "The attribution needs blocks that add the outputs of attention and MLP to their input, but those of this "
            "network do something else. Use ablation instead, for example ablate=0.0."
        )
    if getattr(norm, "bias", None) is not None:
        contributions["final norm bias"] = directions @ norm.bias
    return contributions


def residual_parts(network: GPT, ids: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The vectors that sum to the last residual stream of a text ids (T,), each with its label: (T, C) or (C,)."""
    embeddings = {"token embedding": network.token_embedding(ids)}  # (T, C)
    if network.config.positions == "learned":
        embeddings["position embedding"] = network.position_embedding.weight[: len(ids)]
    if network.bigram_embedding is not None:
        embeddings["bigram embedding"] = network.bigram_embedding(ids[None])[0]
    norm, x = network.embedding_norm, sum(embeddings.values())
    for label, part in embeddings.items():
        yield label, scale_like(norm, part, x)
    if getattr(norm, "bias", None) is not None:
        yield "embedding norm bias", norm.bias
    for layer, outputs in enumerate(layer_outputs(network, ids[None])):
        out_proj = network.blocks[layer].attention.out_proj
        weights = out_proj.weight.unflatten(1, outputs.heads.shape[2:])  # (C, H, D)
        for head in range(weights.size(1)):
            yield f"layer {layer} head {head}", outputs.heads[0, :, head] @ weights[:, head].T  # (T, C)
        if out_proj.bias is not None:
            yield f"layer {layer} attention bias", out_proj.bias
        yield f"layer {layer} MLP", outputs.mlp[0]


def scale_like(norm: nn.Module, part: Tensor, x: Tensor) -> Tensor:
    """What `part`, one summand of x, becomes in norm(x), without the norm's bias. (T, C) or (C,), and (T, C)."""
    if isinstance(norm, nn.LayerNorm):
        part = part - part.mean(-1, keepdim=True)
        scale = torch.rsqrt(x.var(-1, correction=0, keepdim=True) + norm.eps)
    elif isinstance(norm, nn.RMSNorm):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    else:  # nn.Identity: no norm
        return part
    return part * scale if norm.weight is None else part * scale * norm.weight
