"""The report of a run in a real browser: what it shows is what was recorded, which is what the network does."""

import io
import json
import re
import shutil
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from analysis.ablation import ablation_costs
from analysis.colors import SCALE
from analysis.logit_lens import lens_losses
from analysis.recording import (
    HEAD_SCORES,
    ValidationRecord,
    append_to_curve,
    load_curve,
    load_validations,
    pack_maps,
    rewind,
    save_validation,
    validation_file,
)
from analysis.report import main
from analysis.report_html import MAX_VALIDATIONS, RecordedRun, load_run, report_page
from checkpoint.checkpoint import load_checkpoint
from data.config import DataConfig, TokenizerConfig
from system.errors import UserError
from training.callbacks.validation_images import num_sample_tokens
from training.datamodule import TextDataModule


@pytest.fixture(scope="session")
def run(tiny_run):
    """What the shared run has recorded."""
    return load_run(tiny_run.path)


def fake_run(tmp_path, name="a run", text="text", steps=(5, 10), layers=2, heads=2, T=8) -> RecordedRun:
    """A run whose every text is `text`."""
    maps = torch.rand(layers, heads, T, T, generator=torch.Generator().manual_seed(0)).tril()
    packed = pack_maps((maps / maps.sum(-1, keepdim=True)).numpy())
    zeros = np.zeros((layers, heads), np.float32)
    arrays = {
        "attention": packed,
        "scores": np.stack([zeros] * len(HEAD_SCORES)),
        "ablation_heads": zeros + 0.25,
        "ablation_mlps": zeros[:, 0],
        "lens": np.arange(layers + 1, dtype=np.float32),
    }
    validations = [
        ValidationRecord(step, 100 * step, 1.0, 4.0, 2.0, text=text, labels=(text,) * T, **arrays) for step in steps
    ]
    facts = {
        "config": {"seed": 0, "logger": {"tensorboard": {}}, "data": {"corpus": text}},
        "changed": ["data.corpus"],
        "parameters": 1000,
        **dict.fromkeys(("command", "about", "budget", "prompt", "longer", "machine"), text),
    }
    curve = [{"step": step, "loss": 5.0, "tokens": 1, "memory_mb": 10.0, "step_ms": None} for step in steps]
    return RecordedRun(tmp_path / name, facts, validations, curve, {}, [])


@pytest.fixture
def open_page(browser, tmp_path):
    """open_page(path or runs, width) shows that page; afterwards it must have been quiet: no errors, no requests."""

    def opened(page, width=1280):
        path = page
        if isinstance(page, list):
            path = tmp_path / "page.html"
            path.write_text(report_page(page), encoding="utf-8")
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get_log("browser")
        browser.get(path.as_uri())
        return browser

    yield opened
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def text_of(browser, id):
    return browser.find_element("id", id).text


def press(browser, *names):
    from selenium.webdriver import ActionChains, Keys

    for name in names:
        ActionChains(browser, duration=0).send_keys(getattr(Keys, name)).perform()


def assert_shows(browser, record):
    """The maps, the numbers and the text on the page are those of the record."""
    assert text_of(browser, "now").startswith(f"step {record.step} ")
    assert f"{record.nats_per_token:.3f} nats per token" in text_of(browser, "now")
    T, (L, H) = len(record.labels), record.attention.shape[:2]
    query, key = np.tril_indices(T)
    maps = np.zeros((L * H, T, T), np.uint8)
    maps[:, query, key] = record.attention.reshape(L * H, -1)
    pixels = browser.execute_script(
        "return Array.from(document.querySelectorAll('#heads canvas'), canvas => "
        "Array.from(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data));"
    )
    opacity = np.array(pixels).reshape(L * H, T, T, 4)[..., 3]
    np.testing.assert_array_equal(opacity, SCALE[maps, 3])
    shown = browser.execute_script("return Array.from(document.querySelectorAll('.number'), each => each.textContent);")
    expected = [[*record.ablation_heads[layer], record.ablation_mlps[layer]] for layer in range(L)]
    numbers = [float(each.replace("−", "-")) for each in shown]
    np.testing.assert_allclose(numbers, np.array(expected).flatten(), atol=0.0051)
    lens = [float(each.text) for each in browser.find_elements("css selector", "#lens b")]
    np.testing.assert_allclose(lens, record.lens, atol=0.00051)
    assert browser.find_element("id", "text").get_property("textContent") == record.text


