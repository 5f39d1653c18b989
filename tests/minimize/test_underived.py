"""A solver of one problem warns of a parameter that it took for a constant, and of no other."""

import math
import warnings

import numpy as np
import pytest
import torch

import functional_optim as fo

WIDE = torch.float64
T = torch.linspace(0, 3, 20, dtype=WIDE)
Y = 3 * torch.exp(-2 * T) + 0.5
ONES = torch.ones(3, dtype=WIDE)
ORIGIN = torch.zeros(2, dtype=WIDE)


def curve(amplitude, rate, offset):
    return amplitude * torch.exp(-rate * T) + offset - Y


READ = {
    "item": lambda x: curve(x[0], x[1].item(), x[2]),
    "float": lambda x: curve(x[0], float(x[1].detach()), x[2]),
    "math": lambda x: x[0] * T + math.exp(x[1].item()) + x[2] * T**2 - Y,
    "numpy": lambda x: curve(x[0], torch.from_numpy(np.array(x[1].detach().numpy())), x[2]),
    "detach": lambda x: curve(x[0], x[1].detach(), x[2]),
    "tensor": lambda x: curve(x[0], torch.tensor(x[1].tolist(), dtype=WIDE), x[2]),
}


@pytest.mark.parametrize("solve", ["least_squares", "bounded", "minimize", "with args"])
@pytest.mark.parametrize("how", READ)
def test_a_parameter_that_was_read_by_its_value(how, solve):
    fun, start = READ[how], ONES
    calls = {
        "least_squares": lambda: fo.least_squares(fun, start),
        "bounded": lambda: fo.least_squares(fun, start, bounds=(-1, 5)),
        "minimize": lambda: fo.minimize(lambda x: fun(x).square().sum(), start),
        "with args": lambda: fo.least_squares(lambda x, a: fun(x) + a, start, (0 * T,)),
    }
    with pytest.warns(
        RuntimeWarning, match=r"changes with element \[1\] of x, but has derivative 0"
    ):
        found = calls[solve]()
    assert found.x[1] == 1  # the warning is about a result, which is returned


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_warning_names_leaves(dtype):
    x0 = {name: torch.ones(2, dtype=dtype) for name in "abc"}

    def fun(x):
        read = (x["a"].detach() - 3).square() + (x["c"].detach() - 3).square()
        return (read + (x["b"] - 3).square()).sum()

    with pytest.warns(RuntimeWarning, match="changes with x at 'a' and x at 'c', but"):
        fo.minimize(fun, x0)


RIGHT = {
    "no use": lambda x: (x[0] - 1) ** 2,
    "a minimum": lambda x: (x[0] - 1) ** 2 + x[1] ** 2,
    "a maximum": lambda x: (x[0] - 1) ** 2 + torch.cos(x[1]),
    "a saddle": lambda x: (x[0] - 1) ** 2 + x[1] ** 3,
    "a corner": lambda x: (x[0] - 1) ** 2 + x[1].abs(),
    "an end of a slope": lambda x: (x[0] - 1) ** 2 + x[1].relu(),
    "far below": lambda x: (x[0] - 1) ** 2 + (x[1] - 5).relu(),
    "steps": lambda x: (x[0] - 1) ** 2 + x[1].round(),
    "a value read where it does not matter": lambda x: (x[0] - x[1].item()) ** 2,
    "an undefined side": lambda x: (x[0] - 1) ** 2 + x[1] * x[1].detach().sqrt(),
}


@pytest.mark.parametrize("why", RIGHT)
def test_a_derivative_that_is_0(why):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fo.minimize(RIGHT[why], ORIGIN)
        fo.least_squares(lambda x: RIGHT[why](x).reshape(1), ORIGIN)


def test_slopes_that_cancel_under_a_robust_loss():
    """Half a sum of squares has a slope there."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fo.least_squares(lambda x: torch.cat([x - 3, x]), ONES, loss="huber")
    assert found.x.equal(ONES)


def test_a_function_that_raises_elsewhere_keeps_its_result():
    def fun(x):
        if x[1].detach() != 0:
            raise ValueError("outside")
        return (x[0] - 2) ** 2 + x[1].detach()

    assert fo.minimize(fun, ORIGIN).x.tolist() == [2, 0]


@pytest.mark.parametrize("side", [1.0, 2.0])
def test_the_function_is_not_called_outside_of_bounds(side):
    seen = []

    def fun(x):
        seen.append(x.detach().clone())
        return (x[0] - 2) ** 2 + x[1].detach()

    bounds = ORIGIN + 1, ORIGIN + 2
    fo.minimize(fun, torch.full_like(ORIGIN, side), bounds=bounds)
    points = torch.stack(seen)
    assert ((bounds[0] <= points) & (points <= bounds[1])).all()
