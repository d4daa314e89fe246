"""README.md and docs/ speak of the code as it is."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

PROJECT = Path(__file__).resolve().parents[2]
README = (PROJECT / "README.md").read_text(encoding="utf-8")
PAGES = [PROJECT / "README.md", PROJECT / "SECURITY.md", *sorted((PROJECT / "docs").glob("*.md"))]


def test_sample_of_the_model_in_the_readme_is_the_code():
    [sample] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert sample in (PROJECT / "model/gpt.py").read_text(encoding="utf-8")


def test_readme_stays_short():
    assert len(README.splitlines()) <= 160
    assert len(README.split()) <= 1300


def anchors(page: Path) -> set[str]:
    """Headings as GitHub links to them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        assert not heading or heading in anchors(file), target


def test_every_folder_in_the_readme_exists():
    folders = re.findall(r"`([a-z]+/)`", README)
    assert len(folders) >= 9
    assert not [folder for folder in folders if not (PROJECT / folder).is_dir()]


def test_lines_of_code_in_the_table_of_the_architecture_are_about_right():
    page = (PROJECT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| `([\w/.]+)` \| (\d+) \|", page)
    assert len(rows) > 5
    for file, lines in rows:
        actual = len((PROJECT / file).read_text(encoding="utf-8").splitlines())
        assert actual == pytest.approx(int(lines), rel=0.25), file


def test_picture_at_the_top_is_an_animation_under_2_mb():
    hero = PROJECT / "docs/hero.gif"
    assert f"({hero.relative_to(PROJECT)})" in README
    assert hero.stat().st_size < 2e6
    with Image.open(hero) as animation:
        assert animation.n_frames > 20


def test_script_of_that_picture_draws_maps_of_any_size(tmp_path):
    weights = np.tril(np.ones((3, 1, 2, 5, 5), np.float16)) / np.arange(1, 6, dtype=np.float16)[:, None]
    np.savez(tmp_path / "maps.npz", maps=weights, labels=list("abcde"), steps=[1, 2, 3], bits=[3.0, 2.0, 1.0])
    runpy.run_path(str(PROJECT / "docs/make_hero.py"))["draw"](tmp_path / "maps.npz", tmp_path / "hero.gif")
    with Image.open(tmp_path / "hero.gif") as animation:
        assert animation.n_frames == 3