def test_recorded_values_are_those_of_the_network(tiny_run, run):
    """The last checkpoint has the weights of the last validation."""
    record, checkpoint = run.validations[-1], load_checkpoint(tiny_run.path / "checkpoints/last.ckpt")
    config = DataConfig(corpus=str(tiny_run.path.parents[1] / "words.txt"), batch_size=4)
    data = TextDataModule(config, TokenizerConfig(), 16, 0, checkpoint.tokenizer)
    data.prepare()
    network = checkpoint.network
    assert record.step == checkpoint.step == 40 and record.tokens == 40 * 4 * 16
    maps = torch.stack(network.attention_maps(data.val_passage(16)[None]))[:, 0]
    query, key = np.tril_indices(16)
    weights = (record.attention.astype(float) / 255) ** 2
    np.testing.assert_allclose(weights, maps[:, :, query, key], atol=0.005)
    sample = data.val_sample(num_sample_tokens(network.config, data.val_dataloader().num_predicted))
    costs = ablation_costs(network, sample)
    assert_close(torch.from_numpy(record.ablation_heads), costs.heads, atol=1e-3, rtol=1e-2)
    assert_close(torch.from_numpy(record.ablation_mlps), costs.mlps, atol=1e-3, rtol=1e-2)
    assert_close(torch.from_numpy(record.lens), lens_losses(network, sample), atol=1e-3, rtol=1e-3)
    assert record.sample_tokens == sample[:, 1:].numel()


def test_slider_and_arrow_keys_show_what_was_recorded(open_page, tiny_run, run):
    browser, records = open_page(tiny_run.path / "report.html"), run.validations
    assert len(records) == 5
    assert_shows(browser, records[4])  # the last is shown first
    press(browser, "ARROW_LEFT", "ARROW_LEFT")
    assert_shows(browser, records[2])
    browser.find_element("id", "slider").click()  # its middle
    press(browser, "ARROW_LEFT", "ARROW_LEFT", "ARROW_LEFT")  # there is no more
    assert_shows(browser, records[0])
    browser.find_element("css selector", "[aria-label='layer 1, head 0']").click()
    assert text_of(browser, "head-title") == "Layer 1, head 0"
    scores = [each.text for each in browser.find_elements("css selector", "#scores b")][1:]
    np.testing.assert_allclose([float(each) for each in scores], records[0].scores[:, 1, 0], atol=0.0051)


