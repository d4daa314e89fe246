"""What pip installs: the dependencies, and everything that a run needs."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from system.version import VERSION

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PROJECT = Path(__file__).resolve().parents[2]
ROOMS = ("analysis", "checkpoint", "configs", "data", "model", "sampling", "system", "training")


@pytest.fixture(scope="module")
def wheel(clean_environment, tmp_path_factory) -> zipfile.ZipFile:
    """The project as `pip install .` installs it, built from a copy."""
    pytest.importorskip("setuptools", minversion="77")
    copy, target = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ROOMS:
        shutil.copytree(PROJECT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", *(path.name for path in PROJECT.glob("*.py"))):
        shutil.copy(PROJECT / name, copy / name)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(target)!r}))"
    command = [sys.executable, "-c", code]
    finished = subprocess.run(command, cwd=copy, env=clean_environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    return zipfile.ZipFile(next(target.glob("*.whl")))


def test_wheel_has_the_version_and_every_dependency(wheel):
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [
        *project["dependencies"],
        *(spec for extra in project["optional-dependencies"].values() for spec in extra),
    ]
    assert f"Version: {VERSION}\n" in text
    assert sorted(re.findall(r"^Requires-Dist: ([\w-]+)", text, re.MULTILINE)) == sorted(
        re.match(r"[\w-]+", spec)[0] for spec in needed
    )


def test_wheel_has_all_code_configs_and_the_text(wheel):
    """Without one of them an installed copy would fail at the first run."""
    needed = [path for room in ROOMS for path in (PROJECT / room).rglob("*") if path.is_file()]
    needed = [path for path in (*needed, *PROJECT.glob("*.py")) if "__pycache__" not in path.parts]
    assert {path.relative_to(PROJECT).as_posix() for path in needed} <= set(wheel.namelist())


def test_requirements_files_point_to_the_package():
    """The dependencies are listed once, in pyproject.toml."""
    for name, target in (("requirements.txt", "-e ."), ("requirements-dev.txt", "-e .[dev]")):
        lines = (PROJECT / name).read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if not line.startswith("#")] == [target]
