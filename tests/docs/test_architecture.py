"""docs/architecture.md speaks of the code as it is; the imports themselves are checked by `make lint`."""

import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
TEXT = (PROJECT / "docs/architecture.md").read_text(encoding="utf-8")


def test_every_file_it_names_exists():
    named = re.findall(r"`([a-z_]+/[a-z_/]*(?:\.[a-z]+)?)`", TEXT)
    assert len(named) > 15
    assert not [name for name in named if not (PROJECT / name).exists()]


def test_every_room_is_in_its_diagram():
    rooms = {path.parent.name for path in PROJECT.glob("*/__init__.py")} - {"benchmarks", "tests"}
    assert rooms == set(re.findall(r"^    (\w+)\[\"<b>\1</b>", TEXT, re.MULTILINE))


def test_every_module_is_in_its_list_of_files():
    rooms = re.findall(r"^    (\w+)\[\"<b>\1</b>", TEXT, re.MULTILINE)
    files = TEXT.split("## The files")[1]
    modules = [path.name for room in rooms for path in (PROJECT / room).glob("*.py") if path.name != "__init__.py"]
    assert len(modules) > 60
    assert not [name for name in modules if name not in files]
