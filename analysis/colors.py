"""The project's colors, defined once: for attention pictures in files and TensorBoard, for the page and for curves."""

import numpy as np

# The scale. Colour and opacity of an attention weight w are row round(255 * sqrt(w)): the root keeps a few percent
# visible beside large weights. The less weight, the more the ground shines through, so the one scale works on light
# and on dark ground.
_FAINT, _FULL = np.array([255, 150, 40]), np.array([190, 24, 60])
_SHARE = np.arange(256)[:, None] / 255
SCALE = np.concatenate([_FAINT + (_FULL - _FAINT) * _SHARE, 255 * _SHARE], 1).round().astype(np.uint8)  # RGBA
WHITE_TEXT_FROM = 190  # rows of SCALE on which white is easier to read than black, on light ground

# What the scale lies on. `masked`: hidden by the causal mask; `strong`: text on the strongest rows.
LIGHT = {"paper": "#ffffff", "ink": "#28282e", "faint": "#6e6e76", "line": "#c8c8cd", "masked": "#eeeef0",
         "strong": "#ffffff", "focus": "#1a56db"}  # fmt: skip
DARK = {"paper": "#141418", "ink": "#ececf1", "faint": "#a2a2ae", "line": "#3a3a44", "masked": "#22222a",
        "strong": "#ffffff", "focus": "#8ab4ff"}  # fmt: skip


def rgb(color: str) -> tuple[int, int, int]:
    """#rrggbb as three numbers."""
    return tuple(bytes.fromhex(color[1:]))


ON_PAPER = (255 + (SCALE[:, :3].astype(float) - 255) * SCALE[:, 3:] / 255).round().astype(np.uint8)  # (256, 3)


def color_rows(weights: np.ndarray) -> np.ndarray:
    """Weights, 0 to 1, as rows of SCALE: the same shape, uint8. weight = (row / 255) ** 2, to 0.004 at worst."""
    return (255 * np.sqrt(np.clip(weights, 0, 1))).round().astype(np.uint8)


def line_styles(count: int) -> list[dict[str, str]]:
    """How up to four curves differ, as matplotlib takes it: colors of the scale from strong to faint, each brighter
    than the last; and, for whoever sees no difference in colors, markers and dashes."""
    rows = np.linspace(255, 0, count).round().astype(int)
    return [
        {"color": f"#{bytes(SCALE[row, :3]).hex()}", "marker": marker, "linestyle": dashes}
        for row, marker, dashes in zip(rows, "os^D"[:count], ("-", "--", "-.", ":")[:count], strict=True)
    ]
