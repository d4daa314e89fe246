"""Shows the attention weights of a GPT for a text. The keys: configs/see.yaml

    python -m analysis.inspect_attention prompt="Orange is my favorite fruit"

Prints a table; png=FILE also draws the maps of all layers and heads, and html=FILE writes an interactive page. Other
keys measure what heads are for: ablate=, effects=, lens=, attribution=, corrupted= with answers=.
"""

from configs.entry_point import entry_point  # isort: skip -- first: Ctrl-C may come during the other imports

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from analysis.config import InspectConfig
from analysis.text_table import BAR_WIDTH, bar, display_width, padded
from data.config import TokenizerConfig
from system.errors import UserError
from system.files import check_suffix, read_prompt
from system.streams import print_note
from system.text import pluralize

TOP_KEYS = 3  # keys with the highest weights, shown for each token


def main(config: InspectConfig) -> None:
    """Loads a network, describes it, and shows its attention. Raises UserError."""
    check_suffix("png", config.png, ".png")
    check_suffix("html", config.html, ".html")
    text = read_prompt(config.prompt, config.prompt_file)
    if not text:
        raise UserError('There is no text. Give one: prompt="Orange is my favorite fruit"')

    import torch  # after the checks that do not need it

    from data.tokenizer import encode, token_labels

    network, tokenizer, about = fresh_network(config) if config.untrained else trained_network(config)
    shape = network.config
    for key, value, count in (("layer", config.layer, shape.num_layers), ("head", config.head, shape.num_heads)):
        if not 0 <= value < count:
            raise UserError(f"{key} is {value}, but this model has {key}s 0 to {count - 1}.")
    print_note(about)
    whole_text = encode(tokenizer, text).tolist()
    ids = whole_text[-shape.context_length :]
    if len(whole_text) > len(ids):
        print_note(f"the text has {len(whole_text)} tokens; the model sees the last {shape.context_length}")
    query = find_token(config.token, [tokenizer.decode_single_token_bytes(token) for token in ids])

    measured = list(measures(config, network, tokenizer, whole_text, ids, query))  # before printing: may raise
    weights = torch.cat(network.attention_maps(torch.tensor([ids]))).numpy()  # (L, H, T, T)
    maps, caption = weights, about
    labels = token_labels(tokenizer, ids)
    what = f'where token {query}, "{labels[query]}", looks'
    if config.value_weighted:
        maps, longest = value_weighted(network, ids)
        caption += f"; weight x length of the value vector, as a share of the largest, {longest:.3g}"
        what = f'what token {query}, "{labels[query]}", gets: weight x length of the value vector'
        what += f", as a share of the largest of all heads, {longest:.3g}"
    print(f"layer {config.layer}, head {config.head}: {what}")
    print(table(maps[config.layer, config.head], labels, query, bars=sys.stdout.isatty()))
    for measure in measured:
        print(f"\n{measure}")
    if config.png is not None:
        from analysis.attention_plot import draw_attention, save

        save(draw_attention(maps, labels, caption, scale=2), Path(config.png))
        print_note(f"picture: {config.png}")
    if config.html is not None:
        from analysis.attention_html import attention_page, save_page
        from analysis.text_measures import measure_text

        chosen, view = (config.layer, config.head, query), "values" if config.value_weighted else "weights"
        measured = measure_text(network, tokenizer, ids)
        whole_labels = token_labels(tokenizer, ids, max_chars=40)
        save_page(attention_page(weights, whole_labels, about, chosen, measured, view), Path(config.html))
        print_note(f"page: {config.html}")


def value_weighted(network, ids: list[int]) -> tuple[np.ndarray, float]:
    """Value-weighted maps (L, H, T, T), divided by their largest entry, and that entry."""
    import torch

    from analysis.value_weighted_attention import value_weighted_maps

    maps = value_weighted_maps(network, torch.tensor([ids]))[:, 0]
    longest = maps.max().item()
    return (maps / (longest or 1.0)).numpy(), longest


