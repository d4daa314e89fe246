"""Trains a small GPT to copy and draws docs/hero.gif: attention maps of every head, one frame per validation.

Each line of the text is a random word, three times. A network can predict the second and third copy with an induction
head: it attends to what followed the last occurrence of the present letter.

    python docs/make_hero.py              train (a few minutes), then draw
    python docs/make_hero.py maps.npz     draw again from the maps that the first form saved in the run directory
"""

import random
import string
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from analysis import attention_plot  # noqa: E402
from analysis.attention_plot import FAINT_INK, FONT, FRAME, INK, MASKED, PAPER  # noqa: E402
from analysis.colors import ON_PAPER, color_rows  # noqa: E402

SETTINGS = {
    "tokenizer": "byte",
    "model.d_model": 64,
    "trainer.max_steps": 900,
    "num_validations": 36,
    "data.val_tokens": 4096,
}
WORDS = 30_000
TOKENS = 27  # drawn, of each map
CELL = 12  # pixels per weight
FRAME_MS, LAST_FRAME_MS = 140, 3000


def train() -> Path:
    """Trains a run and returns the file with its maps: (validations, L, H, T, T), labels, steps and bits per byte."""
    import tiny_gpt

    maps, labels, draw_attention = [], [], attention_plot.draw_attention

    def record(weights: np.ndarray, tokens: list[str], *args, **kwargs) -> np.ndarray:
        """Called by training/callbacks/validation_images.py with the maps of each validation."""
        maps.append(weights[:, :, :TOKENS, :TOKENS].astype(np.float16))
        labels[:] = tokens[:TOKENS]
        return draw_attention(weights, tokens, *args, **kwargs)

    attention_plot.draw_attention = record
    draw = random.Random(0)
    words = ["".join(draw.choices(string.ascii_lowercase, k=8)) for _ in range(WORDS)]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "copies.txt"
        text.write_text("".join(f"{word} {word} {word}\n" for word in words))
        run = tiny_gpt.train(str(text), **SETTINGS)
    tag = next(tag for tag in run.history if "validation" in tag.lower() and "bits" in tag.lower())
    steps, bits = zip(*run.history[tag][: len(maps)], strict=True)
    file = Path(run.run_dir) / "maps.npz"
    np.savez_compressed(file, maps=np.stack(maps), labels=labels, steps=steps, bits=bits)
    return file


def draw_frame(maps: np.ndarray, labels: list[str], title: str, progress: float) -> Image.Image:
    """One validation: a map per head, token labels on the outer ones, and a bar that shows how far training is."""
    num_layers, num_heads, T = maps.shape[:3]
    font, label_font = ImageFont.truetype(FONT, 24), ImageFont.truetype(FONT, 12)
    side, gap, top = T * CELL, 24, 92
    margin = int(max(label_font.getlength(label) for label in labels)) + 20
    head_line = 30
    width = margin + num_heads * (side + gap)
    height = top + num_layers * (side + head_line + 10) + margin
    picture = np.full((height, width, 3), PAPER, np.uint8)
    places = {}
    for layer in range(num_layers):
        for head in range(num_heads):
            x, y = margin + head * (side + gap), top + head_line + layer * (side + head_line + 10)
            tile = ON_PAPER[color_rows(maps[layer, head])]  # (T, T, 3)
            tile[np.triu(np.ones((T, T), bool), 1)] = MASKED
            picture[y : y + side, x : x + side] = tile.repeat(CELL, 0).repeat(CELL, 1)
            places[layer, head] = x, y
    image = Image.fromarray(picture)
    draw = ImageDraw.Draw(image)
    draw.text((margin, 14), title, INK, font)
    right = width - gap
    draw.rectangle((margin, 62, right, 70), fill=MASKED)
    draw.rectangle((margin, 62, margin + progress * (right - margin), 70), fill=tuple(map(int, ON_PAPER[255])))
    for (layer, head), (x, y) in places.items():
        draw.rectangle((x - 1, y - 1, x + side, y + side), outline=FRAME)
        draw.text((x, y - 22), f"layer {layer} head {head}", FAINT_INK, label_font)
    strip = Image.new("L", (margin - 8, side))  # labels right-aligned; rotated, they label the columns
    writer = ImageDraw.Draw(strip)
    for index, label in enumerate(labels):
        writer.text((margin - 12, index * CELL + CELL // 2), label, 255, label_font, anchor="rm")
    for layer in range(num_layers):
        image.paste(INK, (0, places[layer, 0][1]), strip)
    columns = strip.transpose(Image.Transpose.ROTATE_90)
    for head in range(num_heads):
        x, y = places[num_layers - 1, head]
        image.paste(INK, (x, y + side + 4), columns)
    return image


def draw(file: Path, output: Path) -> None:
    """Draws the animation of a maps file."""
    with np.load(file) as saved:
        maps, labels, steps, bits = (saved[name] for name in ("maps", "labels", "steps", "bits"))
    frames = [
        draw_frame(
            weights.astype(np.float32),
            list(labels),
            f"step {step:5,}    {loss:.2f} bits per byte",
            step / steps[-1],
        )
        for weights, step, loss in zip(maps, steps, bits, strict=True)
    ]
    grays = np.linspace(PAPER, INK, 10)
    colors = np.concatenate([[MASKED, FRAME, FAINT_INK], grays, ON_PAPER[np.linspace(0, 255, 51, dtype=int)]])
    palette = Image.new("P", (1, 1))
    palette.putpalette(colors.round().astype(np.uint8).tobytes())
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    durations = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    frames[0].save(output, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)
    print(f"{output}: {len(frames)} frames, {output.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else train(), PROJECT / "docs" / "hero.gif")
