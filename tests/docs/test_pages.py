"""Pages of the docs say what the code and the measurements say, and their pictures are drawn."""

from __future__ import annotations

import collections
import importlib
import importlib.metadata
import re
import runpy
import sys
from typing import Any

import pytest
import torch
from gpu_check import command
from snippets import ROOT

import functional_optim as fo
from functional_optim import schedules, search

DOCS = ROOT / "docs"

# ---------------------------------------------------------------- choosing


def test_what_the_picture_of_choosing_names_exists():
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


# ---------------------------------------------------------------- schedules

SCHEDULES = re.findall(
    r"^\| `(\w+)`.*?\| .*? \| `(.*?)` \|", (DOCS / "schedules.md").read_text(), re.MULTILINE
)
"""Name and call."""


@pytest.fixture(scope="module")
def plots():
    pytest.importorskip("matplotlib")
    return runpy.run_path(str(DOCS / "plots.py"))


def test_every_schedule_has_a_row_and_a_panel(plots):
    public = {thing.__name__ for name, thing in vars(schedules).items() if callable(thing)}
    assert {name for name, _ in SCHEDULES} == plots["SCHEDULES"].keys() == public


def test_the_table_has_the_calls_of_the_picture(plots):
    assert dict(SCHEDULES) == {name: calls[0] for name, calls in plots["SCHEDULES"].items()}
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


# ---------------------------------------------------------------- devices

DEVICES = (DOCS / "devices.md").read_text()
SOURCES = [ROOT / "functional_optim" / name for name in ("engine", "kernels")]


def rows(head: str) -> list[list[str]]:
    """The cells of the table that begins with these names of columns."""
    _, _, rest = DEVICES.partition(f"| {head} |\n")
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_all_sections_of_the_check_are_named():
    named = [name for first, _ in rows("section | what it shows") for name in first.split(", ")]
    sections = dict.fromkeys(check.section for check in command.listed(quick=True))
    assert sorted(named) == sorted(f"`{name}`" for name in sections)


def test_each_warning_is_one_of_the_code():
    text = "".join(path.read_text() for folder in SOURCES for path in sorted(folder.glob("*.py")))
    warnings = [cell for _, cell in rows("reason | the warning begins")]
    assert len(warnings) == 6
    for warning in warnings:
        begin, _, inside = re.fullmatch(r"`(.*?)( \((.*)\)| …)?`", warning).groups()
        assert begin in text
        assert inside in (None, "…") or f'"{inside}"' in text


def test_the_page_says_that_no_gpu_was_used():
    """To be changed, with the figures, by whoever has run the check on one."""
    assert "**Nothing in this package has been tested on GPU hardware yet.**" in DEVICES
    assert all(cells[-1].startswith("no") for cells in rows(COLUMNS)[1:])


COLUMNS = (
    "device | element-wise rules | rules with products of matrices | all other rules | run on one"
)


# ---------------------------------------------------------------- frameworks

FRAMEWORK_PAGE = (DOCS / "frameworks.md").read_text()
CONSTRAINTS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
)
FRAMEWORKS = re.findall(r"^\| ([^|]+) \| `([\w-]+)` \| ([^|]+) \|", FRAMEWORK_PAGE, re.MULTILINE)
ASKED = ["plain loops", "AMP", "torch.compile", "DDP", "FSDP2", "tensor parallel", "ZeRO", "FSDP1"]
ASKED += ["distributed checkpoint", "Lightning", "Accelerate", "transformers", "ignite", "torchft"]


def test_every_framework_has_a_row():
    assert set(ASKED) <= {name for name, *_ in FRAMEWORKS}
    assert len(FRAMEWORKS) == sum(line.startswith("| ") for line in FRAMEWORK_PAGE.splitlines()) - 2


@pytest.mark.parametrize(("name", "package", "version"), FRAMEWORKS)
def test_a_row_names_the_version_that_is_tested(name, package, version):
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        installed = version
    if package == "torch" and installed.split("+")[0] != version:
        pytest.skip("the page names the torch that a release is tested with, and here is another")
    assert CONSTRAINTS[package] == version
    assert installed.split("+")[0] == version
