"""One scale everywhere: what the pictures, the page and the curves show is analysis/colors.py's."""

import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from analysis import attention_plot as attention_picture
from analysis.attention_html import attention_page
from analysis.attention_plot import draw_attention
from analysis.colors import DARK, LIGHT, ON_PAPER, SCALE, WHITE_TEXT_FROM, color_rows, line_styles, rgb
from benchmarks import cost_picture
from benchmarks.context_cost import Measured, Reading, Timing
from benchmarks.cost_picture import draw_cost
from model.config import GPTConfig


def luminance(color) -> float:
    """Relative luminance as WCAG 2.1 defines it: what is left of a colour where hues cannot be told apart."""
    share = np.asarray(color)[:3] / 255
    return float(np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722])


def contrast(one, other) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_curves_take_their_colours_from_the_scale_and_differ_in_brightness_marker_and_dashes():
    styles = line_styles(3)
    for style in styles:
        assert rgb(style["color"]) in {tuple(color) for color in SCALE[:, :3].tolist()}
    for one, other in combinations(styles, 2):
        assert contrast(rgb(one["color"]), rgb(other["color"])) > 1.5
        assert one["marker"] != other["marker"] and one["linestyle"] != other["linestyle"]
    assert len({tuple(style.values()) for style in line_styles(4)}) == 4
    brightness = [luminance(rgb(style["color"])) for style in line_styles(4)]
    assert brightness == sorted(set(brightness))


def test_text_can_be_read_on_every_row_of_the_scale():
    for row, ground in enumerate(ON_PAPER):
        text = rgb(LIGHT["strong"] if row >= WHITE_TEXT_FROM else LIGHT["ink"])
        assert contrast(text, ground) > 3.2, row
    for theme in (LIGHT, DARK):
        assert contrast(rgb(theme["ink"]), rgb(theme["paper"])) > 7
        assert contrast(rgb(theme["faint"]), rgb(theme["paper"])) > 4.5


def test_page_and_picture_show_the_same_colours_for_the_same_weights():
    maps = np.tril(np.random.default_rng(0).dirichlet(np.ones(32), (1, 1, 32))).astype(np.float32)
    page = attention_page(maps, ["x"] * 32, "", (0, 0, 0))
    assert '"colors":' + str(SCALE.tolist()).replace(" ", "") in page
    for theme in (LIGHT, DARK):
        assert " ".join(f"--{name}: {color};" for name, color in theme.items()) in page
    written = re.search(r"<style>(.*)</style>", page, re.S)[1]
    used = set(re.findall(r"var\(--([a-z]+)\)", written))
    assert used == set(LIGHT) == set(DARK)
    assert not set(re.findall(r"#[0-9a-f]{3,8}\b", written)) - {*LIGHT.values(), *DARK.values()}
    drawn = {tuple(color) for color in draw_attention(maps, ["x"] * 32).reshape(-1, 3).tolist()}
    assert {tuple(color) for color in ON_PAPER[color_rows(maps[maps > 0])].tolist()} <= drawn
    assert {rgb(LIGHT[name]) for name in ("paper", "masked", "ink")} <= drawn


@pytest.fixture
def measured() -> Measured:
    """Growing figures of three attentions, made up."""
    found = Measured(GPTConfig(vocab_size=10, sliding_window=256), "cpu", 2, 100.0)
    for name, power in (("eager", 2.0), ("sdpa", 1.7), ("sliding_window", 1.0)):
        for length in (128, 256, 512, 1024, 2048, 4096):
            ms = 10 * (length / 512) ** (power - 1)
            timing = Timing(ms, 0.9 * ms, 1.1 * ms, 3)
            found.readings.append(Reading(name, length, 8192 // length, timing, timing, ms, ms, 10 * ms, 1.0, 1.0))
    return found


def test_cost_picture_draws_each_attention_in_its_colour_of_the_scale(measured, tmp_path):
    draw_cost(measured, tmp_path / "cost.png")
    with Image.open(tmp_path / "cost.png") as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    styles = list(cost_picture.STYLES.values())
    assert styles == line_styles(len(styles))
    for style in styles:
        assert (pixels == rgb(style["color"])).all(-1).sum() > 30, style


@pytest.mark.parametrize(
    "lengths", [(128, 256, 512, 1024, 2048, 4096), (512,), (512, 1024), (1024, 4096), (512, 1024, 2048)], ids=str
)
def test_cost_picture_has_a_tick_at_the_last_length_and_two_on_each_upright_axis(
    measured, lengths, tmp_path, monkeypatch
):
    figures = []
    monkeypatch.setattr(cost_picture, "Figure", lambda **options: figures.append(Figure(**options)) or figures[-1])
    for flat in (False, True):
        measured.readings = [reading for reading in measured.readings if reading.context_length in lengths]
        if flat:  # a panel of points that are nearly the same
            measured.readings = [replace(r, step_peak_mb=213 + r.context_length / 1000) for r in measured.readings]
        draw_cost(measured, tmp_path / "cost.png")
        for axes in figures[-1].axes:
            ticks, (bottom, top) = axes.get_yticks(), axes.get_ylim()
            assert axes.get_xticks().max() == lengths[-1]
            assert sum(bottom <= tick <= top for tick in ticks) >= 2


def test_pictures_have_no_colours_of_their_own():
    for module in (attention_picture, cost_picture):
        with open(module.__file__, encoding="utf-8") as file:
            assert not re.findall(r"#[0-9a-f]{6}|\(\d{2,3}, \d{2,3}, \d{2,3}\)", file.read()), module
