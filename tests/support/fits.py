"""Problems for least squares: fits of decay curves, and functions whose squares are summed.

The functions: Moré, Garbow, Hillstrom, "Testing Unconstrained Optimization Software", ACM Trans.
Math. Softw. 7 (1981), https://doi.org/10.1145/355934.355936.
"""

from typing import Any

import torch
from torch import Tensor

DOUBLE = torch.float64
TIMES = torch.linspace(0, 4, 30, dtype=DOUBLE)


def decay(x: Tensor, y: Tensor) -> Tensor:
    """a exp(−b t) + c − y."""
    return x[0] * torch.exp(-x[1] * TIMES) + x[2] - y


def rosenbrock(x: Tensor) -> Tensor:
    return torch.cat([10 * (x[1:] - x[:-1] ** 2), 1 - x[:-1]])


def beale(x: Tensor) -> Tensor:
    return torch.stack([c - x[0] * (1 - x[1] ** k) for k, c in ((1, 1.5), (2, 2.25), (3, 2.625))])


def powell(x: Tensor) -> Tensor:
    a, b, c, d = x
    both = [(b - 2 * c) ** 2, 10**0.5 * (a - d) ** 2]
    return torch.stack([a + 10 * b, 5**0.5 * (c - d), *both])


def wood(x: Tensor) -> Tensor:
    a, b, c, d = x
    both = [10**0.5 * (b + d - 2), (b - d) / 10**0.5]
    return torch.stack([10 * (b - a * a), 1 - a, 90**0.5 * (d - c * c), 1 - c, *both])


def helix(x: Tensor) -> Tensor:
    angle = torch.atan2(x[1], x[0]) / (2 * torch.pi)
    radius = (x[0] ** 2 + x[1] ** 2).sqrt()
    return torch.stack([10 * (x[2] - 10 * angle), 10 * (radius - 1), x[2]])


def freudenstein(x: Tensor) -> Tensor:
    a, b = x
    return torch.stack([a - 13 + ((5 - b) * b - 2) * b, a - 29 + ((b + 1) * b - 14) * b])


def trigonometric(x: Tensor) -> Tensor:
    i = torch.arange(1, len(x) + 1, dtype=x.dtype)
    return len(x) - x.cos().sum() + i * (1 - x.cos()) - x.sin()


def curves(count: int, noise: float = 0.02) -> tuple[Tensor, Tensor]:
    """Starting points (count, 3), and noisy data (count, 30)."""
    generator = torch.Generator().manual_seed(count)

    def drawn(*shape: int, like: Any = torch.rand) -> Tensor:
        return like(count, *shape, dtype=DOUBLE, generator=generator)

    spread, least = torch.tensor([[2.0, 1.5, 0.5], [1.0, 0.3, 0.0]], dtype=DOUBLE)
    x = drawn(3) * spread + least
    clean = torch.vmap(decay)(x, torch.zeros(count, 30, dtype=DOUBLE))
    return torch.ones(count, 3, dtype=DOUBLE), clean + noise * drawn(30, like=torch.randn)
