"""Random search."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.core.factory import factory
from functional_optim.search.base import Search, Start, check_positive, method, normal


class RandomSearchState(NamedTuple):
    step: Tensor
    """Number of finished generations, 0-dim int64."""
    seed: Tensor
    """The seed, 0-dim int64."""
    best: Any
    """The best candidate so far, a tree like params."""
    best_fitness: Tensor
    """Its loss, 0-dim float64."""
    start: Tensor
    """The parameters passed to init as one vector (d,), in float32 or float64."""
    sigma: Tensor
    """The deviation, 0-dim float64."""


@factory
def random_search(population: int, sigma: float | Tensor) -> Search:
    """Sample from one normal distribution around the start, and keep the best.

    The distribution does not adapt. Use it as a baseline for other methods, or to tune a few
    hyperparameters.

    Args:
        population: n ≥ 1.
        sigma: deviation of the candidates, > 0: a number or a 0-dim tensor.

    State: `RandomSearchState`. `center` of it is the best.

    Raises:
        ValueError: if sigma is not positive, or the population is below 1.

    Paper: Bergstra, Bengio, "Random Search for Hyper-Parameter Optimization",
    https://jmlr.org/papers/v13/bergstra12a.html.

    Example::

        >>> import torch, functional_optim as fo
        >>> method = fo.search.random_search(population=500, sigma=1.0)
        >>> state = method.init(torch.tensor([1.0, -1.0]))
        >>> candidates, state = method.ask(state)
        >>> state = method.tell(candidates, candidates.square().sum(1), state)
        >>> bool(fo.search.center(state).abs().max() < 0.5)
        True
    """
    check_positive("random_search", sigma=sigma)

    def start(at: Start) -> dict[str, Any]:
        return {"start": at.mean, "sigma": at.number(sigma)}

    def sample(state: RandomSearchState) -> Tensor:
        return state.start + state.sigma.to(state.start.dtype) * normal(
            state, population, state.start
        )

    def learn(state: RandomSearchState, x: Tensor, losses: Tensor) -> dict[str, Any]:
        return {}

    return method("random_search", population, RandomSearchState, start, sample, learn)