def measures(
    config: InspectConfig, network, tokenizer, whole_text: list[int], ids: list[int], query: int
) -> Iterator[str]:
    """The tables that the config asks for. Raises UserError.

    Args:
        whole_text: token ids of the text.
        ids: those that fit into the context.
        query: position of the chosen token.
    """
    import torch

    from analysis import measure_tables as tables

    if config.ablate is not None:
        layer, head = ablated_part(config.ablate, network.config.num_layers, network.config.num_heads)
        yield tables.ablation_table(network, tokenizer, ids, layer, head)
    if config.effects:
        yield tables.effects_table(network, torch.tensor(whole_text))
    if config.lens:
        yield tables.lens_table(network, tokenizer, ids)
    if config.attribution:
        yield tables.attribution_table(network, tokenizer, ids, query, config.answers, bars=sys.stdout.isatty())
    if config.corrupted is not None:
        yield tables.patching_table(network, tokenizer, whole_text, config.corrupted, config.answers)


def ablated_part(choice: str, num_layers: int, num_heads: int) -> tuple[int, int | None]:
    """Layer and head of ablate=1.3; the head of ablate=1.mlp is None. Raises UserError."""
    layer, _, part = choice.partition(".")
    numbers = [int(number) for number in (layer, "0" if part == "mlp" else part) if re.fullmatch("[0-9]{1,9}", number)]
    if len(numbers) < 2 or numbers[0] >= num_layers or numbers[1] >= num_heads:
        raise UserError(
            f"ablate is {choice!r}, but must be LAYER.HEAD or LAYER.mlp, with a layer from 0 to {num_layers - 1} and a "
            f"head from 0 to {num_heads - 1}, for example ablate=0.{num_heads - 1}."
        )
    return numbers[0], None if part == "mlp" else numbers[1]


def trained_network(config: InspectConfig):
    """Network and tokenizer of a checkpoint, and a one-line description. Raises UserError."""
    from checkpoint.checkpoint import find_checkpoint, load_checkpoint

    checkpoint = load_checkpoint(find_checkpoint(config.checkpoint, config.runs_dir))
    return checkpoint.network, checkpoint.tokenizer, checkpoint.describe()


def fresh_network(config: InspectConfig):
    """An untrained network with fixed weights, a byte tokenizer, and a one-line description. Raises UserError."""
    import torch

    from data.tokenizer import build_tokenizer
    from model.gpt import GPT

    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"), None, Path())  # needs no text and no cache
    torch.manual_seed(0)
    network = GPT(replace(config.model, vocab_size=tokenizer.n_vocab))
    shape = network.config
    layers, heads = pluralize(shape.num_layers, "layer"), pluralize(shape.num_heads, "head")
    return network, tokenizer, f"untrained: {layers}, {heads}, width {shape.d_model}"


def find_token(choice: str | None, tokens: list[bytes]) -> int:
    """Position of the chosen token: a number from 0, or the token in which the last occurrence of a string ends.

    None chooses the last token. Raises UserError if there is no such token.
    """
    last = len(tokens) - 1
    if choice is None:
        return last
    if choice.isascii() and choice.isdigit():
        if int(choice) > last:
            raise UserError(f"token is {choice}, but the text has tokens 0 to {last}.")
        return int(choice)
    piece = choice.encode()
    start = b"".join(tokens).rfind(piece)
    if start < 0 or not piece:
        raise UserError(
            f"token {choice!r} is not in the text. Give a piece of the text, or a position from 0 to {last}."
        )
    ends = np.cumsum([len(token) for token in tokens])
    return int(np.searchsorted(ends, start + len(piece)))


def table(weights: np.ndarray, labels: list[str], query: int, bars: bool) -> str:
    """Formats one line per token: its weight from the query, and the keys that it attends to most.

    Args:
        weights: (T, T), of one head.
        labels: T token labels.
        query: position of the query token. The listed weights sum to 1.
        bars: whether to draw the weights as bars.
    """
    wide = max(5, *map(display_width, labels))
    digits = max(2, len(str(len(labels) - 1)))
    lines = [f"{'#':>{digits}}  {padded('token', wide)}  weight  {' ' * (BAR_WIDTH + 2) if bars else ''}looks most at"]
    for index, label in enumerate(labels):
        weight = weights[query, index]
        shown_bar = f"{bar(weight)}  " if bars else ""
        order = np.argsort(-weights[index, : index + 1], kind="stable")[:TOP_KEYS]
        links = "  ".join(f"{labels[key]} {weights[index, key]:.3f}" for key in order)
        shown = f"{weight:6.3f}" if index <= query else "      "  # masked
        lines.append(f"{index:>{digits}}  {padded(label, wide)}  {shown}  {shown_bar}{links}")
    return "\n".join(lines)


if __name__ == "__main__":
    entry_point(main, "see")
