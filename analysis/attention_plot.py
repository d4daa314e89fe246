"""Attention maps and head scores as pictures: a grid of layers x heads on one color scale.

Draws pixels directly, because a plotting library would take longer than the validation at which the picture is drawn.
Uses Matplotlib's font, and a font of the system for characters that it lacks.
"""

import io
import logging
import re
import textwrap
import unicodedata
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import groupby
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont

from analysis.colors import LIGHT, ON_PAPER, WHITE_TEXT_FROM, color_rows, rgb
from system.errors import UserError
from system.files import write_output

PAPER, MASKED, INK, FAINT_INK, FRAME = (rgb(LIGHT[name]) for name in ("paper", "masked", "ink", "faint", "line"))
logger = logging.getLogger(__name__)
FONT = str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf")
# Prefixes of the file names of fonts with Chinese, Japanese and Korean characters, on Linux, macOS and Windows.
CJK_FONTS = (
    *("notosansmonocjk", "notosanscjk", "notoserifcjk", "sourcehan", "wqy-", "droidsansfallback", "unifont"),
    *("pingfang", "hiragino", "applesdgothic", "stheiti", "arial unicode"),
    *("msyh", "simsun", "yugoth", "meiryo", "msgothic", "malgun", "ipag", "vl-gothic", "takao", "nanumgothic"),
)
MAX_PIXELS = 16_000  # per side; many programs open nothing larger


