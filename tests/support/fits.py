"""Problems for least squares: fits of decay curves, and Rosenbrock's function."""

from typing import Any

import torch
from torch import Tensor

DOUBLE = torch.float64
TIMES = torch.linspace(0, 4, 30, dtype=DOUBLE)


def decay(x: Tensor, y: Tensor) -> Tensor:
    """a exp(−b t) + c − y."""
    return x[0] * torch.exp(-x[1] * TIMES) + x[2] - y


def rosenbrock(x: Tensor) -> Tensor:
    return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])


def curves(count: int, noise: float = 0.02) -> tuple[Tensor, Tensor]:
    """Starting points (count, 3), and noisy data (count, 30)."""
    generator = torch.Generator().manual_seed(count)

    def drawn(*shape: int, like: Any = torch.rand) -> Tensor:
        return like(count, *shape, dtype=DOUBLE, generator=generator)

    spread, least = torch.tensor([[2.0, 1.5, 0.5], [1.0, 0.3, 0.0]], dtype=DOUBLE)
    x = drawn(3) * spread + least
    clean = torch.vmap(decay)(x, torch.zeros(count, 30, dtype=DOUBLE))
    return torch.ones(count, 3, dtype=DOUBLE), clean + noise * drawn(30, like=torch.randn)
