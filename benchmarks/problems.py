"""Fits, roots and minima for `solvers.py`: each problem for torch, numpy and jax."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import functional_optim as fo

TIMES = np.linspace(0.0, 4.0, 30)
FAR = 0.02
"""The share of fits with a bad start."""


@dataclass(frozen=True)
class Many:
    """Problems of one kind. starts, data: numpy arrays, a row for each problem. fun: for torch.
    plain, slopes: the same for numpy, and its Jacobian or gradient. traced: the same for jax,
    from its numpy."""

    fun: Callable[[Tensor, Tensor], Tensor]
    plain: Callable[[np.ndarray, np.ndarray], Any]
    slopes: Any
    traced: Any
    starts: np.ndarray
    data: np.ndarray

    def tensors(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.starts), torch.from_numpy(self.data)


def decays(count: int, *, stragglers: bool = False) -> Many:
    """Three parameters of an exponential decay, from 30 points each."""
    rng = np.random.default_rng(0)
    true = np.stack([rng.uniform(*x, count) for x in ((1, 3), (0.5, 2), (0, 1))], 1)
    noise = 0.01 * rng.standard_normal((count, len(TIMES)))
    data = true[:, :1] * np.exp(-true[:, 1:2] * TIMES) + true[:, 2:] + noise
    starts = np.ones((count, 3))
    if stragglers:
        starts[rng.random(count) < FAR] = [10.0, 8.0, -5.0]
    times = torch.from_numpy(TIMES)

    def jacobian(p: np.ndarray, y: np.ndarray) -> np.ndarray:
        decay = np.exp(-p[1] * TIMES)
        return np.stack([decay, -p[0] * TIMES * decay, np.ones_like(TIMES)], 1)

    return Many(
        lambda p, y: p[0] * torch.exp(-p[1] * times) + p[2] - y,
        lambda p, y: p[0] * np.exp(-p[1] * TIMES) + p[2] - y,
        jacobian,
        lambda xp, p, y: p[0] * xp.exp(-p[1] * TIMES) + p[2] - y,
        starts,
        data,
    )


def rosenbrocks(count: int) -> Many:
    """Rosenbrock's residuals in two variables."""
    starts = np.random.default_rng(0).uniform(-2, 2, (count, 2))

    def parts(x: Any, a: Any) -> tuple[Any, Any]:
        return 10 * (x[1] - a[0] * x[0] ** 2), 1 - x[0]

    return Many(
        lambda x, a: torch.stack(parts(x, a)),
        lambda x, a: np.array(parts(x, a)),
        lambda x, a: np.array([[-20 * a[0] * x[0], 10.0], [-1.0, 0.0]]),
        lambda xp, x, a: xp.stack(parts(x, a)),
        starts,
        np.ones((count, 1)),
    )


def tridiagonals(count: int, n: int) -> Many:
    """Broyden's tridiagonal equations: Moré, Garbow, Hillstrom (30), with other coefficients."""
    data = np.random.default_rng(n).uniform(1, 2, (count, n))

    def fun(x: Tensor, a: Tensor) -> Tensor:
        none = x.new_zeros(1)
        left, right = torch.cat([none, x[:-1]]), torch.cat([x[1:], none])
        return (3 - a * x) * x - left - 2 * right + 1

    def plain(x: np.ndarray, a: np.ndarray) -> np.ndarray:
        left, right = np.append(0.0, x[:-1]), np.append(x[1:], 0.0)
        return (3 - a * x) * x - left - 2 * right + 1

    return Many(fun, plain, None, None, -np.ones((count, n)) + 0.3 * data[::-1], data)


def valleys(count: int, n: int) -> Many:
    """Rosenbrock's valley, stretched, and a bowl."""
    rng = np.random.default_rng(n)
    starts, data = rng.uniform(-1.3, 0.7, (count, n)), rng.uniform(0.5, 1.5, (count, n))

    def value(x: Any, a: Any) -> Any:
        z = x * a
        steep, flat = z[1:] - z[:-1] ** 2, 1 - z[:-1]
        return 100 * (steep**2).sum() + (flat**2).sum() + ((x - a) ** 2).sum()

    def gradient(x: np.ndarray, a: np.ndarray) -> np.ndarray:
        z = x * a
        steep, flat = z[1:] - z[:-1] ** 2, 1 - z[:-1]
        slope = 2 * (x - a)
        slope[1:] += 200 * steep * a[1:]
        slope[:-1] -= (400 * steep * z[:-1] + 2 * flat) * a[:-1]
        return slope

    return Many(value, value, gradient, None, starts, data)


def poisson(
    seed: int, width: int = 32, points: int = 400
) -> tuple[dict[str, Tensor], Callable[..., Tensor], Callable[..., Tensor]]:
    """A network with two hidden layers that solves Poisson's equation on a square.

    Returns its parameters (1,185 for a width of 32), its loss, and its residuals, whose squares sum
    to twice the loss: those of points inside, and of a fifth as many on the border. The Laplacian
    is carried forward through the layers by hand.
    """
    side = torch.arange(points // 5)
    generator = torch.Generator().manual_seed(seed)
    uniform = {"generator": generator, "dtype": torch.float64}
    params: dict[str, Tensor] = {}
    for i, (wide, high) in enumerate(((2, width), (width, width), (width, 1))):
        reach = math.sqrt(6 / (wide + high))
        params[f"w{i}"] = reach * (2 * torch.rand(high, wide, **uniform) - 1)
        params[f"b{i}"] = (2 * torch.rand(high, **uniform) - 1) / wide**0.5
    inside, border = torch.rand(points, 2, **uniform), torch.rand(len(side), 2, **uniform)
    border[side % 4 < 2, 0] = (side[side % 4 < 2] % 2).double()
    border[side % 4 > 1, 1] = (side[side % 4 > 1] % 2).double()
    source = 2 * math.pi**2 * torch.sin(math.pi * inside).prod(1)

    def equation(p: dict[str, Tensor], x: Tensor, source: Tensor) -> Tensor:
        first = torch.tanh(x @ p["w0"].T + p["b0"])
        slope = 1 - first**2
        jacobian = slope[..., None] * p["w0"]
        laplacian = -2 * first * slope * p["w0"].square().sum(-1) @ p["w1"].T
        second = torch.tanh(first @ p["w1"].T + p["b1"])
        bend = 1 - second**2
        curved = -2 * second * bend * (p["w1"] @ jacobian).square().sum(-1) + bend * laplacian
        return ((curved @ p["w2"].T)[..., 0] + source) / points**0.5

    def edge(p: dict[str, Tensor], x: Tensor) -> Tensor:
        first = torch.tanh(x @ p["w0"].T + p["b0"])
        return (torch.tanh(first @ p["w1"].T + p["b1"]) @ p["w2"].T + p["b2"])[..., 0] / (
            len(side) / 10
        ) ** 0.5

    def loss(p: dict[str, Tensor]) -> Tensor:
        inner, outer = equation(p, inside, source), edge(p, border)
        return (inner.square().sum() + outer.square().sum()) / 2

    parts = fo.per_sample(equation, inside, source), fo.per_sample(edge, border)
    return params, loss, fo.stack_residuals(*parts)
