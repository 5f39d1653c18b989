"""The check of words finds them in pages, docstrings, comments, strings and notebooks."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("words", ROOT / "docs" / "words.py")
assert spec is not None
assert spec.loader is not None
words = importlib.util.module_from_spec(spec)
spec.loader.exec_module(words)


CODE = '''"""A module."""

x = 1  # each has a slot of its
# own, likewise


def f():
    """Runs on a

    card, whatever happens."""
    raise ValueError(f"{x} was given to update")
'''


def found(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    path.write_text(text)
    monkeypatch.setattr(words, "ROOT", path.parent)
    return list(words.found(path))


def test_a_file_of_code(tmp_path, monkeypatch):
    lines = found(tmp_path / "code.py", CODE, monkeypatch)
    wanted = ["8: 'a card'", "11: 'given to'", "3: 'of its own'", "4: 'likewise'"]
    assert [line.partition(";")[0] for line in lines] == [f"code.py:{x}" for x in wanted]


def test_a_page(tmp_path, monkeypatch):
    page = "# A page\n\nText.\n\nA step\nis refused without\na word. Beside it\nstands nothing.\n"
    lines = found(tmp_path / "page.md", page, monkeypatch)
    assert lines == [
        "page.md:6: 'without a word'; write: silently",
        "page.md:7: 'Beside'; write: next to, together with, compared with",
    ]


def test_a_notebook(tmp_path, monkeypatch):
    cells = [{"source": ["Entry by\n", "entry."]}, {"source": ["x = 1\n"]}]
    (line,) = found(tmp_path / "book.ipynb", json.dumps({"cells": cells}), monkeypatch)
    assert line.endswith("write: element by element")


@pytest.mark.parametrize(
    "right",
    ["None if there is none", "the entries of the parameter groups", "random numbers of a step"],
)
def test_what_is_right_is_not_found(right, tmp_path, monkeypatch):
    assert found(tmp_path / "page.md", right, monkeypatch) == []
