"""From fitness to weights: ranks of a generation, independent of the scale of the losses.

Smaller is better, and values that are not finite are worst: NaN, ∞ and −∞ tie for the last rank.
Equal values share the mean of the weights of their ranks, so no result depends on the order of
candidates.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.core.storage import compute_dtype


class Places(NamedTuple):
    """The rank of each of n values, 0 for the best."""

    first: Tensor
    """The first rank of its ties: (n,) int64."""
    last: Tensor
    """The last rank of its ties: (n,) int64."""


def worst_if_not_finite(fitness: Tensor) -> Tensor:
    """The values, with ∞ for NaN, ∞ and −∞: a loss of −∞ has diverged, too."""
    return torch.where(fitness.isfinite(), fitness, math.inf)


def seen(losses: Tensor) -> Tensor:
    """The mean of the finite losses; infinite if none is finite."""
    count = losses.isfinite().sum()
    return torch.where(count > 0, finite(losses).sum() / count.clamp(min=1), torch.inf)


def finite(x: Tensor) -> Tensor:
    """The values, with 0 for those that are not finite."""
    return torch.where(x.isfinite(), x, 0.0)


def places(fitness: Tensor) -> Places:
    """The rank of each of n values; equal ones share a range of ranks."""
    n = fitness.shape[0]
    ordered, order = worst_if_not_finite(fitness).sort(stable=True)
    at = torch.arange(n, device=fitness.device)
    new = torch.cat([at[:1] == at[:1], ordered[1:] != ordered[:-1]])
    first = torch.where(new, at, 0).cummax(0).values
    closes = torch.cat([new[1:], at[:1] == at[:1]])
    last = torch.where(closes, at, n).flip(0).cummin(0).values.flip(0)
    back = order.argsort()
    return Places(first.gather(0, back), last.gather(0, back))


def centered_ranks(fitness: Tensor) -> Tensor:
    """Ranks, evenly spaced from −0.5 for the best (smallest) value to 0.5 for the worst.

    Use them instead of losses: a descent direction for them is one for the losses. They add up
    to 0. Equal values share the mean of their ranks, so values that are all equal give zeros.

    Args:
        fitness: (n,) losses; NaN and infinite ones are worst, and tie.

    Returns:
        (n,) in float32, or float64 if the losses are; 0 for n = 1.

    Paper: Salimans et al., "Evolution Strategies as a Scalable Alternative to Reinforcement
    Learning", https://arxiv.org/abs/1703.03864, section 2 (fitness shaping). Its authors' code
    orders ties by index: https://github.com/openai/evolution-strategies-starter.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.search.centered_ranks(torch.tensor([3.0, float("nan"), -7.0, 3.0, 4.0]))
        tensor([-0.1250,  0.5000, -0.5000, -0.1250,  0.2500])
    """
    n = fitness.shape[0]
    place = places(fitness)
    wide = (place.first + place.last).to(compute_dtype(fitness))
    return wide / 2 / max(n - 1, 1) - (0.5 if n > 1 else 0.0)


def weigh(fitness: Tensor, weights: Tensor) -> Tensor:
    """Each candidate's weight by its rank: weights[0] for the best, weights[n − 1] for the worst.

    Equal values share the mean of their weights.

    Args:
        fitness: (n,) losses; NaN and infinite ones are worst, and tie.
        weights: (n,), best first.

    Example::

        >>> import torch
        >>> from functional_optim.search.shaping import weigh
        >>> weigh(torch.tensor([5.0, 1.0, 5.0]), torch.tensor([1.0, 0.0, -1.0]))
        tensor([-0.5000,  1.0000, -0.5000])
    """
    first, last = places(fitness)
    total = torch.cat([torch.zeros_like(weights[:1]), weights.cumsum(0)])
    shared = (total.gather(0, last + 1) - total.gather(0, first)) / (last - first + 1)
    return torch.where(first == last, weights.gather(0, first), shared)


def nes_utilities(n: int) -> list[float]:
    """The weights of natural evolution strategies, best first; they add up to 0.

    Wierstra et al., "Natural Evolution Strategies", https://arxiv.org/abs/1106.4487, section 3.1:
    max(0, ln(n/2 + 1) − ln k) at rank k, divided by their sum, less 1/n.
    """
    raw = [max(0.0, math.log(n / 2 + 1) - math.log(k)) for k in range(1, n + 1)]
    total = sum(raw)
    return [x / total - 1 / n for x in raw]
