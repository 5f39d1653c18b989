"""The pages on algorithms: each has what it must, and its numbers are those of the states."""

import inspect
import re
import runpy
import sys

import optree
import pytest
import torch
from algorithm_pages import ALGORITHMS, CLASSES, PAGES, page_of, rows, section
from snippets import ROOT
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters

M, N, HISTORY = 60, 40, 5
CHOOSING = (ROOT / "docs" / "choosing.md").read_text()
TABLES = {
    title: [row for row in rows(section(CHOOSING, title)) if not row[0].startswith("**")]
    for title in ("Algorithms", "Train without gradients")
}
SLOT_COUNT = re.compile(r"(?:`(.+?)`: )?(.+)")


def recipe(name, **hyper):
    if name == "lbfgs":
        hyper["history_size"] = HISTORY
    return getattr(fo, name)(**hyper)


def kept(state):
    """What a state has of its own for each slot and carried number: name → tensor."""
    if isinstance(state, fo.State):
        return {**state.slots, **state.carry}
    if not hasattr(state, "_asdict"):  # of a chain with transformations of whole trees
        return {name: x for part in state for name, x in kept(part).items()}
    return state._asdict()


def evaluate(formula, **names):
    return eval(formula, {"__builtins__": {}}, names)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_page_has_all_its_parts(name):
    page = page_of(name)
    parts = re.findall(r"^## (.*)$", page, re.MULTILINE)
    measured = ["Benchmark"] if "```{measured-rates}" in page else []
    assert parts == ["Usage", "State", "Differences", *measured, "API"]
    assert f"```{{loss-curve}} {name}\n" in page
    assert ":::{admonition} Algorithm: " in page
    assert re.search(r"\]\(https?://", page), "no paper"
    assert f".. autofunction:: {name}\n" in page
    own = f"adapters.{CLASSES[name]}\n" if name in CLASSES else "optimizer object"
    assert own in page


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_table_of_a_page_is_the_state(name):
    table = rows(section(page_of(name), "State"))
    always = [row for row in table if "; with `" not in row[2] and "fewer than two" not in row[2]]
    sizes = {"m": M, "n": N, "N": M * N, "h": HISTORY}
    p = torch.zeros(M, N)
    found = {slot: x for slot, x in kept(recipe(name).init(p)).items() if isinstance(x, Tensor)}
    assert {row[0].strip("`") for row in always} == found.keys()
    for row in table:
        hyper = re.search(r"; with `(\w+)=(.*?)`", row[2])
        more = {hyper[1]: evaluate(hyper[2])} if hyper else {}
        at = torch.zeros(N) if "fewer than two" in row[2] else p
        slot = kept(recipe(name, **more).init(at))[row[0].strip("`")]
        shape = {"like p": tuple(at.shape), "scalar": ()}.get(row[1])
        assert slot.shape == (evaluate(row[1].strip("`"), **sizes) if shape is None else shape)


def test_the_tables_to_choose_from_are_complete():
    linked = [
        re.fullmatch(r"\[`(\w+)`\]\(algorithms/(\w+)\.md\)", row[0]) for row in TABLES["Algorithms"]
    ]
    assert sorted(link[1] for link in linked) == ALGORITHMS
    assert all(link[1] == link[2] for link in linked)
    searches = {
        name
        for name, thing in {**vars(fo.search), **vars(fo.estimators)}.items()
        if inspect.isfunction(thing)
        and inspect.signature(thing).return_annotation in ("Search", "Estimator")
    }
    assert {row[0].strip("`") for row in TABLES["Train without gradients"]} == searches
    for table in TABLES.values():
        for row in table:
            assert len(row) == 5, row[0]
            assert re.search(r"\]\(https?://", row[4]), row[0]


def numbers(state):
    """How many numbers a state holds, but for the hyperparameters, which are there to be read."""
    if isinstance(state, fo.State):
        state = (state.slots, state.carry)
    return sum(x.numel() for x in optree.tree_leaves(state))


@pytest.mark.parametrize("row", TABLES["Algorithms"], ids=lambda row: row[0].split("`")[1])
def test_the_memory_of_an_algorithm_is_that_of_its_state(row):
    name = row[0].split("`")[1]
    p = torch.zeros(M, N)
    for case in row[2].split("; "):
        call, formula = SLOT_COUNT.fullmatch(case).groups()
        hyper = dict([call.split("=")]) if call else {}
        hyper = {key: evaluate(value) for key, value in hyper.items()}
        share = numbers(recipe(name, **hyper).init(p)) / p.numel()
        assert share == pytest.approx(evaluate(formula, m=M, n=N, h=HISTORY), abs=5e-3)


def called(name, population):
    """A search method with its first arguments."""
    make = getattr(fo.search, name)
    given = {"population": population, "sigma": 0.1, "temperature": 1.0, "tx": fo.sgd(0.1)}
    return make(**{key: given[key] for key in inspect.signature(make).parameters if key in given})


@pytest.mark.parametrize(
    "row", TABLES["Train without gradients"], ids=lambda row: row[0].strip("`")
)
def test_the_memory_of_a_method_is_that_of_its_state(row):
    name, d, n = row[0].strip("`"), 300, 20
    if name in vars(fo.estimators):
        state = getattr(fo, name)().init(torch.zeros(d))
        assert row[2] == "0"
        assert numbers(state) <= 66  # the seed, the count, and a weight for each direction
    else:
        state = called(name, n).init(torch.zeros(d))
        assert abs(numbers(state) - evaluate(row[2], d=d, n=n)) <= 3 * n


def test_hyperparameters_to_try_are_arguments():
    for row in TABLES["Algorithms"]:
        name = row[0].split("`")[1]
        known = inspect.signature(getattr(fo, name)).parameters
        for word in re.findall(r"`(\w+)[^`]*`", row[3]):
            assert word in known, (name, word)


def test_no_page_is_longer_than_500_lines():
    for path in [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.py")]:
        assert len(path.read_text().splitlines()) <= 500, path.name


# ---------------------------------------------------------------- what `make lists` writes
def test_nothing_is_to_be_written(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["lists.py", "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "docs" / "lists.py"), run_name="__main__")
    assert (*capsys.readouterr(), end.value.code) == ("", "", 0), "run make lists"


def test_every_algorithm_with_a_page_is_exported_and_every_exported_one_has_a_page():
    made = {
        name
        for name in dir(fo)
        if inspect.isfunction(thing := getattr(fo, name))
        and thing.__module__.startswith("functional_optim.algorithms.")
        and not name.startswith("scale_by_")
    }
    assert PAGES.keys() <= made
    pages = "".join((ROOT / "docs" / "algorithms" / f"{name}.md").read_text() for name in PAGES)
    assert [name for name in made if f".. autofunction:: {name}\n" not in pages] == []


OURS = [name for name, x in CLASSES.items() if hasattr(getattr(adapters, x), "algorithm")]
"""Whose arguments are not torch's."""


@pytest.mark.parametrize("name", OURS)
def test_an_optimizer_object_has_the_arguments_of_its_function(name):
    optimizer = getattr(adapters, CLASSES[name])
    theirs = inspect.signature(getattr(fo, name)).parameters
    own = inspect.signature(optimizer).parameters
    more = ("params", "compile", "stored", "capturable")
    assert [x for x in own if x not in more] == list(theirs)
    assert {x: own[x].default for x in theirs} == {x: theirs[x].default for x in theirs}
