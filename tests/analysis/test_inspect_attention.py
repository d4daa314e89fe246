"""inspect_attention shows what the network does: table, picture, and one line for what cannot be shown."""

import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from analysis import attention_plot
from analysis import inspect_attention as see
from analysis.attention_plot import MASKED, _drawable, _strip, draw_attention, draw_head_scores
from analysis.colors import SCALE, color_rows
from checkpoint.checkpoint import load_checkpoint
from configs.compose import compose
from configs.error_lines import exit_on_user_error
from data.tokenizer import encode
from system.errors import UserError

PROJECT = Path(__file__).resolve().parents[2]
TEXT = "The king and queen of night."


@pytest.fixture(scope="module")
def maps(tiny_run) -> np.ndarray:
    """Of the trained tiny run over TEXT, straight from the network: (L, H, T, T)."""
    checkpoint = load_checkpoint(tiny_run.path / "checkpoints" / "best.ckpt")
    ids = encode(checkpoint.tokenizer, TEXT)[-checkpoint.network.config.context_length :]
    return torch.cat(checkpoint.network.attention_maps(torch.from_numpy(ids)[None])).numpy()


@pytest.fixture
def inspect(tiny_run, capsys):
    """inspect(*arguments) is what the command prints about the tiny run: (standard output, standard error)."""

    def called(*arguments: str) -> tuple[str, str]:
        source = () if "untrained=true" in arguments else (f"checkpoint={tiny_run.dir}",)
        capsys.readouterr()
        see.main(compose("see", [*source, *arguments]))
        return tuple(capsys.readouterr())

    return called


@pytest.fixture
def refused(tiny_run, tmp_path, capsys):
    """refused(*arguments) is the one line with which they are refused."""

    def called(*arguments: str) -> str:
        source = () if "untrained=true" in arguments else (f"checkpoint={tiny_run.dir}",)
        capsys.readouterr()
        with pytest.raises(SystemExit) as end, exit_on_user_error("see"):
            see.main(compose("see", [*source, *arguments]))
        line = capsys.readouterr().err.split("\n")[-2]
        assert end.value.code == 2 and line.startswith("error: ")
        return line

    return called


def rows_of(table: str) -> list[tuple[int, str, float | None]]:
    """Position, token and weight of every line of the table."""
    found = re.findall(r"^ *(\d+)  (\S+) +?(?:(\d\.\d{3})|      )  \S", table, re.MULTILINE)
    return [(int(index), token, float(weight) if weight else None) for index, token, weight in found]


# The table


@pytest.mark.parametrize(("layer", "head", "token"), [(0, 0, 0), (1, 0, 4), (0, 1, 9), (1, 1, 7)])
def test_table_is_the_tensor_and_sums_to_one(inspect, maps, layer, head, token):
    output, _ = inspect(f"prompt={TEXT}", f"layer={layer}", f"head={head}", f"token={token}")
    rows = rows_of(output)
    assert [index for index, _, _ in rows] == list(range(maps.shape[-1]))
    weights = [weight for _, _, weight in rows]
    assert weights[token + 1 :] == [None] * (len(rows) - token - 1)  # what comes later cannot be seen
    np.testing.assert_allclose(weights[: token + 1], maps[layer, head, token, : token + 1], atol=0.0005001)
    assert sum(weights[: token + 1]) == pytest.approx(1, abs=0.0005 * len(rows))


def test_each_token_is_followed_by_its_strongest_links(inspect, maps):
    output, _ = inspect(f"prompt={TEXT}", "layer=1")
    for query, line in enumerate(output.splitlines()[2:]):
        links = [float(weight) for weight in re.findall(r"\d\.\d{3}", line)][1:]
        strongest = np.sort(maps[1, 0, query, : query + 1])[::-1][:3]
        np.testing.assert_allclose(links, strongest, atol=0.0005001)


def test_output_to_a_pipe_has_no_bars_and_a_terminal_has(maps):
    labels = [f"t{index}" for index in range(maps.shape[-1])]
    plain, barred = (see.table(maps[0, 0], labels, 5, bars) for bars in (False, True))
    assert "█" not in plain and "▏" not in plain
    assert rows_of(re.sub("[█▏▎▍▌▋▊▉]", " ", barred))
    full = see.table(np.eye(2, dtype=np.float32), ["a", "b"], 1, True).splitlines()[2]
    assert full.count("█") == see.BAR_WIDTH


def test_a_token_is_found_by_position_or_by_a_piece_of_the_text():
    tokens = [b"Or", b"ange", b" is", b" Or", b"ange"]
    found = {choice: see.find_token(choice, tokens) for choice in (None, "0", "3", "Orange", "O", "is", " is O", "e i")}
    assert found == {None: 4, "0": 0, "3": 3, "Orange": 4, "O": 3, "is": 2, " is O": 3, "e i": 2}


