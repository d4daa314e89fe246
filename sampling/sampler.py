"""Autoregressive sampling, and scoring of a given text. The model's forward passes are in sampling/decoder.py."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from model.gpt import GPT
from sampling.config import SamplingConfig
from sampling.decoder import Decoder, context_shift, evaluating


def generate(network: GPT, prompt: list[int], config: SamplingConfig, sample_index: int = 0) -> Iterator[int]:
    """Continues a prompt, yielding each new token id as soon as it is sampled. `generate_batch` with one sample."""
    for ids, _ in generate_batch(Decoder(network), prompt, config, range(sample_index, sample_index + 1)):
        yield int(ids[0])


@torch.inference_mode()
def generate_batch(
    decoder: Decoder, prompt: list[int], config: SamplingConfig, samples: range
) -> Iterator[tuple[Tensor, Tensor]]:
    """Generates several continuations of a prompt in one batch.

    Each sample has its own random number generator, seeded with its index and config.seed. If the prompt is longer
    than the context, the model sees its last context_length tokens.

    Args:
        decoder: can be reused for the next prompt.
        prompt: token ids, at least one.
        samples: indices of the B samples.

    Yields:
        max_new_tokens times, as soon as they are sampled: the next ids (B,), int64, and the model's logits
        (B, vocab_size), float32, before temperature and filters.
    """
    logits = decoder.prefill(torch.tensor([prompt[-decoder.context_length :]], device=decoder.device))
    decoder.expand(len(samples))
    logits = logits.expand(len(samples), -1)  # (B, vocab_size)
    generators = [torch.Generator().manual_seed(config.seed * 1_000_003 + index) for index in samples]
    noise = torch.empty(len(samples), decoder.vocab_size)  # on the CPU: every device samples the same
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
    """Log-probabilities (B,) of ids (B,) under logits (B, vocab_size)."""
    return logits.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)


def sample_token(logits: Tensor, config: SamplingConfig, noise: Tensor, context: Tensor | None) -> Tensor:
    """Samples token ids (B,) from logits (B, vocab_size).

    Args:
        noise: (B, vocab_size), exponentially distributed. The argmax of probability / noise is token i with the
            probability of token i (the Gumbel-max trick). Rounding errors in probabilities rarely change the result.
        context: the tokens that the model sees, (B, T), for repetition_penalty.
    """
    if config.temperature == 0:
        return apply_repetition_penalty(logits, config, context).argmax(-1)
    return (unnormalized_probs(logits, config, context) / noise.to(logits.device, non_blocking=True)).argmax(-1)


def probabilities(logits: Tensor, config: SamplingConfig, context: Tensor | None = None) -> Tensor:
    """The distribution that `sample_token` samples from, of the shape of logits (..., vocab_size).

    Applies repetition_penalty, temperature, top_k, top_p and min_p, in this order. Filtered tokens have probability 0;
    the most likely token is never filtered.
    """
    probs = unnormalized_probs(logits, config, context)
    return probs / probs.sum(-1, keepdim=True)


def unnormalized_probs(logits: Tensor, config: SamplingConfig, context: Tensor | None) -> Tensor:
    """`probabilities` without normalization, which sampling does not need."""
    temperature = max(config.temperature, 1e-20)  # a much smaller one could overflow float32
    probs = (apply_repetition_penalty(logits, config, context) / temperature).softmax(-1)
    return probs.masked_fill_(probs < min_kept_prob(probs, config), 0) if config.filters else probs


def min_kept_prob(probs: Tensor, config: SamplingConfig) -> Tensor:
    """Probability of the least likely token that top_k, top_p and min_p leave: (..., vocab_size) -> (..., 1)."""
    vocab_size = probs.size(-1)
    ordered = probs.topk(min(config.top_k or vocab_size, vocab_size)).values  # (..., k), the most likely first
    least = ordered[..., -1:]
    if config.top_p is not None and config.top_p < 1:  # nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751
        sums = ordered.cumsum(-1)
        last = torch.searchsorted(sums, config.top_p * sums[..., -1:])  # (..., 1): the one that reaches top_p
        least = ordered.gather(-1, last.clamp_(max=ordered.size(-1) - 1))  # if all are NaN, it is past the end
    if config.min_p:  # Nguyen et al. 2024, arXiv:2407.01082
        least = torch.maximum(least, config.min_p * ordered[..., :1])
    return least


def apply_repetition_penalty(logits: Tensor, config: SamplingConfig, context: Tensor | None) -> Tensor:
    """Lowers the logits (..., vocab_size) of tokens in the context (..., T): Keskar et al. 2019, arXiv:1909.05858."""
    penalty = config.repetition_penalty
    if penalty == 1 or context is None:
        return logits
    found = logits.gather(-1, context) / penalty  # (..., T)
    return logits.scatter(-1, context, F.leaky_relu(found, penalty**2))  # divided where positive, multiplied elsewhere


@torch.inference_mode()
def token_logprobs(network: GPT, ids: Tensor) -> Tensor:
    """Log-probability of each token of a text, given the tokens before it.

    Each token is predicted from the same tokens as during generation. Once the context is full, these are between half
    of context_length and all of it. The network processes overlapping windows of the text, one forward pass each.

    Args:
        ids: (N,), N at least 2. The first token is not scored.

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
    # Every window but the first adds only its last `stride` tokens; an earlier window has scored the others.
    return torch.cat([found[0], found[1:, length - stride :].flatten()])[: len(inputs)]
