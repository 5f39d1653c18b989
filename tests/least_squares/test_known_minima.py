"""Known minima are found: NIST's data sets, Moré, Garbow and Hillstrom's functions, outliers."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fits
import pytest
import torch
from fits import decay
from torch import Tensor

import functional_optim as fo

TIGHT = {"ftol": 1e-13, "xtol": 1e-13, "gtol": 1e-13}


# ---------------------------------------------------------------- NIST's, from both starting points
KNOWN = json.loads((Path(__file__).parents[1] / "support" / "nist.json").read_text())
"""https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml: data, two starting points, certified
parameters and residual sums."""


def exponentials(b: Tensor, x: Tensor) -> Tensor:
    return b[0] * torch.exp(-b[1] * x) + b[2] * torch.exp(-b[3] * x) + b[4] * torch.exp(-b[5] * x)


def gauss(b: Tensor, x: Tensor) -> Tensor:
    first = b[2] * torch.exp(-(((x - b[3]) / b[4]) ** 2))
    return b[0] * torch.exp(-b[1] * x) + first + b[5] * torch.exp(-(((x - b[6]) / b[7]) ** 2))


def chwirut(b: Tensor, x: Tensor) -> Tensor:
    return torch.exp(-b[0] * x) / (b[1] + b[2] * x)


def cubic(b: Tensor, x: Tensor) -> Tensor:
    above = b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3
    return above / (1 + b[4] * x + b[5] * x**2 + b[6] * x**3)


def enso(b: Tensor, x: Tensor) -> Tensor:
    def wave(i: int, period: Any) -> Tensor:
        phase = 2 * math.pi * x / period
        return b[i] * torch.cos(phase) + b[i + 1] * torch.sin(phase)

    return b[0] + wave(1, 12) + wave(4, b[3]) + wave(7, b[6])


MODELS: dict[str, Callable[..., Any]] = {
    "Misra1a": lambda b, x: b[0] * (1 - torch.exp(-b[1] * x)),
    "Chwirut2": chwirut,
    "Chwirut1": chwirut,
    "Lanczos3": exponentials,
    "Gauss1": gauss,
    "Gauss2": gauss,
    "DanWood": lambda b, x: b[0] * x ** b[1],
    "Misra1b": lambda b, x: b[0] * (1 - (1 + b[1] * x / 2) ** -2),
    "Kirby2": lambda b, x: (b[0] + b[1] * x + b[2] * x**2) / (1 + b[3] * x + b[4] * x**2),
    "Hahn1": cubic,
    "Nelson": lambda b, s, t: b[0] - b[1] * s * torch.exp(-b[2] * t),
    "MGH17": lambda b, x: b[0] + b[1] * torch.exp(-x * b[3]) + b[2] * torch.exp(-x * b[4]),
    "Lanczos1": exponentials,
    "Lanczos2": exponentials,
    "Gauss3": gauss,
    "Misra1c": lambda b, x: b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5),
    "Misra1d": lambda b, x: b[0] * b[1] * x / (1 + b[1] * x),
    "Roszman1": lambda b, x: b[0] - b[1] * x - torch.atan(b[2] / (x - b[3])) / math.pi,
    "ENSO": enso,
    "MGH09": lambda b, x: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
    "Thurber": cubic,
    "BoxBOD": lambda b, x: b[0] * (1 - torch.exp(-b[1] * x)),
    "Rat42": lambda b, x: b[0] / (1 + torch.exp(b[1] - b[2] * x)),
    "MGH10": lambda b, x: b[0] * torch.exp(b[1] / (x + b[2])),
    "Eckerle4": lambda b, x: b[0] / b[1] * torch.exp(-0.5 * ((x - b[2]) / b[1]) ** 2),
    "Rat43": lambda b, x: b[0] / (1 + torch.exp(b[1] - b[2] * x)) ** (1 / b[3]),
    "Bennett5": lambda b, x: b[0] * (b[1] + x) ** (-1 / b[2]),
}
UNCERTIFIED = {"lm": {("BoxBOD", 0), ("MGH10", 0)}, "dogleg": {("MGH17", 0)}}
"""Where scipy's `lm` with `x_scale="jac"` fails, too (BoxBOD), or the other method is needed."""

LONG = {"Bennett5", "Lanczos1", "Lanczos2", "Lanczos3", "Nelson", "MGH09", "MGH10"}


@pytest.mark.parametrize("method", ["lm", "dogleg"])
@pytest.mark.parametrize("name", MODELS)
def test_certified_digits(name, method):
    known, model = KNOWN[name], MODELS[name]
    y, *x = torch.tensor(known["data"], dtype=torch.float64).unbind(1)
    y = y.log() if name == "Nelson" else y  # which its model describes
    certified = torch.tensor(known["certified"], dtype=torch.float64)
    for start, at in enumerate(known["starts"]):
        if (name, start) in UNCERTIFIED[method] or (name in LONG and (method, start) == ("lm", 0)):
            continue
        found = fo.least_squares(
            lambda b: model(b, *x) - y,
            torch.tensor(at, dtype=torch.float64),
            method=method,
            max_nfev=2000,
            **TIGHT,
        )
        error = ((found.x - certified) / certified).abs().max()
        assert error < 1e-4, (start, found)
        assert 2 * float(found.cost) == pytest.approx(known["rss"], rel=1e-5, abs=1e-20)