@given(st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=9), st.data())
@settings(max_examples=50, deadline=None)
def test_a_found_token_holds_the_last_byte_of_the_piece(tokens, data):
    text = b"".join(tokens).decode("latin-1")
    tokens = [token.decode("latin-1").encode() for token in tokens]
    start = data.draw(st.integers(0, len(text) - 1))
    piece = text[start : data.draw(st.integers(start + 1, len(text)))]
    if piece.isascii() and piece.isdigit():
        return
    assert piece.encode()[-1:] in tokens[see.find_token(piece, tokens)]


def test_text_longer_than_the_context_is_cut_from_the_left_and_says_so(inspect):
    output, messages = inspect("prompt=" + "love and death " * 30 + "and night")
    assert re.search(r"the text has \d+ tokens; the model sees the last 16", messages)
    rows = rows_of(output)
    assert len(rows) == 16 and "".join(token for _, token, _ in rows).endswith("·and·night")


def test_an_untrained_network_needs_no_run(inspect):
    output, messages = inspect("untrained=true", "prompt=Orange is my favorite fruit", "runs_dir=/nowhere")
    assert messages.startswith("untrained: 2 layers, 4 heads")
    assert len(rows_of(output)) == len("Orange is my favorite fruit")
    assert inspect("untrained=true", "model=gpt2", "model.num_heads=2", "prompt=a b")[1].count("2 heads") == 1
    one = ("model.num_layers=1", "model.num_heads=1")
    assert "untrained: 1 layer, 1 head, width" in inspect("untrained=true", *one, "prompt=a b")[1]


# The pictures


def test_picture_is_a_png_that_decodes_to_the_colours_of_the_weights(inspect, maps, tmp_path):
    path = tmp_path / "a=b, maps.png"
    inspect(f"prompt={TEXT}", f"png={path}")
    with Image.open(path) as image:
        assert image.format == "PNG"
        picture = np.asarray(image.convert("RGB"))
    colors = {tuple(color) for color in picture.reshape(-1, 3)}
    on_white = 255 + (SCALE[:, :3].astype(float) - 255) * SCALE[:, 3:] / 255
    expected = {tuple(on_white[row].round().astype(int)) for row in color_rows(maps[maps > 0])}
    assert expected <= colors and MASKED in colors


def test_every_cell_has_the_colour_of_its_weight():
    maps = np.tril(np.random.default_rng(0).dirichlet(np.ones(32), (2, 3, 32))).astype(np.float32)
    picture = draw_attention(maps, ["x"] * 32)
    cell, corner = 11, np.argwhere((picture == MASKED).all(-1)).min(0)  # the first masked cell: row 0, column 1
    on_white = 255 + (SCALE[:, :3].astype(float) - 255) * SCALE[:, 3:] / 255
    top, left = corner[0] + cell // 2, corner[1] - cell + cell // 2
    for query, key in [(0, 0), (31, 0), (31, 31), (17, 4)]:
        expected = on_white[color_rows(maps[0, 0, query, key])].round()
        np.testing.assert_array_equal(picture[top + query * cell, left + key * cell], expected)


@pytest.fixture
def fonts(monkeypatch):
    """fonts(*files) are those of the system from now on."""
    caches = (attention_plot._font_of, attention_plot._warn_missing_font, attention_plot._strip)

    def installed(*files):
        monkeypatch.setattr(attention_plot, "_system_fonts", lambda: tuple(map(str, files)))
        for cached in caches:
            cached.cache_clear()

    yield installed
    for cached in caches:
        cached.cache_clear()


def font_with(path, characters):
    """A font in which each of these characters is a square."""
    pen = TTGlyphPen(None)
    for draw, point in zip((pen.moveTo, *[pen.lineTo] * 3), [(100, 0), (900, 0), (900, 800), (100, 800)], strict=True):
        draw(point)
    pen.closePath()
    names = {ord(char): f"glyph{index}" for index, char in enumerate(characters)}
    glyphs = dict.fromkeys([".notdef", *names.values()], pen.glyph())
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(list(glyphs))
    builder.setupCharacterMap(names)
    builder.setupGlyf(glyphs)
    builder.setupHorizontalMetrics(dict.fromkeys(glyphs, (1000, 100)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Squares", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    return path


def test_characters_that_our_font_lacks_are_drawn_with_one_of_the_system(fonts, tmp_path, caplog):
    broken = tmp_path / "broken.ttf"
    broken.write_bytes(b"no font")
    fonts(broken, font_with(tmp_path / "squares.ttf", "漢字"))
    assert _drawable("a漢字") == "a漢字" and caplog.text == ""
    inked = np.asarray(_strip((_drawable("漢a字"),), 30, 90, 20)).max(0) > 40
    assert (np.diff(inked.astype(int)) == 1).sum() == 3 and inked.sum() > 35  # two squares of 16, and a letter
    assert draw_attention(np.ones((1, 1, 1, 1), np.float32), ["漢字"], "字").shape[2] == 3


def test_characters_of_no_font_are_shown_by_number_and_the_package_is_named_once(fonts, caplog):
    fonts()
    assert _drawable("显a") == "\\u663ea" and _drawable("示") == "\\u793a"
    assert caplog.text.count("apt-get install fonts-noto-cjk") == 1 and len(caplog.records) == 1


@pytest.mark.parametrize("label", ["↵↵", ".↵↵", "→→", "↵→↵"])
def test_signs_of_white_space_stand_apart(label):
    strip = np.asarray(_strip((_drawable(label),), 30, 90, 10))  # opacity, (30, 90)
    inked = strip.max(0) > 40
    pieces = (np.diff(inked.astype(int)) == 1).sum()
    assert pieces == len(label)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 5), (3, 2, 64), (2, 2, 300)])
