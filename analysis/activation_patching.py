"""Activation patching: where does the network hold what decides between two answers?

Meng et al. 2022, arXiv:2202.05262 (causal tracing); Wang et al. 2022, arXiv:2211.00593. Two prompts of equal length
lead to different answers. The network reads the corrupted one, but one activation is replaced with that of the clean
one. If this restores the clean answer, the activation carries what decides.
"""

import math
from dataclasses import dataclass

import tiktoken
import torch
from torch import Tensor

from analysis.ablation import ablate
from analysis.residual_stream import layer_outputs, residual_stream, run_blocks
from data.tokenizer import encode, token_labels
from model.gpt import GPT
from sampling.decoder import evaluating
from system.errors import UserError

MAX_TOKENS = 1 << 12  # processed at once


@dataclass(frozen=True)
class PatchingEffects:
    """Logit differences at the last position, and the share of them that each activation restores.

    The share is (patched - corrupted) / (clean - corrupted): 0 like the corrupted prompt, 1 like the clean one. It can
    be below 0 or above 1.
    """

    clean: float
    """Logit of the first answer minus that of the second, for the clean prompt."""
    corrupted: float
    """The same for the corrupted prompt."""
    stream: Tensor
    """(L + 1, T): residual stream after the embedding and after each block, at each position."""
    heads: Tensor
    """(L, H): output of each head, at all positions."""


@torch.inference_mode()
def patching_effects(network: GPT, clean: Tensor, corrupted: Tensor, answers: tuple[int, int]) -> PatchingEffects:
    """Restores the clean residual stream at one layer and position at a time, and the clean output of one head.

    Args:
        clean, corrupted: (T,) token ids each.
        answers: the tokens of the clean and of the corrupted answer.

    Raises:
        UserError: the prompts have different lengths or exceed the context, or their logit differences are equal.
    """
    check_lengths(len(clean), len(corrupted), network.config.context_length)

    def logit_difference(x: Tensor) -> Tensor:  # (B, T, C) -> (B,)
        logits = network.logits(x[:, -1]).float()  # (B, vocab_size)
        return logits[:, answers[0]] - logits[:, answers[1]]

    with evaluating(network):
        clean_stream, rope = residual_stream(network, clean[None])
        corrupted_stream, _ = residual_stream(network, corrupted[None])
        clean_difference = logit_difference(clean_stream[-1]).item()
        corrupted_difference = logit_difference(corrupted_stream[-1]).item()
        if math.isclose(clean_difference, corrupted_difference, rel_tol=1e-5, abs_tol=1e-5):
            raise UserError(
                f"The logit difference of the answers is {clean_difference:.4f} for both prompts, so there is nothing "
                "to restore. Use a corrupted prompt that leads to another answer."
            )

        num_layers, num_heads, T = network.config.num_layers, network.config.num_heads, len(clean)
        stream, heads = torch.zeros(num_layers + 1, T), torch.zeros(num_layers, num_heads)
        for layer in range(num_layers + 1):
            for positions in torch.arange(T).split(max(1, MAX_TOKENS // T)):
                x = corrupted_stream[layer].repeat(len(positions), 1, 1)  # (B, T, C): one copy per position
                x[torch.arange(len(positions)), positions] = clean_stream[layer][0, positions]
                stream[layer, positions] = logit_difference(run_blocks(network, x, rope, layer)).cpu()
        for layer, outputs in enumerate(layer_outputs(network, clean[None])):
            for head in range(num_heads):
                with ablate(network, layer, head, replacement=outputs.heads[:, :, head]):
                    x = run_blocks(network, corrupted_stream[layer], rope, layer)
                heads[layer, head] = logit_difference(x)
    span = clean_difference - corrupted_difference
    return PatchingEffects(
        clean_difference,
        corrupted_difference,
        (stream - corrupted_difference) / span,
        (heads - corrupted_difference) / span,
    )


def check_lengths(clean: int, corrupted: int, context_length: int) -> None:
    """Raises UserError unless both prompts have the same number of tokens, which fit into the context."""
    if clean != corrupted:
        raise UserError(
            f"The clean prompt has {clean} tokens and the corrupted one {corrupted}, but they must have equally many, "
            "so that each position has a counterpart. Change a word of one of them."
        )
    if clean > context_length:
        raise UserError(f"The prompts have {clean} tokens, but the model sees {context_length}. Use shorter ones.")


def answer_tokens(tokenizer: tiktoken.Encoding, answers: str) -> tuple[int, int]:
    """The ids of two answers, given as "clean answer|corrupted answer". A space before a word belongs to its token.

    Raises:
        UserError: there are not two, they are the same, or one of them is not exactly one token.
    """
    texts = answers.split("|")
    if len(texts) != 2 or "" in texts or texts[0] == texts[1]:
        raise UserError(f'answers is {answers!r}, but must be two different ones, for example answers=" Mary| John".')
    ids = [encode(tokenizer, text).tolist() for text in texts]
    for text, tokens in zip(texts, ids, strict=True):
        if len(tokens) != 1:
            pieces = ", ".join(f'"{label}"' for label in token_labels(tokenizer, tokens))
            raise UserError(
                f"The answer {text!r} has {len(tokens)} tokens ({pieces}), but must have one. Use its first token, or "
                "another answer."
            )
    return ids[0][0], ids[1][0]
