"""Functions with known minima: quadratics, a matrix problem, and a zoo of valleys."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from comparison.tasks import Batch, Params, Task, always, draws

STIFF = 0.1
"""The share of a quadratic's eigenvalues in (30, 60); all others are in (0, 1), as in DeepOBS."""
START = 0.1
"""The standard deviation that a seed adds to a valley's start."""
ROWS, COLUMNS, CONDITION = 32, 24, 1e4
REACH = 10.0
"""Parameters start about 1 from the minimum and have a few hundred steps."""


def random_basis(size: int, seed: int) -> Tensor:
    """An orthogonal matrix."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]


def quadratic(name: str, title: str, noise: float) -> Task:
    """½ xᵀHx in a hundred dimensions, rotated: no diagonal can scale it."""
    size = 100
    generator = torch.Generator().manual_seed(0)
    eigenvalues = torch.rand(size, generator=generator, dtype=torch.float64)
    stiff = int(STIFF * size)
    eigenvalues[:stiff] = 30 + 30 * eigenvalues[:stiff]
    basis = random_basis(size, 1)
    hessian = ((basis * eigenvalues) @ basis.T).float()

    def init(seed: int) -> Params:
        return {"x": torch.randn(size, generator=draws(seed, -1))}

    def value(params: Params) -> Tensor:
        x = params["x"]
        return 0.5 * (x * (hessian @ x)).sum()

    def loss(params: Params, *shift: Tensor) -> Tensor:
        return value(params) + sum([(params["x"] * x).sum() for x in shift])

    def batch(seed: int, step: int) -> Batch:
        return (noise * torch.randn(size, generator=draws(seed, step)),)

    return Task(name, title, 500, init, loss, batch if noise else always, value, reach=REACH)


def kronecker() -> Task:
    """½ |A W B − C|²: the curvature of a matrix is a product of one of rows and one of columns."""

    def factor(size: int, seed: int) -> Tensor:
        values = CONDITION ** -torch.linspace(0, 0.5, size, dtype=torch.float64)
        return ((random_basis(size, seed) * values) @ random_basis(size, seed + 1)).float()

    left, right = factor(ROWS, 2), factor(COLUMNS, 4)
    wanted = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(6))
    target = left @ wanted @ right

    def init(seed: int) -> Params:
        return {"layers.0.weight": torch.randn(ROWS, COLUMNS, generator=draws(seed, -1))}

    def loss(params: Params) -> Tensor:
        return 0.5 * (left @ params["layers.0.weight"] @ right - target).square().sum()

    title = "matrix problem with Kronecker structure"
    return Task("kronecker", title, 500, init, loss, always, loss, reach=REACH)


def rosenbrock(x: Tensor) -> Tensor:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def beale(x: Tensor) -> Tensor:
    a, b = x[0], x[1]
    terms = (1.5 - a + a * b, 2.25 - a + a * b**2, 2.625 - a + a * b**3)
    return sum([t**2 for t in terms], torch.zeros(()))


def saddle(x: Tensor) -> Tensor:
    """x² − y² + y⁴/4 + 1 for each pair: the start is on the ridge, but for the seed's part."""
    a, b = x[0::2], x[1::2]
    return (a**2 - b**2 + b**4 / 4 + 1).sum()


def plateau(x: Tensor) -> Tensor:
    """Flat far from the minimum: the gradient at the start is a hundredth of its largest."""
    return (1 - 1 / (1 + x.square() / 2)).sum()


def badly_scaled(x: Tensor) -> Tensor:
    scales = 1e6 ** torch.linspace(0, 1, len(x))
    return 0.5 * (scales * x.square()).sum() / 1e3


def kinks(x: Tensor) -> Tensor:
    """Sums of absolute values: the gradient does not shrink towards the minimum."""
    return (torch.arange(1, len(x) + 1) * x.abs()).sum() / len(x)


def cliff(x: Tensor) -> Tensor:
    """A gentle slope next to a wall, as the losses of recurrent networks have."""
    return (
        torch.nn.functional.softplus(20 * (x - 1)) / 4 + (x + 1).square() / 2
    ).sum() - cliff_min(len(x))


def cliff_min(size: int) -> float:
    """The value at the minimum, which is at −1 to rounding."""
    return size * math.log1p(math.exp(-40)) / 4


def bowl(x: Tensor) -> Tensor:
    return 0.5 * x.square().sum()


Noise = Callable[[int, int], Batch]


def heavy(size: int) -> Noise:
    """Gradients with Cauchy noise: now and then one is a thousand times too large."""

    def batch(seed: int, step: int) -> Batch:
        uniform = torch.rand(size, generator=draws(seed, step)).clamp(1e-4, 1 - 1e-4)
        return (0.1 * torch.tan(math.pi * (uniform - 0.5)),)

    return batch


def rare(size: int) -> Noise:
    """Each step sees a twentieth of the entries."""

    def batch(seed: int, step: int) -> Batch:
        return ((torch.rand(size, generator=draws(seed, step)) < 0.05).float(),)

    return batch


def valley(
    name: str, title: str, function: Callable[[Tensor], Tensor], start: Tensor, passes: float
) -> Task:
    """A function without noise. passes: the value that counts as its minimum."""

    def init(seed: int) -> Params:
        return {"x": start + START * torch.randn(start.shape, generator=draws(seed, -1))}

    def loss(params: Params) -> Tensor:
        return function(params["x"])

    return Task(name, title, 300, init, loss, always, loss, passes=passes, reach=REACH)


def noisy_bowl(name: str, title: str, noise: Noise, *, masks: bool, passes: float) -> Task:
    """A bowl of which a step sees the gradient with noise, or some entries only."""

    def init(seed: int) -> Params:
        return {"x": torch.ones(50) + START * torch.randn(50, generator=draws(seed, -1))}

    def loss(params: Params, given: Tensor) -> Tensor:
        x = params["x"]
        return bowl(given * x) if masks else bowl(x) + (given * x).sum()

    def score(params: Params) -> Tensor:
        return bowl(params["x"])

    return Task(name, title, 300, init, loss, noise, score, passes=passes, reach=REACH)


def structured() -> list[Task]:
    """The quadratics and the matrix problem."""
    return [
        quadratic("quadratic", "rotated quadratic, condition ~10⁴, no noise", 0.0),
        quadratic("noisy-quadratic", "the same with noise in the gradient", 1.0),
        kronecker(),
    ]


def valleys() -> list[Task]:
    """Functions that are passed or not: with a ten thousandth of the start's loss or so, under
    noise a hundredth."""
    pairs = torch.tensor([1.0, 0.0]).repeat(5)
    return [
        valley("rosenbrock", "valley: Rosenbrock, 10-D", rosenbrock, torch.zeros(10), 1e-3),
        valley("beale", "valley: Beale, 2-D", beale, torch.ones(2), 1e-3),
        valley("saddle", "valley: saddles", saddle, pairs, 1e-3),
        valley("plateau", "valley: plateau", plateau, torch.full((10,), 10.0), 1e-3),
        valley("scales", "valley: bad scales, not rotated", badly_scaled, torch.ones(20), 1e-1),
        valley("kinks", "valley: kinks", kinks, torch.ones(20), 1e-2),
        valley("cliff", "valley: next to a wall", cliff, torch.full((10,), 1.5), 1e-2),
        noisy_bowl("heavy-tails", "valley: Cauchy noise", heavy(50), masks=False, passes=0.25),
        noisy_bowl("sparse", "valley: sparse gradients", rare(50), masks=True, passes=2.5e-3),
    ]