@pytest.mark.parametrize("label", ["x", "", "漢字", "$a_b$", "↵↵", "·favorite123"])
def test_any_shape_and_label_can_be_drawn(shape, label):
    layers, heads, T = shape
    maps = np.tril(np.full((layers, heads, T, T), 1 / T, np.float32))
    picture = draw_attention(maps, [label] * T, "a title " * 40)
    assert picture.dtype == np.uint8 and picture.shape[2] == 3


def test_a_picture_too_large_to_open_is_refused():
    with pytest.raises(UserError, match="12 layers x 40 heads of 256 tokens"):
        draw_attention(np.zeros((12, 40, 256, 256), np.float32), ["x"] * 256)


def test_larger_scores_are_darker():
    tables = {"a": np.array([[0.0, 0.5, 1.0]])}
    picture = draw_head_scores(tables, {"a": 1.0}).astype(int)
    middle = picture[3 * 16 + 4, [64 + 44 * head + 4 for head in range(3)]].sum(-1)
    assert middle[0] > middle[1] > middle[2]


# Refusals


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        (["prompt=The king", "layer=2"], "layers 0 to 1"),
        (["prompt=The king", "head=-1"], "heads 0 to 1"),
        (["prompt=The king", "token=400"], "tokens 0 to"),
        (["prompt=The king", "token=queen"], "is not in the text. Give a piece"),
        (["prompt=The king", "token="], "is not in the text. Give a piece"),
        (["prompt=The king", "layer=first"], "layer"),
        (["prompt=The king", "heads=1"], "Did you mean head"),
        (["prompt=The king", "model.num_heads=2"], "untrained=true"),
        (["prompt=The king", "untrained=true", "checkpoint=x.ckpt"], "Leave one out"),
        (["prompt=The king", "untrained=true", "model.num_heads=5"], "num_heads"),
        (["prompt=The king", "checkpoint=nothing.ckpt"], "no checkpoint nothing.ckpt"),
        (["prompt=The king", "png=/nowhere/x.png"], "/nowhere/x.png cannot be written"),
        (["prompt=The king", "html=/nowhere/x.html"], "/nowhere/x.html cannot be written"),
        (["prompt=The king", "png=maps.bmp"], "png is 'maps.bmp', but must end in .png"),
        (["prompt=The king", "html=maps"], "html is 'maps', but must end in .html"),
        (["prompt=The king", "prompt_file=x.txt"], "Leave one out"),
        (["prompt_file=/nowhere/x.txt"], "cannot be read"),
        (["prompt="], "no text"),
        ([], "no text"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(refused, arguments, mend):
    assert mend in refused(*arguments)


def test_no_trained_run_is_said_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit), exit_on_user_error("see"):
        see.main(compose("see", ["prompt=a", f"runs_dir={tmp_path}"]))
    assert "no trained run" in capsys.readouterr().err


def test_text_comes_from_standard_input_too(inspect, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("été, a=b".encode())))
    assert inspect("prompt_file=-", "token=a=b")[0].startswith("layer 0, head 0")


def test_command_writes_table_picture_and_page(tiny_run, tmp_path, clean_environment):
    files = f"png={tmp_path / 'maps.png'}", f"html={tmp_path / 'page.html'}"
    command = [
        sys.executable,
        "-m",
        "analysis.inspect_attention",
        f"checkpoint={tiny_run.dir}",
        "prompt=<script>alert(1)</script>",
        *files,
    ]
    done = subprocess.run(
        command, cwd=PROJECT, env=clean_environment, capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout.startswith('layer 0, head 0: where token 15, "')
    assert (tmp_path / "maps.png").stat().st_size > 1000
    assert "<script>alert" not in (tmp_path / "page.html").read_text(encoding="utf-8")
