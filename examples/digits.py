"""Handwritten digits (scikit-learn's own 1,797 small pictures), and a small network for them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor

TEST = 450
"""So many pictures are kept for testing."""


class Digits(NamedTuple):
    """Pictures of 8 × 8 numbers in [0, 1] as rows of 64, and what they show."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random training pictures."""
        rows = torch.randint(len(self.x), (size,), generator=generator)
        return self.x[rows], self.y[rows]


def load() -> Digits:
    """The pictures, in a fixed shuffled order."""
    pictures, shown = load_digits(return_X_y=True)
    order = torch.randperm(len(shown), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(pictures / 16, dtype=torch.float32)[order]
    y = torch.tensor(shown, dtype=torch.int64)[order]
    return Digits(x[TEST:], y[TEST:], x[:TEST], y[:TEST])


def network(seed: int = 0) -> torch.nn.Module:
    """64-32-10, 2,410 numbers that need no gradients."""
    torch.manual_seed(seed)
    layers = torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
    return torch.nn.Sequential(*layers).requires_grad_(False)


def loss_of(model: torch.nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of the model with these parameters."""
    logits = torch.func.functional_call(model, params, (x,))
    return torch.nn.functional.cross_entropy(logits, y)


def accuracy(model: torch.nn.Module, params: dict[str, Tensor], digits: Digits) -> float:
    """Of the test pictures, how many are recognized."""
    logits = torch.func.functional_call(model, params, (digits.x_test,))
    return (logits.argmax(1) == digits.y_test).float().mean().item()
