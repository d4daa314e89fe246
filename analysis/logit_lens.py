"""The logit lens: what would the network predict if it ended after this layer?

nostalgebraist 2020, "interpreting GPT: the logit lens" (lesswrong.com/posts/AcKRB8wDpdaN6v6ru). The final norm and the
output layer are applied to the residual stream after the embedding and after every block. Early layers were not
trained to be read like that, so a high loss there does not mean that they know nothing.
"""

import torch
from torch import Tensor

from analysis.residual_stream import residual_stream, token_losses
from model.gpt import GPT
from sampling.decoder import evaluating


@torch.inference_mode()
def logit_lens(network: GPT, tokens: Tensor) -> Tensor:
    """Logits of the next token after every layer.

    Args:
        tokens: (B, T) token ids.

    Returns:
        (L + 1, B, T, vocab_size): after the embedding and after each of the L blocks; the last are the network's own.
    """
    with evaluating(network):
        stream, _ = residual_stream(network, tokens)
        return torch.stack([network.logits(x) for x in stream])


@torch.inference_mode()
def lens_losses(network: GPT, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token after every layer, in nats per token, without holding all logits.

    Args:
        tokens: (N, T + 1) token ids, the first T as inputs and the last T as targets.

    Returns:
        (L + 1,): after the embedding and after each of the L blocks.
    """
    with evaluating(network):
        stream, _ = residual_stream(network, tokens[:, :-1])
        return torch.stack([token_losses(network, x, tokens[:, 1:]).mean() for x in stream])
