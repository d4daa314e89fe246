"""The causal measures of a text as tables: what analysis.inspect_attention prints for their keys."""

import math

import tiktoken
import torch
from torch import Tensor

from analysis.ablation import ablate, ablation_costs
from analysis.activation_patching import answer_tokens, patching_effects
from analysis.head_detector import head_scores, repeated_sequences
from analysis.logit_attribution import logit_attribution
from analysis.logit_lens import lens_losses, logit_lens
from analysis.residual_stream import residual_stream, token_losses
from analysis.text_table import signed_bar, text_table, two_decimals
from data.tokenizer import encode, token_labels
from model.gpt import GPT
from sampling.decoder import evaluating
from system.errors import UserError

MAX_WINDOWS = 16  # of context_length tokens, for ablation costs of all heads


@torch.inference_mode()
def ablation_table(network: GPT, tokenizer: tiktoken.Encoding, ids: list[int], layer: int, head: int | None) -> str:
    """The loss of a text with and without a head. head=None: with and without the MLP."""
    check_has_next_token(ids, "ablate")
    num_bytes = sum(len(tokenizer.decode_single_token_bytes(token)) for token in ids[1:])
    tokens = torch.tensor([ids])

    def loss() -> float:
        stream, _ = residual_stream(network, tokens[:, :-1])
        return token_losses(network, stream[-1], tokens[:, 1:]).mean().item()

    with evaluating(network):
        whole = loss()
        with ablate(network, layer, head, mlp=head is None):
            ablated = loss()
    part = f"MLP of layer {layer}" if head is None else f"layer {layer}, head {head}"
    rows = [
        (name, *(f"{value:{sign}.4f}" for value in (nats, nats * (len(ids) - 1) / math.log(2) / num_bytes)))
        for name, nats, sign in (("with it", whole, ""), ("without", ablated, ""), ("change", ablated - whole, "+"))
    ]
    table = text_table(("loss", "nats per token", "bits per byte"), rows, left=[0])
    return f"{part}: loss of this text when its output is replaced with its mean over the text\n{table}"


def lens_table(network: GPT, tokenizer: tiktoken.Encoding, ids: list[int]) -> str:
    """For each token: the next one, and what each layer predicts, with its probability."""
    likeliest = logit_lens(network, torch.tensor([ids]))[:, 0].softmax(-1).max(-1)  # (L + 1, T)
    labels = token_labels(tokenizer, ids)
    rows = []
    for index, label in enumerate(labels):
        guesses = token_labels(tokenizer, likeliest.indices[:, index].tolist())
        cells = [f"{guess} {prob:.2f}" for guess, prob in zip(guesses, likeliest.values[:, index], strict=True)]
        rows.append((str(index), label, labels[index + 1] if index + 1 < len(labels) else "", *cells))
    if len(ids) > 1:
        losses = lens_losses(network, torch.tensor([ids])).tolist()
        rows.append(("", "loss, nats per token", "", *(f"{loss:.3f}" for loss in losses)))
    header = ("#", "token", "next", *stream_names(network))
    return (
        "logit lens: the likeliest next token after each layer, and its probability\n"
        f"{text_table(header, rows, left=range(1, len(header)))}"
    )


def attribution_table(
    network: GPT, tokenizer: tiktoken.Encoding, ids: list[int], position: int, answers: str | None, bars: bool
) -> str:
    """Contributions to the logit of the next token, or of the likeliest one after the last.

    Args:
        position: of the token after which it is predicted.
        answers: two tokens, "a|b": contributions to the difference of their logits instead.
        bars: whether to draw them as bars.
    """
    if answers is not None:
        token, versus = answer_tokens(tokenizer, answers)
    elif position + 1 < len(ids):
        token, versus = ids[position + 1], None
    else:
        token, versus = int(logit_lens(network, torch.tensor([ids]))[-1, 0, -1].argmax()), None
    parts = logit_attribution(network, torch.tensor(ids), token, versus, position)
    largest = max(map(abs, parts.values())) or 1.0
    rows = [
        (f"{value:+.3f}", label, *([signed_bar(value / largest)] if bars else [])) for label, value in parts.items()
    ]
    shown = [
        f'"{label}"' for label in token_labels(tokenizer, [ids[position], token, token if versus is None else versus])
    ]
    what = f"logit of {shown[1]}" + (f" minus that of {shown[2]}" if versus is not None else "")
    cap = ", before the soft cap" if network.config.logit_soft_cap is not None else ""
    header = (f"{sum(parts.values()):+.3f}", "all", *([""] if bars else []))
    return f"{what} after token {position}, {shown[0]}{cap}: what each part contributes\n" + text_table(
        header, rows, left=[1, 2]
    )


