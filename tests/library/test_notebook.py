"""The notebook runs from a clean kernel, and is stored with its pictures."""

import re
from pathlib import Path

import pytest

from tests.conftest import SHAPE

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

PROJECT = Path(__file__).resolve().parents[2]
NOTEBOOK = PROJECT / "notebooks" / "tour.ipynb"
PICTURES = 4  # loss, probabilities, attention, heads


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def outputs(notebook, kind: str) -> list[str]:
    """The content of all outputs of one kind, such as "image/png"; of printed text as "stream"."""
    found = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    if kind == "stream":
        return [output.text for output in found if output.output_type == "stream"]
    return [output.data[kind] for output in found if kind in output.get("data", {})]


def test_notebook_runs_from_a_clean_kernel(notebook, text_file, cache_dir, tmp_path, clean_environment):
    """With a tiny network in place of 20 seconds, and a small text in place of the standard library."""
    settings = dict(setting.split("=") for setting in SHAPE)
    settings |= {"trainer.max_steps": 6, "trainer.log_every_n_steps": 2, "data.corpus": str(text_file)}
    replacements = [f"SETTINGS = {settings | {'data.cache_dir': str(cache_dir)}!r}", f"my_text = {str(text_file)!r}"]
    parameters = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    for cell, source in zip(parameters, replacements, strict=True):
        cell.source = source
    directories = {name: str(tmp_path / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR")}
    environment = clean_environment | directories | {"PYTHONPATH": str(PROJECT)}
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment)
    assert len(outputs(notebook, "image/png")) == PICTURES
    assert outputs(notebook, "stream")[-1].startswith("    def __init__(self")
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_notebook_is_stored_with_its_pictures(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert len(outputs(notebook, "image/png")) == PICTURES
    assert NOTEBOOK.stat().st_size < 1_500_000


def test_stored_outputs_show_neither_a_warning_nor_the_paths_of_a_machine(notebook):
    kinds = {(output.output_type, output.get("name")) for cell in notebook.cells for output in cell.get("outputs", [])}
    assert kinds <= {("stream", "stdout"), ("display_data", None), ("execute_result", None)}
    assert not re.search(r"/(home|root|tmp|work|Users)/", NOTEBOOK.read_text(encoding="utf-8"))
