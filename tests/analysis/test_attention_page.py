"""The page in a real browser: what one sees when pointing at a token is the tensor, and nothing else happens."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.ablation import AblationCosts, ablation_costs
from analysis.attention_html import attention_page, embeddable
from analysis.colors import SCALE, color_rows
from analysis.logit_attribution import logit_attribution
from analysis.logit_lens import logit_lens
from analysis.text_measures import TextMeasures, measure_text
from analysis.value_weighted_attention import value_weighted_maps
from data.tokenizer import make_encoding, token_labels
from model.gpt import Block
from tests.analysis.networks import random_network


def random_maps(layers: int, heads: int, T: int) -> np.ndarray:
    """Causal attention weights, some large and many small."""
    scores = 2 * torch.randn(layers, heads, T, T, generator=torch.Generator().manual_seed(0))
    return scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf).softmax(-1).numpy()


WORDS = ["Orange", "·is", "·my", "·favorite", "↵", "·fruit", "."]
MAPS = random_maps(2, 3, len(WORDS))


@pytest.fixture
def open_page(browser, tmp_path):
    """open_page(maps, labels) shows that page; afterwards it must have been quiet: no errors, no requests."""

    def opened(maps=MAPS, labels=WORDS, about="a test", chosen=(0, 0, 0), measures=None):
        path = tmp_path / "page.html"
        path.write_text(attention_page(maps, labels, about, chosen, measures), encoding="utf-8")
        for kind in ("browser", "performance"):
            browser.get_log(kind)
        browser.get(path.as_uri())
        return browser

    yield opened
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    urls = [r["request"]["url"] for r in requests if r["documentURL"].startswith("file://")]  # not the first, empty tab
    assert len([url for url in urls if url.startswith("file://")]) == 1  # the page itself
    assert [url for url in urls if not url.startswith(("file://", "data:"))] == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def tokens_of(browser):
    return browser.find_elements("css selector", ".token")


def point_at(browser, element):
    from selenium.webdriver import ActionChains

    ActionChains(browser, duration=0).move_to_element(element).perform()


def press(browser, *names):
    from selenium.webdriver import ActionChains, Keys

    for name in names:
        ActionChains(browser, duration=0).send_keys(getattr(Keys, name)).perform()


def shown_numbers(browser) -> np.ndarray:
    texts = browser.execute_script("return Array.from(document.querySelectorAll('.token'), t => t.dataset.weight)")
    return np.array([float(text or 0) for text in texts])


def heading(browser) -> str:
    return browser.find_element("id", "heading").text


def rgba(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+", text)]


def test_pointing_at_a_token_shows_its_row_of_the_tensor(open_page):
    browser = open_page()
    for query in (5, 2, 6):
        point_at(browser, tokens_of(browser)[query])
        assert heading(browser) == f"Layer 0, head 0: token {query} “{WORDS[query]}” looks at"
        # half a byte of quantisation on the root's scale, 0.004, and half a digit
        np.testing.assert_allclose(shown_numbers(browser), MAPS[0, 0, query], atol=0.004 + 0.005)
        colors = [rgba(token.value_of_css_property("background-color")) for token in tokens_of(browser)[: query + 1]]
        expected = SCALE[color_rows(MAPS[0, 0, query, : query + 1])].astype(float)
        for color, (red, green, blue, alpha) in zip(colors, expected, strict=True):
            assert color[:3] == [red, green, blue] or alpha == 0
            assert (color[3] if len(color) > 3 else 1.0) == pytest.approx(alpha / 255, abs=0.005)


def test_strongest_links_are_listed_in_order(open_page):
    browser = open_page()
    point_at(browser, tokens_of(browser)[6])
    rows = [row.text.split() for row in browser.find_elements("css selector", "#links li")]
    order = np.argsort(-color_rows(MAPS[0, 0, 6]).astype(int), kind="stable")
    assert [int(key) for _, key, _ in rows] == order.tolist()
    np.testing.assert_allclose([float(weight) for weight, _, _ in rows], MAPS[0, 0, 6][order], atol=0.0045)
    point_at(browser, tokens_of(browser)[1])
    rows = browser.find_elements("css selector", "#links li")
    assert [row.is_displayed() for row in rows] == [True, True] + 5 * [False]  # it sees two tokens


def test_small_maps_choose_layer_and_head(open_page):
    browser = open_page()
    browser.find_element("css selector", "[aria-label='layer 1, head 2']").click()
    point_at(browser, tokens_of(browser)[4])
    assert heading(browser).startswith("Layer 1, head 2: token 4")
    np.testing.assert_allclose(shown_numbers(browser), MAPS[1, 2, 4], atol=0.009)
    pixels = browser.execute_script(
        "const context = document.querySelectorAll('canvas')[5].getContext('2d');"
        "return Array.from(context.getImageData(0, 0, 7, 7).data);"
    )
    opacity = np.array(pixels).reshape(7, 7, 4)[..., 3]
    np.testing.assert_array_equal(opacity, np.tril(SCALE[color_rows(MAPS[1, 2]), 3]))


def test_keyboard_alone_reaches_every_token_layer_and_head(open_page):
    browser = open_page()
    browser.execute_script("document.activeElement.blur()")
    press(browser, "TAB", "ARROW_RIGHT", "ARROW_RIGHT")
    assert "token 2" in heading(browser)
    press(browser, "END")
    assert "token 6" in heading(browser)
    press(browser, "ARROW_RIGHT")  # there is no more
    assert "token 6" in heading(browser)
    press(browser, "ARROW_UP")  # the line before the line's end
    assert "token 1" in heading(browser) or "token 0" in heading(browser)
    press(browser, "HOME", "ARROW_DOWN")
    assert "token 5" in heading(browser)
    press(browser, "TAB", "ARROW_DOWN", "ARROW_RIGHT")
    assert heading(browser).startswith("Layer 1, head 1: token 5")
    np.testing.assert_allclose(shown_numbers(browser), MAPS[1, 1, 5], atol=0.009)
    stops = browser.execute_script("return document.querySelectorAll('[tabindex=\"0\"]').length")
    assert stops == 2  # the text and the maps


def test_everything_that_can_be_reached_says_what_it_is(open_page):
    browser = open_page()
    labels = browser.execute_script(
        "return Array.from(document.querySelectorAll('[role]'), e => [e.role, e.ariaLabel])"
    )
    assert ["listbox", "tokens of the text"] in labels and ["radiogroup", "layer and head"] in labels
    assert ["option", "token 3 of 7: ·favorite"] in labels and ["radio", "layer 1, head 0"] in labels
    chosen = (
        "return Array.from(document.querySelectorAll('[aria-checked=true], [aria-selected=true]'), e => e.ariaLabel)"
    )
    assert browser.execute_script(chosen) == ["token 0 of 7: Orange", "layer 0, head 0"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(open_page, scheme):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser = open_page(chosen=(0, 0, 6))
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    paper = np.array(rgba(browser.find_element("css selector", "body").value_of_css_property("background-color"))[:3])
    assert (paper.mean() < 60) == (scheme == "dark")
    for token in tokens_of(browser):
        color = rgba(token.value_of_css_property("background-color"))
        alpha = color[3] if len(color) > 3 else 1.0
        ground = alpha * np.array(color[:3]) + (1 - alpha) * paper
        ink = np.array(rgba(token.value_of_css_property("color"))[:3])
        bright, dim = sorted((luminance(ink), luminance(ground)), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 4  # WCAG's contrast; it asks for 3 of large text, 4.5 of small
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def luminance(color: np.ndarray) -> float:
    """Relative luminance as WCAG 2 defines it."""
    share = color / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_scripts_in_the_text_do_nothing(open_page):
    labels = ["<script>alert(1)</script>", "</script><img src=x onerror=alert(2)>", "<!--", "{{data}}", "&lt;", "é漢"]
    browser = open_page(random_maps(1, 1, 6), labels, about=labels[0])
    assert [token.text.split("\n")[0] for token in tokens_of(browser)] == labels
    assert browser.find_element("id", "about").text == labels[0]
    assert len(browser.find_elements("css selector", "script")) == 2 and not browser.find_elements(
        "css selector", "img"
    )
    point_at(browser, tokens_of(browser)[1])
    assert labels[1] in heading(browser)


# With measures


@pytest.fixture(scope="module")
def measured():
    """A network of 3 layers and 4 heads, its maps (L, H, T, T), labels and measures of a text of 8 tokens."""
    network = random_network("gpt2").eval()
    tokenizer = make_encoding("few", "(?s:.)", {bytes([byte]): byte for byte in range(256)})
    ids = [7, 9, 7, 9, 30, 31, 7, 9]
    maps = torch.cat(network.attention_maps(torch.tensor([ids]))).numpy()
    return network, torch.tensor(ids), maps, token_labels(tokenizer, ids), measure_text(network, tokenizer, ids)


@pytest.fixture
def open_measured(open_page, measured):
    _, _, maps, labels, measures = measured
    return open_page(maps, labels, chosen=(1, 2, 5), measures=measures)


def choose_view(browser, name):
    browser.find_element("css selector", f"input[value={name}]").click()


def signed_number(text: str) -> float:
    return float(text.replace("−", "-"))


def test_measures_are_those_of_their_modules(measured):
    network, ids, _, _, measures = measured
    log_probs = network(ids[None])[0].log_softmax(-1).detach()
    expected = [-log_probs[t - 1, ids[t]].item() / np.log(2) for t in range(1, 8)]
    assert np.isnan(measures.surprise[0])
    np.testing.assert_allclose(measures.surprise[1:], expected, rtol=1e-4)
    top = log_probs.exp().topk(5)
    np.testing.assert_array_equal(measures.predictions[-1], top.indices)
    np.testing.assert_allclose(measures.probabilities[-1], top.values, rtol=1e-4)
    lens = logit_lens(network, ids[None])[:, 0].softmax(-1).topk(5)
    np.testing.assert_array_equal(measures.predictions, lens.indices)
    assert measures.target_ids == [*ids[1:].tolist(), top.indices[-1, 0].item()]
    for position in (0, 4, 7):
        parts = logit_attribution(network, ids, measures.target_ids[position], position=position)
        assert list(measures.contributions) == list(parts)
        np.testing.assert_allclose([row[position] for row in measures.contributions.values()], [*parts.values()])
    np.testing.assert_array_equal(measures.costs.heads, ablation_costs(network, ids[None]).heads)
    np.testing.assert_array_equal(measures.value_maps, value_weighted_maps(network, ids[None])[:, 0])


def test_text_of_one_token_and_an_edited_block_have_the_measures_that_exist(measured, monkeypatch):
    network = measured[0]
    tokenizer = make_encoding("few", "(?s:.)", {bytes([byte]): byte for byte in range(256)})
    assert measure_text(network, tokenizer, [3]).costs is None
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda *args, **options: 1.5 * forward(*args, **options))
    edited = measure_text(network, tokenizer, [3, 4])
    assert edited.contributions is None and edited.costs is not None


def test_value_weighted_view_shows_the_length_of_what_is_moved(open_measured, measured):
    browser, values = open_measured, measured[4].value_maps
    choose_view(browser, "values")
    point_at(browser, tokens_of(browser)[6])
    longest = values.max()
    np.testing.assert_allclose(shown_numbers(browser), values[1, 2, 6], atol=0.012 * longest)
    assert heading(browser).startswith("Layer 1, head 2: what token 6")
    pixels = browser.execute_script(
        "return Array.from(document.querySelectorAll('canvas')[6].getContext('2d').getImageData(0, 0, 8, 8).data);"
    )
    opacity = np.array(pixels).reshape(8, 8, 4)[..., 3]
    np.testing.assert_array_equal(opacity, np.tril(SCALE[color_rows(values[1, 2] / longest), 3]))
    choose_view(browser, "weights")
    np.testing.assert_allclose(shown_numbers(browser), measured[2][1, 2, 6], atol=0.009)


def test_surprise_view_shows_the_bits_of_every_token(open_measured, measured):
    choose_view(open_measured, "surprise")
    np.testing.assert_allclose(shown_numbers(open_measured)[1:], measured[4].surprise[1:], atol=0.06)
    point_at(open_measured, tokens_of(open_measured)[5])
    shown = float(heading(open_measured).split(" of ")[-1].removesuffix(" %"))
    assert shown / 100 == pytest.approx(2.0 ** -measured[4].surprise[5], rel=0.06)
    point_at(open_measured, tokens_of(open_measured)[0])
    assert heading(open_measured).startswith("Nothing predicts token 0")


def test_pointing_at_a_token_shows_what_each_layer_predicts(open_measured, measured):
    browser, measures = open_measured, measured[4]
    for query in (2, 7):
        point_at(browser, tokens_of(browser)[query])
        rows = browser.find_elements("css selector", "#layers [role=row]")
        assert [row.text.split()[0] for row in rows] == ["embedding", "layer", "layer", "layer"]
        for layer, row in enumerate(rows):
            cells = [cell.text.split("\n") for cell in row.find_elements("css selector", "[role=cell]")]
            labels = [measures.prediction_labels[token] for token in measures.predictions[layer, query]]
            assert [label for label, _ in cells] == labels
            percents = [float(percent) for _, percent in cells]
            np.testing.assert_allclose(percents, 100 * measures.probabilities[layer, query], atol=0.56)
            framed = [cell.text.split("\n")[0] for cell in row.find_elements("css selector", ".next")]
            assert framed == [label for label in labels if label == measures.targets[query]]


def test_bars_show_what_makes_the_logit(open_measured, measured):
    network, ids = measured[:2]
    point_at(open_measured, tokens_of(open_measured)[3])
    rows = [row.text.split("\n") for row in open_measured.find_elements("css selector", "#parts li")]
    shown = {label: signed_number(value) for value, label in rows}
    logit = network(ids[None])[0, 3, ids[4]].item()
    assert shown.pop("sum: the logit") == pytest.approx(logit, abs=0.006)
    rest = [value for label, value in shown.items() if label.endswith("other parts")]
    parts = logit_attribution(network, ids, ids[4].item(), position=3)
    largest = sorted(parts, key=lambda label: -abs(parts[label]))[:12]
    assert list(shown)[:12] == largest and len(rest) == 1
    for label in largest:
        assert shown[label] == pytest.approx(parts[label], abs=0.006)
    assert sum(shown.values()) == pytest.approx(logit, abs=0.1)


def test_frames_and_text_say_what_a_head_and_an_mlp_are_worth(open_measured, measured):
    costs = measured[4].costs
    for layer, head in ((0, 0), (2, 3)):
        button = open_measured.find_element("css selector", f"[aria-label='layer {layer}, head {head}']")
        button.click()
        verb = "rises" if costs.heads[layer, head] >= 0 else "falls"
        cost = f"{verb} by {abs(costs.heads[layer, head]):.3f} nats per token"
        assert cost in open_measured.find_element("id", "cost").text and cost in button.get_attribute("title")
    frames = open_measured.execute_script(
        "return Array.from(document.querySelectorAll('#heads .cost'), e => getComputedStyle(e).borderTopColor);"
    )
    opacities = [float(frame.partition("/")[2].strip(" )") or 1) for frame in frames]  # color(srgb r g b / opacity)
    expected = torch.cat([costs.heads, costs.mlps[:, None]], 1).abs().sqrt()
    np.testing.assert_allclose(np.reshape(opacities, (3, 5)), expected / expected.max(), atol=0.011)
    boxes = open_measured.find_elements("css selector", ".mlp")
    assert [
        f"by {abs(cost):.3f}" in box.get_attribute("aria-label") for box, cost in zip(boxes, costs.mlps, strict=True)
    ]


def test_scripts_in_predictions_do_nothing(open_page, measured):
    _, _, maps, labels, measures = measured
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    predicted = dict.fromkeys(measures.prediction_labels, evil)
    browser = open_page(maps, labels, measures=replace(measures, prediction_labels=predicted, targets=[evil] * 8))
    assert browser.find_element("css selector", "#layers b").text == evil
    assert not browser.find_elements("css selector", "img")


def test_views_are_reached_by_the_keyboard(open_measured):
    open_measured.execute_script("document.activeElement.blur()")
    press(open_measured, "TAB", "ARROW_RIGHT")
    assert open_measured.find_element("css selector", "input:checked").get_attribute("value") == "values"
    press(open_measured, "TAB", "ARROW_LEFT")
    assert "token 4" in heading(open_measured)


@pytest.mark.parametrize("width", [1280, 390])
def test_page_fits_a_screen_and_a_phone(open_measured, width):
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    open_measured.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        assert open_measured.execute_script("return document.documentElement.scrollWidth") == width
        for part in ("#tokens", "#layers", "#parts", "#heads"):
            box = open_measured.find_element("css selector", part).rect
            assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["height"] > 20
    finally:
        open_measured.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_256_tokens_of_36_heads_are_a_small_page(open_page, tmp_path):
    maps, T = random_maps(6, 6, 256), 256
    draw = np.random.default_rng(0)
    parts = ["token embedding", *(f"layer {n // 7} part {n % 7}" for n in range(42))]
    measures = TextMeasures(
        value_maps=3 * maps,
        surprise=draw.uniform(0, 9, T),
        predictions=draw.integers(0, 2000, (7, T, 5)),
        probabilities=draw.uniform(0, 1, (7, T, 5)),
        prediction_labels={token: f"·label{token}" for token in range(2000)},
        target_ids=draw.integers(0, 2000, T).tolist(),
        targets=[f"·word{i + 1}" for i in range(T)],
        contributions={part: draw.normal(size=T) for part in parts},
        costs=AblationCosts(4.0, torch.randn(6, 6), torch.randn(6)),
    )
    browser = open_page(maps, [f"·word{i}" for i in range(256)], measures=measures)
    assert (tmp_path / "page.html").stat().st_size <= 6 * 2**20
    point_at(browser, tokens_of(browser)[200])
    np.testing.assert_allclose(shown_numbers(browser), maps[0, 0, 200], atol=0.009)


def test_embedded_data_is_the_same_json_without_a_tag():
    data = {"a": "</script><!--<script>\u2028", "b": [1, 2]}
    text = embeddable(data)
    assert "<" not in text and "\u2028" not in text and json.loads(text) == data
