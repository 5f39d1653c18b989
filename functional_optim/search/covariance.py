"""Common parts of CMA-ES and sep-CMA-ES: weights of ranks, their constants, and the two paths.

Hansen, "The CMA Evolution Strategy: A Tutorial", https://arxiv.org/abs/1604.00772, has the names.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rates(NamedTuple):
    """The constants of one dimension and population."""

    weights: list[float]
    """Of all ranks, best first: the better half's are positive and add up to 1."""
    mueff: float
    """Variance-effective number of parents."""
    cc: float
    c1: float
    cmu: float
    cs: float
    damps: float


def log_weights(population: int) -> list[float]:
    """ln((n + 1)/2) − ln k at rank k; positive ones add up to 1, negative ones to −1."""
    raw = [math.log((population + 1) / 2) - math.log(k) for k in range(1, population + 1)]
    above, below = sum(w for w in raw if w > 0), -sum(w for w in raw if w < 0)
    return [w / above if w > 0 else w / max(below, 1e-300) for w in raw]


def effective(weights: list[float]) -> float:
    """The variance-effective number: (Σ w)² / Σ w²."""
    return sum(weights) ** 2 / sum([w * w for w in weights])


def complete(
    d: int, weights: list[float], *, cc: float, c1: float, cmu: float, definite: bool
) -> Rates:
    """All constants, from the weights of `log_weights` and the learning rates of C.

    Negative weights are scaled so that C does not decay without updates, and add up to no more than
    their effective number allows; with `definite`, to so little that C stays positive definite
    (https://arxiv.org/abs/1604.00772, equations 50 to 53).
    """
    mueff = effective([w for w in weights if w > 0])
    minus = effective([w for w in weights if w < 0])
    below = 1 + 2 * minus / (mueff + 2)
    if cmu > 0:
        below = min(below, 1 + c1 / cmu)
        if definite:
            below = min(below, (1 - c1 - cmu) / cmu / d)
    cs = min(0.5, (mueff + 2) / (d + mueff + 3))
    inner = max(1.0, 3 * (1 - 0.5 ** (d / 9)))
    return Rates(
        weights=[w if w > 0 else w * below for w in weights],
        mueff=mueff,
        cc=cc,
        c1=c1,
        cmu=cmu,
        cs=cs,
        damps=1 + 2 * max(0.0, inner * math.sqrt((mueff - 1) / (d + 1)) - 1) + cs,
    )


def chi(d: int) -> float:
    """The expected length of d standard normal numbers."""
    return math.sqrt(2) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))


def paths(state: Any, white: Tensor, shift: Tensor, rates: Rates) -> tuple[Tensor, Tensor, Tensor]:
    """p_σ, h_σ and p_c after a shift of the mean, in the coordinates of p_c.

    white: the shift in coordinates in which candidates are standard normal. h_σ is 0-dim: 1, or 0
    while p_σ is so long that p_c would elongate C.
    """
    cs, cc, d = rates.cs, rates.cc, state.ps.shape[0]
    ps = (1 - cs) * state.ps + math.sqrt(cs * (2 - cs) * rates.mueff) * white
    grown = 1 - (1 - cs) ** (2 * (state.step + 1)).to(torch.float64)
    h = (ps.square().sum() / grown / d < 2 + 4 / (d + 1)).to(ps.dtype)
    return ps, h, (1 - cc) * state.pc + h * math.sqrt(cc * (2 - cc) * rates.mueff) * shift


def step_size(sigma: Tensor, ps: Tensor, rates: Rates) -> Tensor:
    """σ, longer where p_σ is longer than a random path; by a factor of e at most."""
    change = rates.cs / rates.damps * (ps.square().sum().sqrt() / chi(ps.shape[0]) - 1)
    return sigma * change.clamp(-1, 1).exp().to(sigma.dtype)


def as_tensor(weights: list[float], like: Tensor) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64, device=like.device)


def fields(mean: Tensor, sigma: Tensor) -> dict[str, Any]:
    """The common initial values."""
    return {
        "mean": mean,
        "sigma": sigma,
        "ps": torch.zeros_like(mean),
        "pc": torch.zeros_like(mean),
    }
