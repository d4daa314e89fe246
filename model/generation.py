"""Writing text, token by token."""

from collections.abc import Iterator

import torch
from torch import Tensor

from model.config import SamplingConfig
from model.gpt import GPT


@torch.inference_mode()
def generate(network: GPT, prompt: list[int], config: SamplingConfig, sample_index: int = 0) -> Iterator[int]:
    """Continues a prompt, yielding each new token id as soon as it is drawn.

    The model sees the last `context_length` tokens of prompt and text; what is older has no influence.

    Args:
        prompt: token ids, at least one.
        sample_index: which of several samples this is; each draws its own random numbers.
    """
    device = next(network.parameters()).device
    draws = torch.Generator().manual_seed(config.seed * 1_000_003 + sample_index)
    ids = list(prompt)
    network.eval()
    for _ in range(config.max_new_tokens):
        window = torch.tensor([ids[-network.config.context_length :]], device=device)  # (1, T)
        # Not network(window): compiled, it would be compiled anew for lengths it has not met.
        logits = network.forward(window)[0, -1].float().cpu()  # (vocab_size,)
        ids.append(draw(logits, config, draws))
        yield ids[-1]


def draw(logits: Tensor, config: SamplingConfig, generator: torch.Generator) -> int:
    """One token id from logits (vocab_size,), as temperature, top_k and top_p say."""
    if config.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(probabilities(logits, config), 1, generator=generator))


def probabilities(logits: Tensor, config: SamplingConfig) -> Tensor:
    """What `draw` draws from: logits (vocab_size,) -> probabilities (vocab_size,), 0 for filtered tokens.

    The filters come after the temperature; top_p keeps the token that crosses it (nucleus sampling,
    Holtzman et al. 2019, arXiv:1904.09751).
    """
    logits = logits / config.temperature
    if config.top_k and config.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(config.top_k).values[-1], -torch.inf)
    probs = logits.softmax(-1)
    if config.top_p is not None and config.top_p < 1:
        ordered, order = probs.sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # probability of all likelier tokens
        probs[order[before >= config.top_p]] = 0.0
        probs /= probs.sum()
    return probs
