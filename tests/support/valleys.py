"""Functions to be minimized, with their starting points and least values.

Moré, Garbow, Hillstrom (1981), see `fits`; Jamil, Yang (2013); with bounds: Hock, Schittkowski,
"Test examples for nonlinear programming codes" (1981).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import fits
import torch
from torch import Tensor


class Valley(NamedTuple):
    """A function, where to begin, values at its local minima, and its bounds."""

    fun: Callable[[Tensor], Tensor]
    x0: list[float]
    least: tuple[float, ...]
    lower: list[float] | None = None
    upper: list[float] | None = None

    def start(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(self.x0, dtype=dtype)

    def bounds(self, dtype: torch.dtype = torch.float64) -> Any:
        if self.lower is None:
            return None
        return tuple([torch.tensor(side, dtype=dtype) for side in (self.lower, self.upper)])


def squares(fun):
    """The sum of the squares of a problem for least squares."""
    return lambda x: fun(x).square().sum()


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def booth(x):
    return (x[0] + 2 * x[1] - 7) ** 2 + (2 * x[0] + x[1] - 5) ** 2


def himmelblau(x):
    return (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2


def matyas(x):
    return 0.26 * (x[0] ** 2 + x[1] ** 2) - 0.48 * x[0] * x[1]


def camel(x):
    a, b = x
    return (4 - 2.1 * a**2 + a**4 / 3) * a**2 + a * b + (4 * b**2 - 4) * b**2


def styblinski(x):
    return (x**4 - 16 * x**2 + 5 * x).sum() / 2


def dixon(x):
    i = torch.arange(2, len(x) + 1, dtype=x.dtype)
    return (x[0] - 1) ** 2 + (i * (2 * x[1:] ** 2 - x[:-1]) ** 2).sum()


FREE = {
    "rosenbrock": Valley(rosenbrock, [-1.2, 1.0] * 3, (0.0, 3.973940500930309)),
    "beale": Valley(squares(fits.beale), [1.0, 1.0], (0.0,)),
    "booth": Valley(booth, [0.0, 0.0], (0.0,)),
    "himmelblau": Valley(himmelblau, [0.0, 0.0], (0.0,)),
    "powell": Valley(squares(fits.powell), [3.0, -1.0, 0.0, 1.0], (0.0,)),
    "wood": Valley(squares(fits.wood), [-3.0, -1.0, -3.0, -1.0], (0.0,)),
    "matyas": Valley(matyas, [5.0, -4.0], (0.0,)),
    "camel": Valley(camel, [1.0, 1.0], (-1.031628453489877, -0.215463824383719)),
    "helix": Valley(squares(fits.helix), [-1.0, 0.1, 0.0], (0.0,)),
    "freudenstein": Valley(squares(fits.freudenstein), [0.5, -2.0], (0.0, 48.98425367924003)),
    "styblinski": Valley(styblinski, [-1.0] * 4, (-156.6646628150861,)),
    "dixon": Valley(dixon, [1.0] * 5, (0.0, 2 / 3)),
    "trigonometric": Valley(squares(fits.trigonometric), [0.2] * 5, (0.0, 5.2e-05, 2.2e-05)),
}


def hs3(x):
    return x[1] + 1e-5 * (x[1] - x[0]) ** 2


def hs4(x):
    return (x[0] + 1) ** 3 / 3 + x[1]


def hs5(x):
    return (x[0] + x[1]).sin() + (x[0] - x[1]) ** 2 - 1.5 * x[0] + 2.5 * x[1] + 1


def hs25(x):
    i = torch.arange(1, 100, dtype=x.dtype) / 100
    u = 25 + (-50 * i.log()) ** (2 / 3)
    return ((-((u - x[1]) ** x[2]) / x[0]).exp() - i).square().sum()


def hs45(x):
    return 2 - x.prod() / 120


INF = float("inf")
BOUNDED = {
    "hs1": Valley(rosenbrock, [-2.0, 1.0], (0.0,), [-INF, -1.5], [INF, INF]),
    "hs2": Valley(rosenbrock, [-2.0, 1.5], (0.050426188, 4.941229318), [-INF, 1.5], [INF, INF]),
    "hs3": Valley(hs3, [10.0, 1.0], (0.0,), [-INF, 0.0], [INF, INF]),
    "hs4": Valley(hs4, [1.125, 0.125], (8 / 3,), [1.0, 0.0], [INF, INF]),
    "hs5": Valley(hs5, [0.0, 0.0], (-1.913222954981037,), [-1.5, -3.0], [4.0, 3.0]),
    "hs25": Valley(hs25, [100.0, 12.5, 3.0], (0.0, 32.835), [0.1, 0.0, 0.0], [100.0, 25.6, 5.0]),
    "hs38": Valley(squares(fits.wood), [-3.0, -1.0, -3.0, -1.0], (0.0,), [-10.0] * 4, [10.0] * 4),
    "hs45": Valley(hs45, [2.0] * 5, (1.0,), [0.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]),
}
