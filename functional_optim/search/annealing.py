"""Simulated annealing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import randomness
from functional_optim.core.factory import factory
from functional_optim.search import base
from functional_optim.search.base import Search, Start, check_positive, method


class AnnealingState(NamedTuple):
    step: Tensor
    """Number of finished generations, 0-dim int64."""
    seed: Tensor
    """The seed, 0-dim int64."""
    best: Any
    """The best candidate so far, a tree like params."""
    best_fitness: Tensor
    """Its loss, 0-dim float64."""
    walkers: Tensor
    """Where each walk is, (n, d), in float32 or float64."""
    walkers_fitness: Tensor
    """Their losses, (n,) float64: ∞ before the first generation."""


@factory
def annealing(population: int, sigma: numeric.Hyper, temperature: numeric.Hyper) -> Search:
    """Simulated annealing: random walks that accept higher losses less and less often as they cool.

    ::

        y = x + σ z;   x ← y with probability min(1, exp((f(x) − f(y)) / T))

    for each of n independent walks from the start, the Metropolis rule. The first generation
    evaluates the start. The method uses the values of losses, not their ranks: T is on their scale.

    Args:
        population: n ≥ 1 walks.
        sigma: deviation of the steps, > 0: a number, a 0-dim tensor or a schedule.
        temperature: T ≥ 0: a number, a 0-dim tensor or a schedule; 0 accepts only lower losses.
            E.g. one that starts at the size of typical differences between losses:
            `fo.schedules.exponential_decay`.

    State: `AnnealingState`. `center` of it is the best.

    Raises:
        ValueError: if an argument is out of range, or the population is below 1.

    Paper: Kirkpatrick, Gelatt, Vecchi, "Optimization by Simulated Annealing",
    https://doi.org/10.1126/science.220.4598.671.

    Example::

        >>> import torch, functional_optim as fo
        >>> cooling = fo.schedules.exponential_decay(1.0, 10, 0.8)
        >>> method = fo.search.annealing(population=4, sigma=0.3, temperature=cooling)
        >>> state = method.init(torch.tensor([1.0, -2.0]))
        >>> for _ in range(300):
        ...     candidates, state = method.ask(state)
        ...     state = method.tell(candidates, candidates.square().sum(1), state)
        >>> bool(fo.search.center(state).abs().max() < 0.2)
        True
    """
    check_positive("annealing", sigma=sigma)
    numeric.check_range("annealing", "of 0 or more", temperature=temperature)

    def start(at: Start) -> dict[str, Any]:
        return {
            "walkers": at.mean.expand(population, -1).clone(),
            "walkers_fitness": at.number(float("inf")).expand(population).clone(),
        }

    def sample(state: AnnealingState) -> Tensor:
        x = state.walkers
        moved = x + base.now(sigma, state, x) * base.normal(state, population, x[0])
        return torch.where(state.step == 0, x, moved)

    def learn(state: AnnealingState, x: Tensor, losses: Tensor) -> dict[str, Any]:
        warmth = base.now(temperature, state, losses)
        u = randomness.uniform(base.key(state, "accept"), losses.shape, losses.device)
        uphill = losses - state.walkers_fitness
        moves = (uphill <= 0) | (uphill < -warmth * u.log())
        moves = moves & losses.isfinite()
        return {
            "walkers": torch.where(moves.unsqueeze(1), x, state.walkers),
            "walkers_fitness": torch.where(moves, losses, state.walkers_fitness),
        }

    return method("annealing", population, AnnealingState, start, sample, learn)
