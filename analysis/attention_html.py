"""Attention maps as an interactive HTML page: one file, without requests to the network.

Fills colors and data into the template analysis/attention_html.html.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.colors import DARK, LIGHT, SCALE, WHITE_TEXT_FROM, color_rows
from system.files import write_output

if TYPE_CHECKING:  # the page itself needs no PyTorch
    from torch import Tensor

    from analysis.text_measures import TextMeasures

TEMPLATE = Path(__file__).with_suffix(".html")


def attention_page(
    maps: np.ndarray,
    labels: list[str],
    about: str,
    chosen: tuple[int, int, int],
    measures: TextMeasures | None = None,
    view: str = "weights",
) -> str:
    """Returns the HTML of the page.

    Each weight is stored as one byte, the index of its color, which is within 0.004 of the weight. Only the lower
    triangle is stored, so L x H maps of T tokens take about 2/3 * L * H * T^2 bytes, and twice that with measures.

    Args:
        maps: (L, H, T, T), rows summing to 1, nothing above the diagonal.
        labels: T token labels.
        about: one line that describes the model.
        chosen: layer, head and token selected initially.
        measures: of the same text. None: the page only shows weights.
        view: what colors show initially: "weights", "values" or "surprise"; the last two need measures.
    """
    num_layers, num_heads = maps.shape[:2]
    layer, head, token = chosen
    data = {
        "about": about,
        "labels": labels,
        "breaks": [_ends_line(label, after) for label, after in zip(labels, [*labels[1:], ""], strict=True)],
        "layers": num_layers,
        "heads": num_heads,
        "layer": layer,
        "head": head,
        "token": token,
        "view": view,
        "colors": SCALE.tolist(),
        "white_text_from": WHITE_TEXT_FROM,
        "weights": _triangles(maps),
        "measures": measures and _measures(measures),
    }
    page = TEMPLATE.read_text(encoding="utf-8")
    for place, colors in (("{{light}}", LIGHT), ("{{dark}}", DARK)):
        page = page.replace(place, " ".join(f"--{name}: {color};" for name, color in colors.items()))
    return page.replace("{{data}}", embeddable(data))


def _triangles(maps: np.ndarray) -> str:
    """Base64 of the color indices of the lower triangles of (L, H, T, T) maps: (L, H, T (T + 1) / 2) bytes."""
    query, key = np.tril_indices(maps.shape[-1])
    return base64.b64encode(color_rows(maps[:, :, query, key]).tobytes()).decode()


def _measures(measures: TextMeasures) -> dict[str, Any]:
    """The measures as JSON, with the digits that the page shows."""
    longest = float(measures.value_maps.max()) or 1.0
    rows = {token: row for row, token in enumerate(measures.prediction_labels)}
    contributions, costs = measures.contributions, measures.costs
    return {
        "values": _triangles(measures.value_maps / longest),
        "longest": longest,
        "surprise": [None if bits != bits else round(bits, 2) for bits in measures.surprise.tolist()],
        "vocabulary": list(measures.prediction_labels.values()),
        "predictions": [[[rows[token] for token in top] for top in layer] for layer in measures.predictions.tolist()],
        "probabilities": (1000 * measures.probabilities).round().astype(int).tolist(),
        "targets": measures.targets,
        "target_rows": [rows.get(token, -1) for token in measures.target_ids],
        "parts": contributions and list(contributions),
        "contributions": contributions and np.stack([*contributions.values()], 1).round(3).tolist(),  # (T, parts)
        "head_costs": costs and _rounded(costs.heads),
        "mlp_costs": costs and _rounded(costs.mlps),
    }


def _rounded(costs: Tensor) -> list[Any]:
    return costs.double().numpy().round(6).tolist()


def embeddable(data: dict) -> str:
    """JSON that is safe inside a <script> element: "<" is escaped, so that no text can open or close an element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def save_page(html: str, path: Path) -> None:
    """Writes the page atomically. Raises UserError if that fails."""
    write_output(path, html.encode())


def _ends_line(label: str, after: str) -> bool:
    """Whether there is a line break between these two tokens."""
    return label.endswith("↵") or (after.startswith("↵") and len(after) > 1)
