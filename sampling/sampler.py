"""Sampling the next token, and the next, and scoring a given text. What the model can see: sampling/decoder.py."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from model.gpt import GPT
from sampling.config import SamplingConfig
from sampling.decoder import Decoder, context_shift, evaluating


def generate(network: GPT, prompt: list[int], config: SamplingConfig, sample_index: int = 0) -> Iterator[int]:
    """Continues a prompt, yielding each new token id as soon as it is sampled: one sample of `generate_batch`."""
    for ids, _ in generate_batch(Decoder(network), prompt, config, range(sample_index, sample_index + 1)):
        yield int(ids[0])


@torch.inference_mode()
def generate_batch(
    decoder: Decoder, prompt: list[int], config: SamplingConfig, samples: range
) -> Iterator[tuple[Tensor, Tensor]]:
    """Continues a prompt several times at once. Each sample draws random numbers of its own, by its index and the seed.

    Of a prompt longer than the context the model sees the last context_length tokens.

    Args:
        decoder: made of a network; may serve again for the next prompt.
        prompt: token ids, at least one.
        samples: which samples these are, B of them.

    Yields:
        max_new_tokens times, as soon as they are sampled: the next ids (B,), int64, and the logits (B, vocab_size),
        float32, as the model gives them, before temperature and filters.
    """
    logits = decoder.prefill(torch.tensor([prompt[-decoder.context_length :]], device=decoder.device))
    decoder.expand(len(samples))
    logits = logits.expand(len(samples), -1)  # (B, vocab_size)
    generators = [torch.Generator().manual_seed(config.seed * 1_000_003 + index) for index in samples]
    noise = torch.empty(len(samples), decoder.vocab_size)  # drawn on the CPU: every device writes the same
    rows = noise.unbind()
    context = None
    for left in reversed(range(config.max_new_tokens)):
        logits = logits.float()
        if config.temperature > 0:
            for row, generator in zip(rows, generators, strict=True):
                row.exponential_(generator=generator)
        if config.repetition_penalty != 1:
            context = decoder.context
        ids = sample_token(logits, config, noise, context)  # (B,)
        yield ids, logits
        if left:
            logits = decoder.step(ids)


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Natural logarithms of the probabilities that logits (B, vocab_size) give to ids (B,) -> (B,)."""
    return logits.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)


def sample_token(logits: Tensor, config: SamplingConfig, noise: Tensor, context: Tensor | None) -> Tensor:
    """Token ids (B,) from logits (B, vocab_size).

    Args:
        noise: (B, vocab_size), exponentially distributed: the largest probability / noise is token i's with its
            probability (the Gumbel-max trick). A rounding error in a probability hardly ever changes the winner.
        context: the tokens that the model sees, (B, T), for repetition_penalty.
    """
    if config.temperature == 0:
        return apply_repetition_penalty(logits, config, context).argmax(-1)
    return (unnormalized_probs(logits, config, context) / noise.to(logits.device, non_blocking=True)).argmax(-1)


def probabilities(logits: Tensor, config: SamplingConfig, context: Tensor | None = None) -> Tensor:
    """What `sample_token` samples from: logits (..., vocab_size) -> the same shape, 0 for filtered tokens.

    In this order: repetition_penalty, temperature, top_k, top_p, min_p. The likeliest token always stays.
    """
    probs = unnormalized_probs(logits, config, context)
    return probs / probs.sum(-1, keepdim=True)


def unnormalized_probs(logits: Tensor, config: SamplingConfig, context: Tensor | None) -> Tensor:
    """`probabilities` before they are made to sum to 1, which sampling can do without."""
    temperature = max(config.temperature, 1e-20)  # by a much smaller one a float32 may overflow
    probs = (apply_repetition_penalty(logits, config, context) / temperature).softmax(-1)
    return probs.masked_fill_(probs < min_kept_prob(probs, config), 0) if config.filters else probs


def min_kept_prob(probs: Tensor, config: SamplingConfig) -> Tensor:
    """Probability of the least likely token that top_k, top_p and min_p leave: (..., vocab_size) -> (..., 1)."""
    vocab_size = probs.size(-1)
    ordered = probs.topk(min(config.top_k or vocab_size, vocab_size)).values  # (..., k), the likeliest first
    least = ordered[..., -1:]
    if config.top_p is not None and config.top_p < 1:  # nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751
        sums = ordered.cumsum(-1)
        last = torch.searchsorted(sums, config.top_p * sums[..., -1:])  # (..., 1): the one that makes up top_p
        least = ordered.gather(-1, last.clamp_(max=ordered.size(-1) - 1))  # of no numbers it would be none
    if config.min_p:  # Nguyen et al. 2024, arXiv:2407.01082
        least = torch.maximum(least, config.min_p * ordered[..., :1])
    return least


def apply_repetition_penalty(logits: Tensor, config: SamplingConfig, context: Tensor | None) -> Tensor:
    """Logits (..., vocab_size) with those of the tokens in the context, (..., T), made smaller (arXiv:1909.05858)."""
    penalty = config.repetition_penalty
    if penalty == 1 or context is None:
        return logits
    found = logits.gather(-1, context) / penalty  # (..., T)
    return logits.scatter(-1, context, F.leaky_relu(found, penalty**2))  # divided where positive, multiplied elsewhere


@torch.inference_mode()
def token_logprobs(network: GPT, ids: Tensor) -> Tensor:
    """How likely a text is: the natural logarithm of each token's probability, given those in view before it.

    What is in view is what was in view had the network written the text: past the context, between half and all
    of it. Stretches of the text go through the network in one pass each.

    Args:
        ids: (N,), N at least 2. The first token is only there to be looked at.

    Returns:
        (N - 1,) float32, on the CPU.
    """
    device = next(network.parameters()).device
    inputs = ids[:-1]
    length = min(network.config.context_length, len(inputs))
    stride = context_shift(network.config.context_length)
    strides = -(-(len(inputs) - length) // stride)
    windows = F.pad(inputs, (0, strides * stride + length - len(inputs))).unfold(0, length, stride)  # (W, length)
    targets = F.pad(ids[1:], (0, strides * stride + length - len(inputs))).unfold(0, length, stride)
    rows = max(1, (1 << 24) // (length * network.config.vocab_size))  # 64 MB of logits
    found = []
    for window, target in zip(windows.split(rows), targets.split(rows), strict=True):
        with evaluating(network):
            logits = network.forward(window.to(device)).float()  # (rows, length, vocab_size)
        found.append(-F.cross_entropy(logits.mT, target.to(device), reduction="none").cpu())  # (rows, length)
    found = torch.cat(found)
    # Each window but the first only adds its last `stride` tokens: those before have been in view of an earlier one.
    return torch.cat([found[0], found[1:, length - stride :].flatten()])[: len(inputs)]