# ---------------------------------------------------------------- Moré, Garbow and Hillstrom's
def count(first: int, last: int) -> Tensor:
    """first, …, last."""
    return torch.arange(first, last + 1, dtype=torch.float64)


def jennrich_sampson(x):
    i = count(1, 10)
    return 2 + 2 * i - (torch.exp(i * x[0]) + torch.exp(i * x[1]))


def numbers(text: str) -> Tensor:
    return torch.tensor([float(x) for x in text.split()], dtype=torch.float64)


MEYER = numbers(
    "34780 28610 23650 19630 16370 13720 11540 9744 8261 7030 6005 5147 4427 3820 3307 2872"
)


def meyer(x):
    return x[0] * torch.exp(x[1] / (45 + 5 * count(1, 16) + x[2])) - MEYER


def gulf(x):
    t = count(1, 30) / 100
    y = 25 + (-50 * t.log()) ** (2 / 3)
    return torch.exp(-((y - x[1]).abs() ** x[2]) / x[0]) - t


def watson(x):
    t = count(1, 29)[:, None] / 29
    j = count(0, len(x) - 1)
    first = (j[1:] * x[1:] * t ** (j[1:] - 1)).sum(1) - (x * t**j).sum(1) ** 2 - 1
    return torch.cat([first, torch.stack([x[0], x[1] - x[0] ** 2 - 1])])


def variably_dimensioned(x):
    total = (count(1, len(x)) * (x - 1)).sum().reshape(1)
    return torch.cat([x - 1, total, total * total])


def chebyquad(x):
    n = len(x)
    y = 2 * x - 1
    before, now, found = torch.ones_like(y), y, []
    for i in range(1, n + 1):
        integral = -1 / (i * i - 1) if i % 2 == 0 else 0.0
        found.append(now.mean() - integral)
        before, now = now, 2 * y * now - before
    return torch.stack(found)


PROBLEMS: dict[str, tuple[Callable[[Tensor], Tensor], list[float], tuple[float, ...]]] = {
    "rosenbrock (1)": (fits.rosenbrock, [-1.2, 1.0], (0.0,)),
    "freudenstein and roth (2)": (fits.freudenstein, [0.5, -2.0], (0.0, 48.98425)),
    "powell, badly scaled (3)": (
        lambda x: torch.stack([1e4 * x[0] * x[1] - 1, torch.exp(-x).sum() - 1.0001]),
        [0.0, 1.0],
        (0.0,),
    ),
    "brown, badly scaled (4)": (
        lambda x: torch.stack([x[0] - 1e6, x[1] - 2e-6, x[0] * x[1] - 2]),
        [1.0, 1.0],
        (0.0,),
    ),
    "beale (5)": (fits.beale, [1.0, 1.0], (0.0,)),
    "jennrich and sampson (6)": (jennrich_sampson, [0.3, 0.4], (124.3622,)),
    "helical valley (7)": (fits.helix, [-1.0, 0.0, 0.0], (0.0,)),
    "meyer (10)": (meyer, [0.02, 4000.0, 250.0], (87.94586,)),
    "gulf (11)": (gulf, [5.0, 2.5, 0.15], (0.0,)),
    "powell, singular (13)": (fits.powell, [3.0, -1.0, 0.0, 1.0], (0.0,)),
    "wood (14)": (fits.wood, [-3.0, -1.0, -3.0, -1.0], (0.0,)),
    "watson, 9 (20)": (watson, [0.0] * 9, (1.399760e-6,)),
    "variably dimensioned (25)": (variably_dimensioned, [1 - i / 10 for i in range(1, 11)], (0.0,)),
    "trigonometric (26)": (fits.trigonometric, [0.1] * 10, (0.0, 2.795056e-5)),
    "linear, rank 1 (33)": (
        lambda x: count(1, 20) * (count(1, 5) * x).sum() - 1,
        [1.0] * 5,
        (20 * 19 / (2 * 41),),
    ),
    "chebyquad, 8 (35)": (chebyquad, [i / 9 for i in range(1, 9)], (3.516874e-3,)),
}
"""With standard starting points, and known minima of the sum of squares."""

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


@pytest.mark.parametrize("loss", ["soft_l1", "huber", "cauchy", "arctan"])
@pytest.mark.parametrize("method", ["lm", "dogleg"])
def test_an_exact_fit_ends_with_success(loss, method):
    """The cost of soft_l1 was 0 for residuals below 1e-8, so that no step could lower it."""
    torch.manual_seed(0)
    A, b = torch.randn(200, 4, 4, dtype=torch.float64), torch.randn(200, 4, dtype=torch.float64)

    def fun(x, A, b):
        return A @ x + 0.1 * (A @ x).sin() - b

    x0 = torch.zeros(200, 4, dtype=torch.float64)
    found = fo.least_squares(fun, x0, (A, b), loss=loss, method=method, batched=True)
    assert bool(found.success.all())
    assert found.fun.abs().max() < 1e-9
    torch.testing.assert_close(found.cost, 0.5 * found.fun.square().sum(1), rtol=1e-12, atol=0)


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