def draw_attention(maps: np.ndarray, labels: list[str], title: str = "", scale: int = 1) -> np.ndarray:
    """Draws the attention maps of all layers and heads.

    Rows are queries and columns are keys. Only the outer maps have labels. Masked weights are gray. Maps of short texts
    also show the weights as numbers.

    Args:
        maps: (L, H, T, T), rows summing to 1.
        labels: T token labels.
        title: shown above the maps.
        scale: 1 for a screen, 2 for print.

    Returns:
        The picture, (height, width, 3) uint8.

    Raises:
        UserError: the picture would exceed MAX_PIXELS.
    """
    num_layers, num_heads, T = maps.shape[:3]
    # A label needs 11 pixels; longer texts label every n-th token.
    cell = scale * (min(max(11, 360 // T), 30) if T <= 64 else max(1, 704 // T))
    font_size = 10 * scale
    every = -(-11 * scale // cell)
    shown = [_drawable(label) if index % every == 0 else "" for index, label in enumerate(labels)]
    side, line = T * cell, 14 * scale
    pitch_x, pitch_y = max(side, 92 * scale) + 10 * scale, side + line + 6 * scale
    margin = max(_width(label, font_size) for label in shown) + 6 * scale
    left = margin + line
    width = left + num_heads * pitch_x + 62 * scale
    title_lines = textwrap.wrap(_drawable(title), (width - left) // _width("0", font_size))
    top = len(title_lines) * line + 8 * scale
    height = top + num_layers * pitch_y + margin + line
    if max(width, height) > MAX_PIXELS:
        raise UserError(
            f"{num_layers} layers x {num_heads} heads of {T} tokens make a picture of {width:,} x {height:,} pixels, "
            f"but the maximum is {MAX_PIXELS:,} per side. Give a shorter text, or use html=attention.html instead."
        )
    picture = np.full((height, width, 3), PAPER, np.uint8)
    masked = np.triu(np.ones((T, T), bool), 1)
    rows = color_rows(maps)  # (L, H, T, T)
    for layer in range(num_layers):
        for head in range(num_heads):
            x, y = left + head * pitch_x, top + layer * pitch_y + line
            tile = ON_PAPER[rows[layer, head]]  # (T, T, 3)
            tile[masked] = MASKED
            picture[y : y + side, x : x + side] = tile.repeat(cell, 0).repeat(cell, 1)

    image = Image.fromarray(picture)
    draw = ImageDraw.Draw(image)
    write = _writer(draw, font_size)
    for index, title_line in enumerate(title_lines):
        write(left, 4 * scale + index * line, title_line, INK)
    queries = _strip(tuple(shown), cell, margin, font_size)
    keys = queries.transpose(Image.Transpose.ROTATE_90)  # the first label is at the left; all end at the map
    for layer in range(num_layers):
        y = top + layer * pitch_y
        image.paste(INK, (left - margin, y + line), queries)
        for head in range(num_heads):
            x = left + head * pitch_x
            write(x, y, f"layer {layer} head {head}", INK)
            draw.rectangle((x - 1, y + line - 1, x + side, y + line + side), outline=FRAME)
            if layer == num_layers - 1:
                image.paste(INK, (x, y + line + side), keys)
            if cell >= 26 * scale:
                _write_numbers(write, maps[layer, head], rows[layer, head], x, y + line, cell, scale)
    write(left, height - line, "key: the token looked at", FAINT_INK)
    image.paste(FAINT_INK, (0, top + line), _sideways("query: the token that looks", font_size))
    bar_height = min(side, 352 * scale)
    _color_bar(image, write, left + num_heads * pitch_x + 8 * scale, top + line, bar_height, scale)
    return np.asarray(image)


def draw_head_scores(scores: dict[str, np.ndarray], tops: dict[str, float], title: str = "") -> np.ndarray:
    """Draws one layers x heads table per score, side by side, with the numbers in the cells.

    Args:
        scores: by name, (L, H) each.
        tops: by name, the value at the end of the color scale.
        title: one line above the tables.

    Returns:
        The picture, (height, width, 3) uint8.
    """
    num_layers, num_heads = next(iter(scores.values())).shape
    cell_x, cell_y, line, font_size = 44, 30, 16, 11
    block = max(num_heads * cell_x, max(_width(name, font_size) for name in scores)) + 24
    left, top = 64, 3 * line
    size = (left + len(scores) * block, top + num_layers * cell_y + line + 8)
    image = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(image)
    write = _writer(draw, font_size)
    write(left, 4, _drawable(title), INK)
    for index, (name, table) in enumerate(scores.items()):
        x = left + index * block
        write(x, top - line - 2, name, INK)
        rows = (255 * np.clip(table / tops[name], 0, 1)).round().astype(int)  # linear in the score
        for layer in range(num_layers):
            if index == 0:
                write(6, top + layer * cell_y + 8, f"layer {layer}", FAINT_INK)
            for head in range(num_heads):
                row, value = rows[layer, head], float(table[layer, head])
                corner = x + head * cell_x, top + layer * cell_y
                draw.rectangle(
                    (*corner, corner[0] + cell_x - 2, corner[1] + cell_y - 2), fill=tuple(map(int, ON_PAPER[row]))
                )
                text = f"{value:.2f}" if tops[name] <= 1 else f"{value:.1f}"
                indent = (cell_x - 2 - _width(text, font_size)) // 2
                write(corner[0] + indent, corner[1] + 8, text, PAPER if row >= WHITE_TEXT_FROM else INK)
        for head in range(num_heads):
            indent = (cell_x - 2 - _width(str(head), font_size)) // 2
            write(x + head * cell_x + indent, top + num_layers * cell_y + 2, str(head), FAINT_INK)
    write(6, top + num_layers * cell_y + 2, "head", FAINT_INK)
    return np.asarray(image)


def save(picture: np.ndarray, path: Path) -> None:
    """Writes a PNG file atomically. Raises UserError if that fails."""
    write_output(path, to_png(picture))


def to_png(picture: np.ndarray) -> bytes:
    """Encodes a picture as PNG."""
    png = io.BytesIO()
    Image.fromarray(picture).save(png, format="PNG", optimize=True)
    return png.getvalue()


# Writing


@cache
def _font(size: int, file: str = FONT) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(file, size)


@cache
def _known_characters(file: str) -> frozenset[int]:
    """Code points of the font; empty if it cannot be used, like a bitmap emoji font."""
    try:
        _font(10, file)
        return frozenset(FT2Font(file).get_charmap())
    except (OSError, RuntimeError):
        return frozenset()


@cache
def _system_fonts() -> tuple[str, ...]:
    """Files of the installed fonts, those with Chinese, Japanese and Korean characters first."""
    from matplotlib.font_manager import findSystemFonts  # slow to import, and few texts need it

    files = sorted(findSystemFonts())
    return tuple(sorted(files, key=lambda file: not Path(file).name.lower().startswith(CJK_FONTS)))


@cache
def _font_of(char: str) -> str | None:
    """File of a font that has the character, or None."""
    if ord(char) in _known_characters(FONT):
        return FONT
    return next((file for file in _system_fonts() if ord(char) in _known_characters(file)), None)


def _drawable(text: str) -> str:
    """Replaces characters that no font has with escape sequences like \\u6f22, which can be told apart."""
    for char in text:
        if _font_of(char) is None and char.isalpha():
            _warn_missing_font("fonts-noto-cjk" if unicodedata.east_asian_width(char) in "WF" else "fonts-noto-core")
    text = "".join(char if _font_of(char) else char.encode("unicode_escape").decode() for char in text)
    return re.sub("(?<=[↵→])(?=[↵→])", " ", text)  # adjacent arrows would merge into one line


@cache  # so that it warns once
def _warn_missing_font(package: str) -> None:
    logger.warning(
        "labels of the attention maps show some characters by their numbers: no installed font has them. Install one, "
        "for example on Debian: apt-get install %s",
        package,
    )


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """Splits the text into runs of one font: font file and piece."""
    for file, chars in groupby(text, _font_of):
        yield file or FONT, "".join(chars)


def _width(text: str, size: int) -> int:
    return round(sum(_font(size, file).getlength(piece) for file, piece in _pieces(text)))


def _write(draw: ImageDraw.ImageDraw, place: tuple[float, float], text: str, color, size: int, anchor: str) -> None:
    """Draws text, in several fonts if needed. `anchor` is a left one of Pillow's."""
    x, y = place
    for file, piece in _pieces(text):
        draw.text((x, y), piece, color, _font(size, file), anchor=anchor)
        x += _font(size, file).getlength(piece)


def _writer(draw: ImageDraw.ImageDraw, size: int):
    ascent, _ = _font(size).getmetrics()
    return lambda x, y, text, color: _write(draw, (x, y + ascent), text, color, size, "ls")


@lru_cache(maxsize=8)  # a run draws the same tokens at every validation
def _strip(labels: tuple[str, ...], cell: int, margin: int, size: int) -> Image.Image:
    """Draws right-aligned labels, one below the other: opacity, (T * cell, margin)."""
    strip = Image.new("L", (margin, len(labels) * cell))
    draw = ImageDraw.Draw(strip)
    for index, label in enumerate(labels):
        left = margin - 4 * size // 10 - sum(_font(size, file).getlength(piece) for file, piece in _pieces(label))
        _write(draw, (left, max(index * cell + cell // 2, size * 6 // 10)), label, 255, size, "lm")  # not cut off
    return strip


def _sideways(text: str, size: int) -> Image.Image:
    strip = Image.new("L", (_width(text, size), size + 4))
    ImageDraw.Draw(strip).text((0, 0), text, 255, _font(size))
    return strip.transpose(Image.Transpose.ROTATE_90)


def _write_numbers(write, weights: np.ndarray, rows: np.ndarray, x: int, y: int, cell: int, scale: int) -> None:
    for query in range(len(weights)):
        for key in range(query + 1):
            text = f"{weights[query, key]:.2f}".lstrip("0") if weights[query, key] < 0.995 else "1"
            indent = (cell - _width(text, 10 * scale)) // 2
            color = PAPER if rows[query, key] >= WHITE_TEXT_FROM else INK
            write(x + key * cell + indent, y + query * cell + cell // 2 - 6 * scale, text, color)


def _color_bar(image: Image.Image, write, x: int, y: int, height: int, scale: int) -> None:
    rows = np.linspace(255, 0, height).round().astype(int)
    bar = Image.fromarray(ON_PAPER[rows][:, None].repeat(12 * scale, 1))
    image.paste(bar, (x, y))
    for weight in (0, 0.05, 0.25, 0.5, 1) if height >= 150 * scale else (0, 0.25, 1):
        tick = round(y + (height - 1) * (1 - weight**0.5))
        write(x + 16 * scale, tick - 6 * scale, f"{weight:g}", INK)
