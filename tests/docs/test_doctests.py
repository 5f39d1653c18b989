"""Every example in a docstring runs, and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import functional_optim as fo
from functional_optim import (
    adapters,
    estimators,
    linalg,
    measures,
    projections,
    schedules,
    search,
    warmup,
)

EXEMPT = {fo.State, fo.EmptyState, estimators.EstimatorState}
"""Records without behaviour."""


def modules():
    names = [fo.__name__, adapters.__name__]
    for package in (fo, adapters):
        names += [m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return sorted(set(names))


@pytest.mark.parametrize("name", modules())
def test_the_examples_of_a_module_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def public():
    """The functions and classes that a user sees, once each."""
    found = {warmup.warm: "functional_optim.warmup.warm"}
    for module in (fo, schedules, search, adapters, estimators, linalg, measures, projections):
        for name, thing in vars(module).items():
            ours = getattr(thing, "__module__", None) or ""
            if not name.startswith("_") and callable(thing) and ours.startswith(fo.__name__):
                found.setdefault(thing, f"{module.__name__}.{name}")
    return [pytest.param(thing, id=name) for thing, name in found.items() if thing not in EXEMPT]


@pytest.mark.parametrize("thing", public())
def test_a_public_name_has_a_docstring_with_an_example(thing):
    doc = inspect.getdoc(thing)
    assert doc
    assert "Example::" in doc
    assert ">>> " in doc


def test_there_are_examples_and_public_names_to_check():
    assert len(public()) > 25
    assert "functional_optim.adapters.drop_ins" in modules()
    assert "functional_optim.algorithms.adam" in modules()
