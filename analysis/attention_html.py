"""Attention maps as an interactive HTML page: one file, without requests to the network.

Fills colors and data into the template analysis/attention_html.html.
"""

import base64
import json
from pathlib import Path

import numpy as np

from analysis.colors import DARK, LIGHT, SCALE, WHITE_TEXT_FROM, color_rows
from system.files import write_output

TEMPLATE = Path(__file__).with_suffix(".html")


def attention_page(maps: np.ndarray, labels: list[str], about: str, chosen: tuple[int, int, int]) -> str:
    """Returns the HTML of the page.

    Each weight is stored as one byte, the index of its color, which is within 0.004 of the weight. Only the lower
    triangle is stored, so L x H maps of T tokens take about 2/3 * L * H * T^2 bytes.

    Args:
        maps: (L, H, T, T), rows summing to 1, nothing above the diagonal.
        labels: T token labels.
        about: one line that describes the model.
        chosen: layer, head and token selected initially.
    """
    num_layers, num_heads, T = maps.shape[:3]
    query, key = np.tril_indices(T)
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
        "colors": SCALE.tolist(),
        "white_text_from": WHITE_TEXT_FROM,
        "weights": base64.b64encode(color_rows(maps[:, :, query, key]).tobytes()).decode(),  # (L, H, T (T + 1) / 2)
    }
    page = TEMPLATE.read_text(encoding="utf-8")
    for place, colors in (("{{light}}", LIGHT), ("{{dark}}", DARK)):
        page = page.replace(place, " ".join(f"--{name}: {color};" for name, color in colors.items()))
    return page.replace("{{data}}", embeddable(data))


def embeddable(data: dict) -> str:
    """JSON that is safe inside a <script> element: "<" is escaped, so that no text can open or close an element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def save_page(html: str, path: Path) -> None:
    """Writes the page atomically. Raises UserError if that fails."""
    write_output(path, html.encode())


def _ends_line(label: str, after: str) -> bool:
    """Whether there is a line break between these two tokens."""
    return label.endswith("↵") or (after.startswith("↵") and len(after) > 1)
