"""What stands for a number while a recipe is called: it refuses whatever depends on the number."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch

from functional_optim import numeric


def test_placeholders_refuse_everything_that_depends_on_the_number():
    uses = [
        lambda x: x + 1, lambda x: 1 - x, lambda x: 2.0 * x, lambda x: x**2, lambda x: -x, abs,
        lambda x: x > 0, lambda x: x == 0.5, lambda x: x != 0.5, bool, float, int, hash, str, repr,
        round, lambda x: f"{x:.2f}", lambda x: max(x, 0.1), lambda x: x in (0.1, 0.2),
        math.sqrt, math.isnan, lambda x: torch.ones(1) * x, lambda x: x.is_integer(),
        lambda x: x.real, lambda x: numeric.at(x, 1.0), copy.copy, copy.deepcopy,
        pickle.dumps, numeric.is_static,
    ]  # fmt: skip
    for use in uses:
        x = numeric.Placeholder(0.5)
        with pytest.raises(TypeError, match="may change at each step"):
            use(x)
        assert x.refused


def test_placeholders_are_read_where_rules_read():
    x = numeric.Placeholder(0.5)
    assert not isinstance(x, float)  # no class is forged
    assert not callable(x)
    x.readable = True
    assert numeric.at(x, 3.0) == 0.5
    x.now = 0.25
    assert numeric.at(x, 3.0) == 0.25
    x.now = 2
    assert type(numeric.at(x, 1.0)) is float
    x.now = 0.25
    numeric.check(lambda x: False, x, "never: {}")
    assert x.suits(0.0)
    assert not numeric.is_zero(x)
    assert not x.suits(0.0)
    assert x.suits(1.0)
    assert not x.suits(1)
    assert not x.refused
