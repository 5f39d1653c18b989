"""Separable natural evolution strategy."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core.factory import factory
from functional_optim.search.base import (
    Search,
    Start,
    check_population,
    check_positive,
    method,
    normal,
)
from functional_optim.search.shaping import nes_utilities, weigh


class SNESState(NamedTuple):
    step: Tensor
    """Number of finished generations, 0-dim int64."""
    seed: Tensor
    """The seed, 0-dim int64."""
    best: Any
    """The best candidate so far, a tree like params."""
    best_fitness: Tensor
    """Its loss, 0-dim float64."""
    mean: Tensor
    """The parameters as one vector (d,), in float32 or float64."""
    sigma: Tensor
    """The deviation of each, (d,)."""


@factory
def snes(
    population: int,
    sigma: float | Tensor,
    *,
    lr: float | Tensor = 1.0,
    lr_sigma: float | Tensor | None = None,
) -> Search:
    """Separable natural evolution strategy: a mean and a deviation for each element.

    ::

        xᵢ = m + σ zᵢ;   m ← m + η σ Σ uᵢ zᵢ;   σ ← σ exp(½ η_σ Σ uᵢ (zᵢ² − 1))

    with z standard normal and u the utilities of the losses' ranks, which add up to 0. It costs
    O(d) per candidate and does not model correlations: if they matter, `cma_es` is far better.

    Args:
        population: n ≥ 2; the paper has 4 + ⌊3 ln d⌋, `default_population`.
        sigma: deviation of the candidates at first, > 0: a number or a 0-dim tensor.
        lr: η > 0 of the mean. Default: the paper's 1.
        lr_sigma: η_σ > 0. Default: the paper's (3 + ln d) / (5 √d).

    State: `SNESState`.

    Raises:
        ValueError: if an argument is out of range, or the population is below 2.

    Paper: Wierstra et al., "Natural Evolution Strategies", https://arxiv.org/abs/1106.4487,
    algorithm 6 and table 1.

    Example::

        >>> import torch, functional_optim as fo
        >>> method = fo.search.snes(population=16, sigma=1.0)
        >>> state = method.init(torch.tensor([1.0, -2.0]))
        >>> for _ in range(60):
        ...     candidates, state = method.ask(state)
        ...     state = method.tell(candidates, candidates.square().sum(1), state)
        >>> bool(fo.search.center(state).abs().max() < 1e-3)
        True
    """
    check_population("snes", population, 2)
    check_positive("snes", sigma=sigma, lr=lr)
    if lr_sigma is not None:
        check_positive("snes", lr_sigma=lr_sigma)
    utilities = nes_utilities(population)

    def start(at: Start) -> dict[str, Any]:
        return {"mean": at.mean, "sigma": at.deviations(sigma)}

    def sample(state: SNESState) -> Tensor:
        return state.mean + state.sigma * normal(state, population, state.mean)

    def learn(state: SNESState, x: Tensor, losses: Tensor) -> dict[str, Any]:
        d = state.mean.shape[0]
        rate = (3 + math.log(d)) / (5 * math.sqrt(d)) if lr_sigma is None else lr_sigma
        eta, half = (numeric.like(hyper, losses).to(x.dtype) for hyper in (lr, rate))
        z = (x - state.mean) / state.sigma
        u = weigh(losses, torch.tensor(utilities, dtype=losses.dtype, device=x.device)).to(x.dtype)
        return {
            "mean": state.mean + eta * state.sigma * (u @ z),
            "sigma": state.sigma * (0.5 * half * (u @ (z.square() - 1))).exp(),
        }

    return method("snes", population, SNESState, start, sample, learn)
