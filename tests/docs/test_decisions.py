"""The picture at the top of the page on choosing."""

from __future__ import annotations

import re
import runpy
import sys

from snippets import ROOT

import functional_optim as fo
from functional_optim import search

DOCS = ROOT / "docs"


def test_what_it_names_exists():
    drawn = runpy.run_path(str(DOCS / "decisions.py"))
    answers = [name for _, name, _ in drawn["QUESTIONS"]] + [drawn["OTHERWISE"][0]]
    named = re.findall(r"(?:fo\.)?(search\.)?([a-z]\w+)", ", ".join(answers).replace("fo.", ""))
    for searched, name in named:
        home = search if searched or hasattr(search, name) else fo
        assert hasattr(home, name) or name in ("tx", "int8"), name
    page = (DOCS / "choosing.md").read_text()
    assert "![Questions to ask, and what to take](choosing.png)" in page


def test_the_script_draws_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["decisions.py", str(tmp_path)])
    runpy.run_path(str(DOCS / "decisions.py"), run_name="__main__")
    drawn, kept = tmp_path / "choosing.png", DOCS / "choosing.png"
    assert abs(drawn.stat().st_size - kept.stat().st_size) < 0.1 * kept.stat().st_size