def test_chart_shows_the_losses_at_the_pointer(open_page, tiny_run, run):
    from selenium.webdriver import ActionChains

    browser = open_page(tiny_run.path / "report.html")
    chart = browser.find_element("css selector", "#loss svg")
    ActionChains(browser, duration=0).move_to_element_with_offset(chart, chart.size["width"] // 2 - 13, 0).perform()
    step, *values = browser.find_element("css selector", "#loss .tip").text.split("\n")
    assert step == "step 40"
    rows, _ = load_curve(tiny_run.path)
    assert values == [f"training  {rows[-1]['loss']:.3f}", f"validation  {run.validations[-1].nats_per_token:.3f}"]
    browser.find_element("id", "log").click()
    assert len(browser.find_elements("css selector", "#loss circle")) == 5 + len(rows)
    press(browser, "TAB")
    browser.execute_script("document.querySelector('#loss svg').focus()")
    press(browser, "ARROW_RIGHT")
    assert browser.find_element("css selector", "#loss .tip").text.startswith("step 5\n")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_page_fits_its_window(open_page, browser, tiny_run, width, scheme):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser = open_page(tiny_run.path / "report.html", width)
    browser.find_element("css selector", "summary").click()
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    paper = browser.find_element("css selector", "body").value_of_css_property("background-color")
    assert (int(re.search(r"\d+", paper)[0]) < 60) == (scheme == "dark")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_headline_settings_and_commands_are_those_of_the_run(open_page, tiny_run):
    browser, summary = open_page(tiny_run.path / "report.html"), tiny_run.summary
    tiles = text_of(browser, "tiles")
    assert f"{summary['val_bits_per_byte']:.3f}" in tiles and f"{summary['steps']} steps" in tiles
    changed = text_of(browser, "changed")
    assert "trainer.max_steps 40" in changed and "optimizer.lr" not in changed
    commands = text_of(browser, "commands")
    for command in ("train.py resume=", "sample.py checkpoint=", "inspect_attention checkpoint=", "analysis.report "):
        assert f"{command}{tiny_run.path}" in commands, command
    assert "trainer.max_steps=80" in commands and f"--logdir {tiny_run.path.parent}" in commands
    assert tiny_run.stdout.rstrip().endswith(f"{tiny_run.path / 'report.html'}")


def test_regenerated_report_is_that_of_the_run(tiny_run, tmp_path, capsys):
    page = tmp_path / "again.html"
    main([str(tiny_run.path), f"html={page}"])
    assert page.read_text(encoding="utf-8") == (tiny_run.path / "report.html").read_text(encoding="utf-8")
    assert capsys.readouterr().out == f"report: {page}\n"


def test_damaged_validation_is_left_out_with_one_line(open_page, tiny_run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_run.path, copy, ignore=shutil.ignore_patterns("checkpoints", "events*"))
    damaged = validation_file(copy, 24)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with (copy / "recording/curve.jsonl").open("a") as file:
        file.write('{"step": 45, "lo')
    main([str(copy)])
    notes = capsys.readouterr().err.splitlines()
    assert notes == [
        f"{copy}: recording/step-00000024.npz is damaged and was left out.",
        f"{copy}: recording/curve.jsonl has a line that cannot be read.",
    ]
    browser = open_page(copy / "report.html")
    assert "step-00000024.npz is damaged" in text_of(browser, "notes")
    press(browser, "ARROW_LEFT", "ARROW_LEFT")
    assert text_of(browser, "now").startswith("step 16 ")


HOSTILE = [
    {"facts": json.dumps({"step": 5})},
    {"attention": np.zeros((2, 2, 9), np.uint8)},
    {"lens": np.full(3, np.nan, np.float32)},
    {"scores": np.zeros((6, 2, 2), np.complex64)},
    {"more": np.zeros(3)},
    {"lens": np.array([{}], dtype=object)},
]


@pytest.mark.parametrize("change", HOSTILE, ids=["facts", "shape", "nan", "type", "name", "pickle"])
def test_recording_of_a_stranger_is_checked(tmp_path, change):
    record = fake_run(tmp_path).validations[0]
    save_validation(tmp_path, record)
    path = validation_file(tmp_path, 5)
    with np.load(path) as archive:
        content = {name: archive[name] for name in archive.files}
    assert load_validations(tmp_path)[1] == []
    if "facts" in change:
        change = {"facts": np.frombuffer(change["facts"].encode(), np.uint8)}
    np.savez(path, **(content | change))
    assert load_validations(tmp_path) == ([], ["recording/step-00000005.npz is damaged and was left out."])


def test_array_that_claims_a_terabyte_is_damaged(tmp_path):
    save_validation(tmp_path, fake_run(tmp_path).validations[0])
    path, content = validation_file(tmp_path, 5), io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": "<f4", "fortran_order": False, "shape": (1 << 38,)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("more.npy", content.getvalue())
    with_claim = load_validations(tmp_path)
    assert with_claim == ([], ["recording/step-00000005.npz is damaged and was left out."])


def test_rewinding_removes_what_came_after_the_checkpoint(tmp_path):
    for record in fake_run(tmp_path, steps=(5, 10, 15)).validations:
        save_validation(tmp_path, record)
        row = {"step": record.step, "loss": 1.0, "tokens": 1, "memory_mb": float("nan"), "step_ms": 2.0}
        append_to_curve(tmp_path, row)
    rewind(tmp_path, 10)
    assert [record.step for record in load_validations(tmp_path)[0]] == [5, 10]
    assert [(row["step"], row["memory_mb"]) for row in load_curve(tmp_path)[0]] == [(5, None), (10, None)]
    rewind(tmp_path, -1)
    assert load_validations(tmp_path)[0] == [] and load_curve(tmp_path)[0] == []


def test_scripts_in_the_text_do_nothing(open_page, tmp_path):
    text = "</script><img src=x onerror=alert(1)><script>alert(2)</script>{{data}}<!--"
    browser = open_page([fake_run(tmp_path, text.replace("/", ""), text)])
    assert text_of(browser, "title") == text.replace("/", "") and text_of(browser, "text") == text
    assert len(browser.find_elements("css selector", "script")) == 2
    assert not browser.find_elements("css selector", "img")
    browser = open_page([fake_run(tmp_path, name, text) for name in ("<script>1</script>", "<b>2")])
    assert len(browser.find_elements("css selector", "script")) == 2


def test_large_run_is_a_small_page_that_says_what_is_missing(open_page, tmp_path):
    large = fake_run(tmp_path, steps=range(1, 201), layers=12, heads=12, T=64)
    large = replace(large, curve=[large.curve[0] | {"step": step} for step in range(1, 20_001)])
    browser = open_page([large])
    assert (tmp_path / "page.html").stat().st_size < 5_000_000
    notes = text_of(browser, "notes")
    assert f"{MAX_VALIDATIONS} of 200 validations" in notes and re.search(r"first \d+ of 64 recorded tokens", notes)
    assert text_of(browser, "now").startswith("step 200 ")
    browser = open_page(tmp_path / "page.html", 390)
    assert min(canvas.size["width"] for canvas in browser.find_elements("css selector", "#heads canvas")) > 10
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390


def test_comparison_shows_what_differs(open_page, tmp_path):
    one, other = fake_run(tmp_path, "one", "same"), fake_run(tmp_path, "other", "same", steps=(10, 20))
    other = replace(other, facts=other.facts | {"config": other.facts["config"] | {"seed": 7}, "parameters": 2500})
    browser = open_page([one, other])
    rows = [row.text for row in browser.find_elements("css selector", "#compare tr")]
    assert rows[0] == "run bits per byte parameters step, ms time tokens seed"
    assert "one (not finished) 2.000 1,000" in rows[1] and rows[1].endswith(" 0")
    assert "other (not finished) 2.000 2,500" in rows[2] and rows[2].endswith(" 7")
    assert len(browser.find_elements("css selector", "#loss circle")) >= 4
    assert not browser.find_element("id", "single").is_displayed()


def test_mistakes_are_answered_with_what_to_do(tmp_path):
    for arguments, message in [
        ([], "no run is given"),
        ([str(tmp_path / "missing")], "is not a directory"),
        ([str(tmp_path)], "has no recording/run.json"),
        ([str(tmp_path), "html=page.txt"], "must end in .html"),
    ]:
        with pytest.raises(UserError, match=message):
            main(arguments)
