"""All causal measures of one text, for the interactive page."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import tiktoken
import torch
from tqdm import tqdm

from analysis.ablation import AblationCosts, ablation_costs
from analysis.logit_attribution import logit_attributions
from analysis.residual_stream import residual_stream
from analysis.value_weighted_attention import value_weighted_maps
from data.tokenizer import token_labels
from model.gpt import GPT
from sampling.decoder import evaluating
from system.errors import UserError

TOP_PREDICTIONS = 5


@dataclass(frozen=True)
class TextMeasures:
    """What the parts of a network are worth for a text of T tokens."""

    value_maps: np.ndarray
    """(L, H, T, T): attention weight times the norm of the projected value vector."""
    surprise: np.ndarray
    """(T,): bits, -log2 of the probability that the network gave each token. Nothing predicts the first: nan."""
    predictions: np.ndarray
    """(L + 1, T, 5) token ids: the likeliest next tokens after the embedding and after each layer (logit lens)."""
    probabilities: np.ndarray
    """(L + 1, T, 5): of these."""
    prediction_labels: dict[int, str]
    """Labels of the ids in `predictions`."""
    target_ids: list[int]
    """T token ids: the next token, and after the last token the likeliest one."""
    targets: list[str]
    """Labels of these."""
    contributions: dict[str, np.ndarray] | None
    """Label -> (T,): what each part adds to the logit of the target. None: the blocks of the network were edited and
    do more than add."""
    costs: AblationCosts | None
    """Increase of the loss of the text without each head and MLP. None: a text of one token."""


@torch.inference_mode()
def measure_text(network: GPT, tokenizer: tiktoken.Encoding, ids: list[int]) -> TextMeasures:
    """Measures a text, given as the token ids (T,) of a context.

    The network runs L (H + 1) times for the ablations, each time without the layers before the ablated one.
    """
    tokens = torch.tensor(ids, device=network.lm_head.weight.device)  # (T,)
    with evaluating(network):
        stream, _ = residual_stream(network, tokens[None])
        tops = []
        for x in stream:  # one layer at a time, because the logits of all take much memory
            log_probs = network.logits(x[0]).float().log_softmax(-1)  # (T, vocab_size)
            tops.append(log_probs.exp().topk(min(TOP_PREDICTIONS, log_probs.size(-1))))
    predictions = torch.stack([top.indices for top in tops])  # (L + 1, T, 5)
    probabilities = torch.stack([top.values for top in tops])
    surprise = torch.full_like(log_probs[:, 0], math.nan)
    surprise[1:] = log_probs[:-1].gather(1, tokens[1:, None])[:, 0] / -math.log(2)
    targets = torch.cat([tokens[1:], predictions[-1, -1:, 0]])
    try:
        contributions = {key: row.cpu().numpy() for key, row in logit_attributions(network, tokens, targets).items()}
    except UserError:
        contributions = None
    shown = predictions.unique().tolist()
    return TextMeasures(
        value_maps=value_weighted_maps(network, tokens[None])[:, 0].cpu().numpy(),
        surprise=surprise.cpu().numpy(),
        predictions=predictions.cpu().numpy(),
        probabilities=probabilities.cpu().numpy(),
        prediction_labels=dict(zip(shown, token_labels(tokenizer, shown), strict=True)),
        target_ids=targets.tolist(),
        targets=token_labels(tokenizer, targets.tolist(), max_chars=40),
        contributions=contributions,
        costs=ablation_costs(network, tokens[None], progress=_progress_bar) if len(ids) > 1 else None,
    )


def _progress_bar(parts: list) -> Iterable:
    """Shown in a terminal if the ablations take longer than two seconds."""
    return tqdm(parts, desc="ablations", delay=2, leave=False, disable=None)
