"""A line that says how far something is, where somebody can see it."""

import importlib.util
import sys
from contextlib import suppress

import pytest
import torch

import functional_optim as fo
from functional_optim.tuning import tables as module
from functional_optim.tuning.tables import progress


def run(show):
    with progress("steps", 3, show) as told:
        for done in range(1, 4):
            told(done)


@pytest.fixture
def plain(monkeypatch):
    """No rich, and no pause between two lines."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "rich" else find(n))
    monkeypatch.setattr(module, "PAUSE", 0.0)


@pytest.mark.parametrize("show", [None, False, 0])
def test_nothing_is_written_where_there_is_no_terminal(show, capsys):
    run(show)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("show", [None, True])
def test_a_line_is_written_over_itself_and_wiped(plain, capsys, monkeypatch, show):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(show)
    out, err = capsys.readouterr()
    assert out == ""
    lines = ["", "steps 1 of 3", "steps 2 of 3", "steps 3 of 3", "", ""]
    assert [x.strip() for x in err.split("\r")] == lines
    with suppress(KeyError), progress("steps", 3, True) as told:
        told(1)
        raise KeyError
    assert capsys.readouterr().err.endswith(" \r")


def test_a_bar_is_drawn_by_rich(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    run(True)
    assert "3/3" in capsys.readouterr().err


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_sweep_counts_the_steps_of_all_copies(plain, capsys, chunk):
    def loss_fn(p, x):
        return ((p - x) ** 2).sum()

    x = torch.ones(2)
    options = {"steps": 2, "chunk": chunk, "progress": True}
    fo.find_lr(loss_fn, fo.sgd, 0 * x, [x], values=[0.1, 0.2, 0.3], **options)
    lines = [line.strip() for line in capsys.readouterr().err.split("\r")]
    counts = [3, 6] if chunk is None else [2, 4, 5, 6]
    assert [x for x in lines if x] == [f"find_lr, 3 values of lr: steps {x} of 6" for x in counts]
