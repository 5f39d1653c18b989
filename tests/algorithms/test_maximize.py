"""Every recipe takes True or False for `maximize`, and nothing else."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import functional_optim as fo


def taking_maximize() -> dict[str, Any]:
    """The recipes with this argument, and the arguments that they need."""
    found = {}
    for name in dir(fo):
        made = getattr(fo, name)
        if not inspect.isfunction(made):
            continue
        known = inspect.signature(made).parameters
        needed = [x.name for x in known.values() if x.default is x.empty and x.kind in (0, 1, 3)]
        if "maximize" in known:
            found[name] = dict.fromkeys([x for x in needed if x != "maximize"], 0.1)
    return found


RECIPES = taking_maximize()


def test_there_are_many():
    assert len(RECIPES) > 30


@pytest.mark.parametrize("wrong", ["x", "False", None, 2, 0.5], ids=repr)
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_neither_true_nor_false_is_refused(name, wrong):
    with pytest.raises(TypeError, match="maximize must be True, to ascend, or False, to descend"):
        getattr(fo, name)(**RECIPES[name], maximize=wrong)