def effects_table(network: GPT, ids: Tensor) -> str:
    """Ablation costs of all heads and MLPs, next to the scores of the heads.

    Args:
        ids: (N,), the whole text. The last MAX_WINDOWS contexts are used.
    """
    check_has_next_token(ids, "effects")
    context_length = min(network.config.context_length, len(ids) - 1)
    windows = ids[-(MAX_WINDOWS * context_length + 1) :].unfold(0, context_length + 1, context_length)
    costs = ablation_costs(network, windows)
    scores = {}
    if context_length > 1 and len(ids.unique()) > 1:
        maps = torch.stack(network.attention_maps(windows[:, :-1]))
        repeated = torch.stack(network.attention_maps(repeated_sequences(ids, network.config.context_length)))
        scores = head_scores(maps, repeated)
    rows = []
    for layer in range(network.config.num_layers):
        for head in range(network.config.num_heads):
            values = [f"{score[layer, head]:.2f}" for score in scores.values()]
            rows.append((f"layer {layer} head {head}", f"{costs.heads[layer, head]:+.4f}", *values))
        rows.append((f"layer {layer} MLP", f"{costs.mlps[layer]:+.4f}", *[""] * len(scores)))
    return (
        f"increase of the loss, {costs.loss:.4f} nats per token over {windows[:, 1:].numel():,} tokens, without each "
        f"part, and scores of the heads\n{text_table(('part', 'increase', *scores), rows, left=[0])}"
    )


def patching_table(network: GPT, tokenizer: tiktoken.Encoding, clean: list[int], corrupted: str, answers: str) -> str:
    """Shares of the logit difference that the clean residual stream and the clean heads restore."""
    pair = answer_tokens(tokenizer, answers)
    corrupted_ids = encode(tokenizer, corrupted)
    effects = patching_effects(network, torch.tensor(clean), torch.from_numpy(corrupted_ids), pair)
    first, second = (f'"{label}"' for label in token_labels(tokenizer, pair))
    rows = [
        (str(index), *labels, *map(two_decimals, shares))
        for index, (*labels, shares) in enumerate(
            zip(
                token_labels(tokenizer, clean),
                token_labels(tokenizer, corrupted_ids.tolist()),
                effects.stream.T.tolist(),
                strict=True,
            )
        )
    ]
    stream = text_table(("#", "clean", "corrupted", *stream_names(network)), rows, left=[1, 2])
    head_rows = [(f"layer {layer}", *map(two_decimals, shares)) for layer, shares in enumerate(effects.heads.tolist())]
    heads = text_table(("", *(f"head {head}" for head in range(network.config.num_heads))), head_rows, left=[0])
    return (
        f"logit of {first} minus that of {second}: clean {effects.clean:+.3f}, corrupted {effects.corrupted:+.3f}\n"
        "share of the difference that is restored by the clean residual stream at one position, after each layer\n"
        f"{stream}\n\n"
        "share that is restored by the clean output of one head, at all positions\n"
        f"{heads}"
    )


def stream_names(network: GPT) -> list[str]:
    """Names of the L + 1 places of the residual stream."""
    return ["embedding", *(f"layer {layer}" for layer in range(network.config.num_layers))]


def check_has_next_token(ids: list[int] | Tensor, key: str) -> None:
    """Raises UserError for a text of one token, of which nothing is predicted."""
    if len(ids) < 2:
        raise UserError(f"The text has 1 token, but {key} needs at least 2, to predict the second. Give a longer text.")
