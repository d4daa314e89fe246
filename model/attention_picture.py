"""Attention weights as a picture: layers x heads as small multiples, tokens on the axes."""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw_attention(maps: list[np.ndarray], labels: list[str], title: str = "") -> np.ndarray:
    """Draws every head of every layer on one colour scale, 0 to 1.

    A row of a map is a query token, a column a key token. The colour is the square root of the weight,
    so that weights of a few percent can be seen beside large ones; the scale at the side says so.

    Args:
        maps: a layer each, (H, T, T), rows summing to 1.
        labels: T token labels.
        title: one line above.

    Returns:
        The picture, (height, width, 3) uint8.
    """
    labels = [label.replace("$", r"\$") for label in labels]  # no formulas
    num_layers, num_heads, T = len(maps), *maps[0].shape[:2]
    cell = 0.11 * T + 0.25  # inches: a token needs 0.11 to be legible
    margin = 0.085 * max(map(len, labels)) + 0.35  # room for the longest label
    figure = Figure(figsize=(num_heads * cell + margin + 0.9, num_layers * cell + margin + 0.5), dpi=100)
    canvas = FigureCanvasAgg(figure)
    width, height = figure.get_size_inches()
    grid = figure.subplots(
        num_layers,
        num_heads,
        squeeze=False,
        gridspec_kw={
            "left": margin / width,
            "right": 1 - 0.9 / width,
            "bottom": margin / height,
            "top": 1 - 0.5 / height,
            "wspace": 0.06,
            "hspace": 0.06,
        },
    )
    for layer, row in enumerate(grid):
        for head, axes in enumerate(row):
            image = axes.imshow(np.sqrt(maps[layer][head]), vmin=0, vmax=1, cmap="magma", interpolation="nearest")
            axes.text(
                0.97, 0.95, f"layer {layer} head {head}", transform=axes.transAxes, ha="right", va="top",
                color="white", fontsize=7,
            )  # fmt: skip
            # Only the outer maps carry labels: all share the same tokens.
            bottom, left = layer == num_layers - 1, head == 0
            axes.set_xticks(range(T) if bottom else [], labels if bottom else [], rotation=90)
            axes.set_yticks(range(T) if left else [], labels if left else [])
            axes.tick_params(labelsize=7, length=1.5, width=0.4, pad=1.5, labelfontfamily="monospace")
    scale = figure.add_axes((1 - 0.75 / width, margin / height, 0.12 / width, 1 - (margin + 0.5) / height))
    bar = figure.colorbar(image, cax=scale)
    weights = (0, 0.05, 0.25, 0.5, 1)
    bar.set_ticks([weight**0.5 for weight in weights], labels=[f"{weight:g}" for weight in weights])
    bar.ax.tick_params(labelsize=7)
    figure.suptitle(title, fontsize=9, y=1 - 0.2 / height)
    figure.text(0.5, 0.05 / height, "key: the token looked at", ha="center", fontsize=8)
    figure.text(0.04 / width, 0.5, "query: the token that looks", va="center", rotation=90, fontsize=8)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]
