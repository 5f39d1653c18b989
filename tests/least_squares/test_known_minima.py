"""Known minima are found: NIST's data sets, Moré, Garbow and Hillstrom's functions, outliers."""

import nist
import pytest
import torch
from fits import decay
from more_garbow_hillstrom import PROBLEMS

import functional_optim as fo

TIGHT = {"ftol": 1e-13, "xtol": 1e-13, "gtol": 1e-13}

# ---------------------------------------------------------------- NIST's, from both starting points
UNCERTIFIED = {"lm": {("BoxBOD", 0), ("MGH10", 0)}, "dogleg": {("MGH17", 0)}}
"""Where scipy's `lm` with `x_scale="jac"` fails, too (BoxBOD), or the other method is needed."""

LONG = {"Bennett5", "Lanczos1", "Lanczos2", "Lanczos3", "Nelson", "MGH09", "MGH10"}


@pytest.mark.parametrize("method", ["lm", "dogleg"])
@pytest.mark.parametrize("name", nist.MODELS)
def test_certified_digits(name, method):
    known = nist.data_set(name)
    certified = torch.tensor(known.certified, dtype=torch.float64)
    fun = known.residuals(torch)
    for start, at in enumerate(known.starts):
        if (name, start) in UNCERTIFIED[method] or (name in LONG and (method, start) == ("lm", 0)):
            continue
        at = torch.tensor(at, dtype=torch.float64)
        found = fo.least_squares(fun, at, method=method, max_nfev=2000, **TIGHT)
        error = ((found.x - certified) / certified).abs().max()
        assert error < 1e-4, (start, found)
        assert 2 * float(found.cost) == pytest.approx(known.rss, rel=1e-5, abs=1e-20)


# ---------------------------------------------------------------- Moré, Garbow and Hillstrom's
FAILS = {("gulf (11)", "lm")}
"""Nielsen's damping leads to a minimum at infinity; with `x_scale=1` it arrives, as scipy does."""


@pytest.mark.parametrize("method", ["lm", "dogleg"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_known_minimum_is_found(name, method):
    fun, start, minima = PROBLEMS[name]
    x_scale = 1.0 if (name, method) in FAILS else "jac"
    start = torch.tensor(start, dtype=torch.float64)
    found = fo.least_squares(fun, start, method=method, x_scale=x_scale, max_nfev=400, **TIGHT)
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


# ---------------------------------------------------------------- robust losses
def line(x, t, y):
    return x[0] + x[1] * t - y


@pytest.mark.parametrize("loss", ["soft_l1", "huber"])
@pytest.mark.parametrize("start", [0.0, 100.0])
def test_a_convex_loss_has_one_minimum_from_everywhere(loss, start):
    torch.manual_seed(0)
    t = torch.linspace(0, 4, 60, dtype=torch.float64)
    y = 2 - t + 0.02 * torch.randn(60, dtype=torch.float64)
    y[::9] += 5
    x0 = torch.full((2,), start, dtype=torch.float64)
    how = {"ftol": 1e-14, "xtol": 1e-14, "gtol": 1e-10}
    found = fo.least_squares(line, x0, (t, y), loss=loss, f_scale=0.05, **how)
    x = found.x.clone().requires_grad_()
    z = (line(x, t, y) / 0.05) ** 2
    rho = torch.where(z > 1, 2 * z.sqrt() - 1, z) if loss == "huber" else 2 * ((1 + z).sqrt() - 1)
    (0.5 * 0.05**2 * rho).sum().backward()
    assert found.status > 0
    assert x.grad.abs().max() < 1e-7
    torch.testing.assert_close(found.x, x.new_tensor([2.0, -1.0]), rtol=0, atol=0.02)


@pytest.mark.parametrize("loss", ["soft_l1", "huber", "cauchy"])
def test_a_decay_with_outliers_is_found(loss):
    true, x0 = torch.tensor([[2.5, 1.3, 0.5], [1.0, 1.0, 0.0]], dtype=torch.float64)
    y = decay(true, torch.zeros(30, dtype=torch.float64))
    y[::7] += 3
    found = fo.least_squares(decay, x0, (y,), loss=loss, f_scale=0.1, max_nfev=1000)
    assert found.status > 0
    torch.testing.assert_close(found.x, true, rtol=0, atol=0.2)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("how", [{}, {"bounds": (None, 9.0)}], ids=["free", "bounds"])
def test_a_loss_that_bends_the_other_way_ends_with_success(how, compile):
    """Damping stays large: the curvature of the loss at 1 is not in the model."""
    x0 = torch.tensor([[1.0, 5.0], [0.5, 5.0]], dtype=torch.float64)
    found = fo.least_squares(
        lambda x: torch.stack([x[0] ** 2 + 1, x[1] - 5]), x0, loss="huber", f_scale=0.3,
        batched=True, compile=compile, **how,
    )  # fmt: skip
    assert found.status.tolist() == [2, 2]
    assert torch.allclose(found.cost, found.cost.new_tensor(0.255), rtol=1e-8)
