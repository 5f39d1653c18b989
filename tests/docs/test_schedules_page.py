"""The page on schedules: its table is complete, and its picture is drawn."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from functional_optim import schedules

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "schedules.md").read_text()
ROWS = re.findall(r"^\| `(\w+)`.*?\| .*? \| `(.*?)` \|", PAGE, re.MULTILINE)
"""Name and call."""


@pytest.fixture(scope="module")
def plots():
    pytest.importorskip("matplotlib")
    return runpy.run_path(str(DOCS / "plots.py"))


def test_every_schedule_has_a_row_and_a_panel(plots):
    public = {thing.__name__ for name, thing in vars(schedules).items() if callable(thing)}
    assert {name for name, _ in ROWS} == plots["SCHEDULES"].keys() == public


def test_the_table_has_the_calls_of_the_picture(plots):
    assert dict(ROWS) == {name: calls[0] for name, calls in plots["SCHEDULES"].items()}
    for name, calls in plots["SCHEDULES"].items():
        for call in calls:
            assert call.startswith(f"{name}(")
            assert isinstance(plots["build"](call)(5), float)


def test_the_script_draws_the_picture(tmp_path, monkeypatch):
    image = pytest.importorskip("matplotlib.image")
    monkeypatch.setattr(sys, "argv", ["plots.py", str(tmp_path)])
    runpy.run_path(str(DOCS / "plots.py"), run_name="__main__")
    drawn = image.imread(tmp_path / "schedules.png")
    assert drawn.shape == image.imread(DOCS / "schedules.png").shape
    assert drawn[..., :3].std() > 0.05
