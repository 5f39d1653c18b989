"""The page on choosing: its picture, and what it says of the comparison."""

from __future__ import annotations

import collections
import importlib
import re
import runpy
import sys
from typing import Any

import pytest
import torch
from snippets import ROOT

import functional_optim as fo
from functional_optim import search

DOCS = ROOT / "docs"


def test_what_it_names_exists():
    drawn = runpy.run_path(str(DOCS / "diagrams.py"))
    answers = [name for _, name, _ in drawn["QUESTIONS"]] + [drawn["OTHERWISE"][0]]
    named = re.findall(r"(?:fo\.)?(search\.)?([a-z]\w+)", ", ".join(answers).replace("fo.", ""))
    for searched, name in named:
        home = search if searched or hasattr(search, name) else fo
        assert hasattr(home, name) or name in ("tx", "int8"), name
    page = (DOCS / "choosing.md").read_text()
    assert "![Questions to ask, and what to take](choosing.png)" in page


def test_the_script_draws_both_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["diagrams.py", str(tmp_path)])
    runpy.run_path(str(DOCS / "diagrams.py"), run_name="__main__")
    for name in ("choosing.png", "overview.png"):
        drawn, kept = (tmp_path / name).stat().st_size, (DOCS / name).stat().st_size
        assert abs(drawn - kept) < 0.1 * kept, "run python docs/diagrams.py"
    assert "](docs/overview.png)" in (ROOT / "README.md").read_text()


def test_the_rule_in_the_picture_is_lions():
    drawn, names = runpy.run_path(str(DOCS / "diagrams.py")), dict[str, Any]()
    names["LionSlots"] = collections.namedtuple("LionSlots", "exp_avg")
    exec(drawn["RULE"], names)
    g, p, m = torch.randn(3, 5)
    direction, slots = names["update"](g, names["LionSlots"](m), p, 0.1, 0.01)
    assert torch.equal(direction, (0.9 * m + 0.1 * g).sign())
    assert torch.allclose(slots.exp_avg, 0.99 * m + 0.01 * g)


NETWORKS = {"gpt", "autoencoder", "physics"}
BETTER = {
    "muon_adamw": NETWORKS | {"kronecker"},
    "soap": NETWORKS | {"kronecker"},
    "psgd_kron": NETWORKS | {"kronecker"},
    "shampoo": NETWORKS | {"kronecker"},
    "lbfgs": {"quadratic", "kronecker", "physics"},
    "adafactor": {"gpt", "autoencoder", "skip-gram"},
    "schedule_free_adamw": {"gpt", "autoencoder"},
    "cautious": {"gpt", "autoencoder"},
    "nadam": {"gpt", "autoencoder"},
}
WORSE = {
    "soap": {"skip-gram"},
    "psgd_kron": {"skip-gram"},
    "shampoo": {"skip-gram"},
    "lbfgs": {"addition"},
    "prodigy": {"gpt", "autoencoder", "skip-gram"},
}
"""What the page says that optimizers were, beside AdamW."""


@pytest.fixture(scope="module")
def comparison():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        pages = importlib.import_module("comparison.pages")
        yield pages.published()


@pytest.mark.parametrize(("claims", "verdict"), [(BETTER, "better"), (WORSE, "worse")])
def test_the_rows_say_what_the_page_says(comparison, claims, verdict):
    found = {task.name: comparison.verdicts(task) for task in comparison.tasks}
    for name, tasks in claims.items():
        assert {task for task in tasks if found[task][name] == verdict} == tasks, name


def test_some_are_worse_on_most_tasks(comparison):
    tasks = [task for task in comparison.tasks if task.passes is None]
    for name in ("ademamix", "lion"):
        worse = [task.name for task in tasks if comparison.verdicts(task)[name] == "worse"]
        assert len(worse) > len(tasks) / 2


def test_the_defaults_of_prodigy_are_nearest_to_its_best(comparison):
    rates = importlib.import_module("comparison.rates")
    behind = {
        own.name: float(rates.behind(rates.networks(comparison, own.name)))
        for own in comparison.contenders
        if not own.exact
    }
    assert min(behind, key=lambda name: behind[name]) == "prodigy"


def test_the_default_rate_of_adamw_is_below_most_of_the_best(comparison):
    cells = [cell for cell in comparison.by("adamw") if cell.task.reach == 1.0]
    higher = [cell.numbers.lr > cell.contender.default.lr for cell in cells]
    assert sum(higher) > 0.8 * len(higher)
