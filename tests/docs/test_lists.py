"""The lists of algorithms are as `make lists` writes them."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from algorithm_pages import CLASSES, PAGES
from snippets import ROOT

import functional_optim as fo
from functional_optim import adapters

COMMAND = [sys.executable, str(ROOT / "docs" / "lists.py"), "--check"]


def test_nothing_is_to_be_written():
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0), "run make lists"


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


@pytest.mark.parametrize("name", CLASSES)
def test_an_optimizer_object_has_the_arguments_of_its_function(name):
    optimizer = getattr(adapters, CLASSES[name])
    if not hasattr(optimizer, "algorithm"):
        return  # torch's own arguments
    theirs = inspect.signature(getattr(fo, name)).parameters
    own = inspect.signature(optimizer).parameters
    more = ("params", "compile", "stored", "capturable")
    assert [x for x in own if x not in more] == list(theirs)
    assert {x: own[x].default for x in theirs} == {x: theirs[x].default for x in theirs}
