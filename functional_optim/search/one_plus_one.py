"""One parent, one child."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core.factory import factory
from functional_optim.search.base import Search, Start, check_positive, method, normal


class OnePlusOneState(NamedTuple):
    step: Tensor
    """Number of finished generations, 0-dim int64."""
    seed: Tensor
    """The seed, 0-dim int64."""
    best: Any
    """The best candidate so far, a tree like params."""
    best_fitness: Tensor
    """Its loss, 0-dim float64."""
    parent: Tensor
    """The last candidate that was as good as its parent: (d,), in float32 or float64."""
    parent_fitness: Tensor
    """Its loss, 0-dim float64: ∞ before the first."""
    sigma: Tensor
    """The deviation of the next candidate, 0-dim float64."""


@factory
def one_plus_one(sigma: float | Tensor, *, factor: float | Tensor = 2.0) -> Search:
    """(1+1) evolution strategy with the one-fifth rule: a child that is not worse replaces its
    parent.

    The deviation grows by `factor` after a success and shrinks by its fourth root after a failure,
    so it is constant if one child in five succeeds. The first candidate is the start. The method
    needs the fewest evaluations on smooth, well-scaled functions, and cannot leave a local minimum.

    Args:
        sigma: deviation at first, > 0: a number or a 0-dim tensor.
        factor: > 1. Default: 2, nevergrad's (whose failures count 0.84 ≈ 2^−¼). Kern et al. have
            e^⅓ ≈ 1.4: a little faster on a sphere, no better elsewhere.

    State: `OnePlusOneState`. Its `population` is 1.

    Raises:
        ValueError: if sigma is not above 0, or factor not above 1.

    Source of the default: https://github.com/facebookresearch/nevergrad, `OnePlusOne` of 1.0.12.

    Papers: Rechenberg, "Evolutionsstrategie", 1973; Kern et al., "Learning probability
    distributions in continuous evolutionary algorithms",
    https://doi.org/10.1023/B:NACO.0000023416.59689.4e, section 3.

    Example::

        >>> import torch, functional_optim as fo
        >>> method = fo.search.one_plus_one(sigma=1.0)
        >>> state = method.init(torch.tensor([1.0, -2.0]))
        >>> for _ in range(300):
        ...     candidates, state = method.ask(state)
        ...     state = method.tell(candidates, candidates.square().sum(1), state)
        >>> bool(fo.search.center(state).abs().max() < 1e-3)
        True
    """
    check_positive("one_plus_one", sigma=sigma)
    numeric.check(
        lambda x: 1.0 < x < float("inf"),
        factor,
        "one_plus_one needs a finite factor above 1, but got {}.",
    )

    def start(at: Start) -> dict[str, Any]:
        return {
            "parent": at.mean,
            "parent_fitness": at.number(float("inf")),
            "sigma": at.number(sigma),
        }

    def sample(state: OnePlusOneState) -> Tensor:
        mutated = state.parent + state.sigma.to(state.parent.dtype) * normal(state, 1, state.parent)
        return torch.where(state.step == 0, state.parent, mutated)

    def learn(state: OnePlusOneState, x: Tensor, losses: Tensor) -> dict[str, Any]:
        success = losses[0] <= state.parent_fitness
        growth = numeric.like(factor, losses)
        change = torch.where(success, growth, growth**-0.25)
        return {
            "parent": torch.where(success, x[0], state.parent),
            "parent_fitness": torch.where(success, losses[0], state.parent_fitness),
            "sigma": torch.where(state.step == 0, state.sigma, state.sigma * change),
        }

    return method("one_plus_one", 1, OnePlusOneState, start, sample, learn)
