"""The page in a real browser: what one sees when pointing at a token is the tensor, and nothing else happens."""

import json
import re

import numpy as np
import pytest
import torch

from analysis.attention_html import attention_page, embeddable
from analysis.colors import SCALE, color_rows


def random_maps(layers: int, heads: int, T: int) -> np.ndarray:
    """Causal attention weights, some large and many small."""
    scores = 2 * torch.randn(layers, heads, T, T, generator=torch.Generator().manual_seed(0))
    return scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf).softmax(-1).numpy()


WORDS = ["Orange", "·is", "·my", "·favorite", "↵", "·fruit", "."]
MAPS = random_maps(2, 3, len(WORDS))


@pytest.fixture
def open_page(browser, tmp_path):
    """open_page(maps, labels) shows that page; afterwards it must have been quiet: no errors, no requests."""

    def opened(maps=MAPS, labels=WORDS, about="a test", chosen=(0, 0, 0)):
        path = tmp_path / "page.html"
        path.write_text(attention_page(maps, labels, about, chosen), encoding="utf-8")
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


def test_256_tokens_of_36_heads_are_a_small_page(open_page, tmp_path):
    maps = random_maps(6, 6, 256)
    browser = open_page(maps, [f"·word{i}" for i in range(256)])
    assert (tmp_path / "page.html").stat().st_size <= 5 * 2**20
    point_at(browser, tokens_of(browser)[200])
    np.testing.assert_allclose(shown_numbers(browser), maps[0, 0, 200], atol=0.009)


def test_embedded_data_is_the_same_json_without_a_tag():
    data = {"a": "</script><!--<script>\u2028", "b": [1, 2]}
    text = embeddable(data)
    assert "<" not in text and "\u2028" not in text and json.loads(text) == data
