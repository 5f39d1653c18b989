"""The notebooks run, and what is stored with them is what they print now."""

import importlib.util
import json
import re
from pathlib import Path

import nbformat
import pytest
from sampling import some

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def run():
    """The script behind `make notebooks`."""
    spec = importlib.util.spec_from_file_location("run_notebooks", NOTEBOOKS / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stored(path):
    return nbformat.read(path, as_version=4)


def compared(run, notebook):
    """Per code cell what it prints, or for a cell tagged "varies" only whether it does."""
    return [
        bool(cell.outputs) if "varies" in cell.metadata.get("tags", []) else run.texts(cell)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.parametrize("path", some(PATHS), ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_is_stored(run, path):
    assert compared(run, run.execute(path)) == compared(run, stored(path))


@every_notebook
def test_a_stored_notebook_can_be_read_without_running(run, path):
    notebook = stored(path)
    assert path.stat().st_size < 500_000
    assert path in run.PATHS
    assert notebook.cells[0].cell_type == "markdown"
    assert re.match(r"# \w", notebook.cells[0].source)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert [fault for cell in code for fault in run.faults(cell)] == []
    assert "<png>" in [text for cell in code for text in run.texts(cell)]


@every_notebook
def test_a_stored_notebook_tells_nothing_of_its_run(run, path):
    notebook = json.loads(path.read_text())
    assert notebook["metadata"] == run.METADATA
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert not [name for name in ids if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f-]*)?", name)]
    assert {key for cell in notebook["cells"] for key in cell["metadata"]} <= {"tags"}


def test_every_notebook_is_listed():
    listed = re.findall(r"\]\(([^)]+\.ipynb)\)", (NOTEBOOKS / "README.md").read_text())
    assert sorted(listed) == [path.name for path in PATHS]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import warnings; warnings.warn('old')", "writes to stderr"),
        ("import os; os.getcwd()", "names a folder"),
        ("object()", "shows an address"),
    ],
)
def test_what_should_not_be_stored_is_refused(run, tmp_path, source, complaint):
    path = tmp_path / "wrong.ipynb"
    cell = nbformat.v4.new_code_cell(source, id="wrong")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    with pytest.raises(ValueError, match=complaint):
        run.execute(path)
