"""Colors of attention pictures, of the HTML page, and of curves."""

import numpy as np

# The color scale. An attention weight w has the color and opacity of row round(255 * sqrt(w)): the square root keeps
# weights of a few percent visible. Low weights are transparent, so that the scale works on light and dark backgrounds.
_FAINT, _FULL = np.array([255, 150, 40]), np.array([190, 24, 60])
_SHARE = np.arange(256)[:, None] / 255
SCALE = np.concatenate([_FAINT + (_FULL - _FAINT) * _SHARE, 255 * _SHARE], 1).round().astype(np.uint8)  # RGBA
WHITE_TEXT_FROM = 190  # first row of SCALE with white text, on a light background

# Background and text. `masked`: weights hidden by the causal mask; `strong`: text on high weights.
# `worse`: the loss rises without a part; `focus` is also for its opposite.
LIGHT = {"paper": "#ffffff", "ink": "#28282e", "faint": "#6e6e76", "line": "#c8c8cd", "masked": "#eeeef0",
         "strong": "#ffffff", "focus": "#1a56db", "worse": "#be183c"}  # fmt: skip
DARK = {"paper": "#141418", "ink": "#ececf1", "faint": "#a2a2ae", "line": "#3a3a44", "masked": "#22222a",
        "strong": "#ffffff", "focus": "#8ab4ff", "worse": "#f04664"}  # fmt: skip


def rgb(color: str) -> tuple[int, int, int]:
    """Converts #rrggbb to three numbers from 0 to 255."""
    return tuple(bytes.fromhex(color[1:]))


ON_PAPER = (255 + (SCALE[:, :3].astype(float) - 255) * SCALE[:, 3:] / 255).round().astype(np.uint8)  # (256, 3)


def color_rows(weights: np.ndarray) -> np.ndarray:
    """Maps weights from 0 to 1 to rows of SCALE, uint8: weight = (row / 255) ** 2, with an error of at most 0.004."""
    return (255 * np.sqrt(np.clip(weights, 0, 1))).round().astype(np.uint8)


def line_styles(count: int) -> list[dict[str, str]]:
    """Matplotlib styles of up to four curves.

    Colors of the scale from strong to faint; markers and dashes tell the curves apart without colors.
    """
    rows = np.linspace(255, 0, count).round().astype(int)
    return [
        {"color": f"#{bytes(SCALE[row, :3]).hex()}", "marker": marker, "linestyle": dashes}
        for row, marker, dashes in zip(rows, "os^D"[:count], ("-", "--", "-.", ":")[:count], strict=True)
    ]
