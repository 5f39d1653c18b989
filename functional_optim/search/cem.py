"""The cross-entropy method."""

from __future__ import annotations

from numbers import Integral
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
    now,
)
from functional_optim.search.shaping import weigh


class CEMState(NamedTuple):
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
def cem(
    population: int,
    sigma: float | Tensor,
    *,
    elites: int | None = None,
    smoothing: numeric.Hyper = 0.7,
    noise: numeric.Hyper = 0.0,
) -> Search:
    """Cross-entropy method: the mean and deviation of the best few are the next distribution.

    ::

        m ← m + α (mean of the elites − m);   σ² ← (σ + α (deviation of the elites − σ))² + noise²

    Each element has a deviation. Elites with equal losses share their ranks; candidates without a
    finite loss are never elites.

    Args:
        population: n ≥ 2. Use ten or more per parameter.
        sigma: deviation of the candidates at first, > 0: a number or a 0-dim tensor.
        elites: their number, in [1, n]. Default: a quarter of n, at least 1. The tutorial uses 1 to
            10 % of a large population. A single elite has no deviation.
        smoothing: α in (0, 1]: a number, a 0-dim tensor or a schedule. Default: 0.7, from the
            tutorial's range of 0.4 to 0.9 (section 3.1 there).
        noise: deviation ≥ 0 added in each generation: a number, a 0-dim tensor or a schedule. One
            that falls to 0 keeps the distribution from collapsing too soon (Szita, Lőrincz,
            https://doi.org/10.1162/neco.2006.18.12.2936).

    State: `CEMState`.

    Raises:
        ValueError: if an argument is out of range, or the population is below 2.

    Paper: de Boer et al., "A Tutorial on the Cross-Entropy Method",
    https://doi.org/10.1007/s10479-005-5724-z, section 5.

    Example::

        >>> import torch, functional_optim as fo
        >>> method = fo.search.cem(population=40, sigma=1.0)
        >>> state = method.init(torch.tensor([1.0, -2.0]))
        >>> for _ in range(40):
        ...     candidates, state = method.ask(state)
        ...     state = method.tell(candidates, candidates.square().sum(1), state)
        >>> bool(fo.search.center(state).abs().max() < 1e-2)
        True
    """
    check_population("cem", population, 2)
    check_positive("cem", sigma=sigma)
    numeric.check(lambda x: 0.0 < x <= 1.0, smoothing, "cem needs smoothing in (0, 1], but got {}.")
    numeric.check(lambda x: x >= 0.0, noise, "cem needs noise of 0 or more, but got {}.")
    k = max(1, population // 4) if elites is None else elites
    whole = isinstance(k, Integral) and not isinstance(k, bool)
    if not whole or not 1 <= k <= population:
        raise ValueError(
            f"cem needs an integer in [1, {population}] as its elites, but got {elites!r}."
        )

    def start(at: Start) -> dict[str, Any]:
        return {"mean": at.mean, "sigma": at.deviations(sigma)}

    def sample(state: CEMState) -> Tensor:
        return state.mean + state.sigma * normal(state, population, state.mean)

    def learn(state: CEMState, x: Tensor, losses: Tensor) -> dict[str, Any]:
        alpha, extra = now(smoothing, state, x), now(noise, state, x)
        places = torch.arange(population, device=x.device) < k
        w = torch.where(losses.isfinite(), weigh(losses, places.to(torch.float64)), 0.0)
        w = (w / w.sum()).to(x.dtype)
        mean = w @ x
        deviation = (w @ (x - mean).square()).sqrt()
        sigma = state.sigma + alpha * (deviation - state.sigma)
        return {
            "mean": state.mean + alpha * (mean - state.mean),
            "sigma": (sigma.square() + extra.square()).sqrt(),
        }

    return method("cem", population, CEMState, start, sample, learn)
