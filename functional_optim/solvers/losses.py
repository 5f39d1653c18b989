"""Robust losses ρ(z) of squared residuals z = (r / f_scale)², as in scipy.optimize.

The cost is ½ Σ f_scale² ρ(z). Triggs, McLauchlan, Hartley, Fitzgibbon, "Bundle Adjustment - A
Modern Synthesis" (1999), section 4.3, for the scaled residuals and Jacobian.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.solvers.arguments import is_number


class Rho(NamedTuple):
    """ρ and its first two derivatives at z, like z."""

    value: Tensor
    first: Tensor
    second: Tensor


def linear(z: Tensor) -> Rho:
    """ρ(z) = z: least squares."""
    return Rho(z, torch.ones_like(z), torch.zeros_like(z))


def soft_l1(z: Tensor) -> Rho:
    """ρ(z) = 2 (√(1 + z) − 1), without the difference, which is 0 for small z."""
    t = 1 + z
    root = t.sqrt()
    return Rho(2 * z / (root + 1), 1 / root, -0.5 / (t * root))


def huber(z: Tensor) -> Rho:
    """ρ(z) = z if z ≤ 1, else 2 √z − 1."""
    far = z > 1
    t = torch.where(far, z, 1.0)  # the root of zero has no derivative
    root = t.sqrt()
    return Rho(
        torch.where(far, 2 * root - 1, z), 1 / root, torch.where(far, -0.5 / (t * root), 0.0)
    )


def cauchy(z: Tensor) -> Rho:
    """ρ(z) = ln(1 + z)."""
    t = 1 / (1 + z)
    return Rho(z.log1p(), t, -t * t)


def arctan(z: Tensor) -> Rho:
    """ρ(z) = arctan z."""
    t = 1 / (1 + z * z)
    return Rho(z.atan(), t, -2 * z * t * t)


LOSSES: dict[str, Callable[[Tensor], Rho]] = {
    "linear": linear,
    "soft_l1": soft_l1,
    "huber": huber,
    "cauchy": cauchy,
    "arctan": arctan,
}


class Loss(NamedTuple):
    """A loss by its name, and f_scale, the size of a residual above which its weight decreases."""

    name: str = "linear"
    f_scale: float = 1.0

    def cost(self, r: Tensor) -> Tensor:
        """½ Σ f_scale² ρ((r / f_scale)²) over the last dimension, in float64."""
        r = r.to(torch.float64)
        if self.name == "linear":
            return 0.5 * (r * r).sum(-1)
        z = r / self.f_scale
        return 0.5 * self.f_scale**2 * LOSSES[self.name](z * z).value.sum(-1)

    def scaled(self, r: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Residuals and columns of the Jacobian, (..., m) and (..., n, m), in float64, of the
        least-squares problem with the loss's gradient and approximate Hessian at this point."""
        r, columns = r.to(torch.float64), columns.to(torch.float64)
        if self.name == "linear":
            return r, columns
        factor, weight = self.weights(r)
        return r * factor, columns * weight.unsqueeze(-2)

    def weights(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """The factors of residuals and of rows of the Jacobian, both like r."""
        z = r / self.f_scale
        z = z * z
        rho = LOSSES[self.name](z)
        weight = torch.maximum(rho.first + 2 * rho.second * z, LEAST * rho.first).sqrt()
        return rho.first / weight, weight


LEAST = 0.02
"""The smallest curvature of a residual, relative to ρ'. With scipy's tiny one, a fit with only
large residuals has no curvature, and its steps do not converge."""


def check_loss(name: str, f_scale: float) -> Loss:
    """The loss of that name; raises ValueError for an unknown one, or an invalid scale."""
    if not isinstance(name, str) or name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}; choose one of {', '.join(map(repr, LOSSES))}.")
    if not is_number(f_scale):
        raise TypeError(f"f_scale must be a number above 0, but got {f_scale!r}.")
    if not 0 < float(f_scale) < math.inf:
        raise ValueError(f"f_scale must be above 0 and finite, but got {f_scale}.")
    return Loss(name, float(f_scale))
