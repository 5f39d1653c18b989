"""NIST's reference data sets, from both starting points, against the certified values."""

from __future__ import annotations

import nist
import numpy as np
import pytest
import torch

import functional_optim as fo

FAILS = {
    "lm": {("BoxBOD", 0), ("MGH10", 0)},
    "dogleg": {("MGH17", 0)},
}
"""Where scipy's `lm` with `x_scale="jac"` fails, too (BoxBOD), or the other method is needed."""

LONG = {"Bennett5", "Lanczos1", "Lanczos2", "Lanczos3", "Nelson", "MGH09", "MGH10"}


@pytest.mark.parametrize("name", nist.MODELS)
def test_certified_values_are_those_of_the_model(name):
    """A wrong data file, or a wrong model, would show here."""
    known = nist.data_set(name)
    r = known.residuals(np)(np.array(known.certified))
    assert r @ r == pytest.approx(known.rss, rel=1e-8, abs=1e-18)


@pytest.mark.parametrize("method", ["lm", "dogleg"])
@pytest.mark.parametrize("name", nist.MODELS)
def test_certified_digits(name, method):
    known = nist.data_set(name)
    certified = torch.tensor(known.certified, dtype=torch.float64)
    fun = known.residuals(torch)
    for start, at in enumerate(known.starts):
        if (name, start) in FAILS[method] or (name in LONG and (method, start) == ("lm", 0)):
            continue
        found = fo.least_squares(
            fun, torch.tensor(at, dtype=torch.float64), method=method, ftol=1e-13, xtol=1e-13,
            gtol=1e-13, max_nfev=2000,
        )  # fmt: skip
        error = ((found.x - certified) / certified).abs().max()
        assert error < 1e-4, (start, found)
        assert 2 * float(found.cost) == pytest.approx(known.rss, rel=1e-5, abs=1e-20)
