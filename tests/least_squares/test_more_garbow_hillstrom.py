"""Moré, Garbow and Hillstrom's functions: known minima are found."""

from __future__ import annotations

import pytest
import torch
from more_garbow_hillstrom import PROBLEMS

import functional_optim as fo

FAILS = {("gulf (11)", "lm")}
"""Nielsen's damping leads to a minimum at infinity; with `x_scale=1` it arrives, as scipy does."""


@pytest.mark.parametrize("method", ["lm", "dogleg"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_known_minimum_is_found(name, method):
    fun, start, minima = PROBLEMS[name]
    x_scale = 1.0 if (name, method) in FAILS else "jac"
    found = fo.least_squares(
        fun, torch.tensor(start, dtype=torch.float64), method=method, ftol=1e-13, xtol=1e-13,
        gtol=1e-13, x_scale=x_scale, max_nfev=400,
    )  # fmt: skip
    square = 2 * float(found.cost)
    assert any(square == pytest.approx(x, rel=1e-5, abs=1e-12) for x in minima), found


LARGE_RESIDUALS = [
    "freudenstein and roth (2)",
    "jennrich and sampson (6)",
    "trigonometric (26)",
    "chebyquad, 8 (35)",
]
"""At the minimum Gauss–Newton steps lead away, so that no step near one is accepted."""


@pytest.mark.parametrize("name", LARGE_RESIDUALS)
def test_minima_with_large_residuals_are_successes(name):
    fun, start, minima = PROBLEMS[name]
    found = fo.least_squares(fun, torch.tensor(start, dtype=torch.float64), method="dogleg")
    assert (found.status, found.success) == (2, True)
    assert any(2 * float(found.cost) == pytest.approx(x, rel=1e-5) for x in minima), found
