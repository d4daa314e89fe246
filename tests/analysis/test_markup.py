"""A corpus full of markup does nothing in a real browser: it is shown as the text it is."""

from analysis import inspect_attention as see
from configs.compose import compose

LINES = (
    "<script>window.canary = 1</script>",
    "</script><script>window.canary = 2</script>",
    "<img src=x onerror='window.canary = 3'>",
    '"><svg onload="window.canary = 4">',
    "[a](javascript:window.canary=5) `</code></pre><b>bold</b>`",
    '<a href="javascript:window.canary = 6">a</a>',
)
# All text of a page, of shadow roots too, and all elements by that name.
ALL_TEXT = """
const texts = [], found = [];
(function walk(node) {
  if (node.shadowRoot) walk(node.shadowRoot);
  for (const child of node.childNodes) {
    if (child.nodeType === Node.TEXT_NODE && !["SCRIPT", "STYLE"].includes(node.nodeName)) texts.push(child.data);
    if (child.nodeType === Node.ELEMENT_NODE) { found.push(child.nodeName); walk(child); }
  }
})(document.body);
return [texts.join(""), found.filter(name => name === "SCRIPT" || name === "IMG").length, String(window.canary)];
"""


def test_attention_page_of_markup_shows_it_as_text(browser, tmp_path, capsys):
    text, page = "".join(LINES[:3])[:64], tmp_path / "page.html"
    see.main(compose("see", ["untrained=true", f"prompt={text}", f"html={page}"]))
    capsys.readouterr()
    browser.get(page.as_uri())
    shown = "".join(token.text.split("\n")[0] for token in browser.find_elements("css selector", ".token"))
    assert shown == text.replace(" ", "·")
    assert browser.execute_script("return String(window.canary)") == "undefined"


def test_tensorboard_of_a_run_on_markup_shows_what_it_writes_as_text(browser, board, train_here, events, tmp_path):
    (tmp_path / "markup.txt").write_text("\r".join([*LINES, ""]) * 60, encoding="utf-8", newline="")
    finished = train_here(
        f"data.corpus={tmp_path / 'markup.txt'}",
        "trainer.max_steps=150",
        "num_validations=1",
        "model.context_length=32",
    )
    assert finished.returncode == 0, finished
    (written,) = events(finished.path).Tensors("sample/text_summary")
    source = written.tensor_proto.string_val[0].decode()
    assert "script>" in source and "canary" in source  # so there is something to escape
    assert all(line.startswith("    ") for line in source.splitlines())
    browser.get(f"{board(finished.path.parent)}/#text")
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 60).until(lambda driver: "canary" in driver.execute_script(ALL_TEXT)[0])
    text, _, canary = browser.execute_script(ALL_TEXT)
    assert canary == "undefined"
    for line in source.splitlines():
        assert line.strip() in text
