"""Differential evolution."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import randomness
from functional_optim.core.calls import check_choice
from functional_optim.core.factory import factory
from functional_optim.search import base
from functional_optim.search.base import Search, Start, check_positive, method

STRATEGIES = ("rand/1/bin", "best/1/bin")


class DEState(NamedTuple):
    step: Tensor
    """Number of finished generations, 0-dim int64."""
    seed: Tensor
    """The seed, 0-dim int64."""
    best: Any
    """The best candidate so far, a tree like params."""
    best_fitness: Tensor
    """Its loss, 0-dim float64."""
    members: Tensor
    """The population, (n, d), in float32 or float64."""
    members_fitness: Tensor
    """Their losses, (n,) float64: ∞ before the first generation."""


@factory
def differential_evolution(
    population: int,
    sigma: float | Tensor,
    *,
    F: numeric.Hyper = 0.6,
    CR: numeric.Hyper = 0.7,
    strategy: str = "best/1/bin",
) -> Search:
    """Differential evolution: steps are differences between members of the population.

    ::

        v = base + F (x_b − x_c);   uⱼ = vⱼ where rand < CR or j is the one chosen, else xⱼ
        x ← u if its loss is no larger

    for every member x, with b, c (and the base of rand/1) random others, all different. The first
    generation evaluates the initial members: the start, and normal samples around it.

    Args:
        population: n ≥ 4; the paper has 5 d to 10 d.
        sigma: deviation of the first members, > 0: a number or a 0-dim tensor.
        F: in (0, 2]: a number, a 0-dim tensor or a schedule. Default: 0.6. The paper starts from
            0.5, with which best/1/bin collapses too soon in `benchmarks/search.py`.
        CR: probability of each element to be replaced, in [0, 1]: a number, a 0-dim tensor or a
            schedule. Default: 0.7, as in scipy. Use small values for separable functions.
        strategy: "best/1/bin" (the base is the best member; fast) or "rand/1/bin" (a random one:
            slower and more thorough).

    State: `DEState`. `center` of it is the best.

    Raises:
        ValueError: if an argument is out of range, the strategy is unknown, or the population is
            below 4.

    Paper: Storn, Price, "Differential Evolution: A Simple and Efficient Heuristic for Global
    Optimization over Continuous Spaces", https://doi.org/10.1023/A:1008202821328.

    Example::

        >>> import torch, functional_optim as fo
        >>> method = fo.search.differential_evolution(population=20, sigma=1.0)
        >>> state = method.init(torch.tensor([1.0, -2.0]))
        >>> for _ in range(60):
        ...     candidates, state = method.ask(state)
        ...     state = method.tell(candidates, candidates.square().sum(1), state)
        >>> bool(fo.search.center(state).abs().max() < 1e-3)
        True
    """
    check_positive("differential_evolution", sigma=sigma)
    numeric.check(
        lambda x: 0.0 < x <= 2.0, F, "differential_evolution needs F in (0, 2], but got {}."
    )
    numeric.check_range("differential_evolution", "in [0, 1]", CR=CR)
    check_choice("differential_evolution", STRATEGIES, strategy=strategy)

    def start(at: Start) -> dict[str, Any]:
        z = base.normal(at, population - 1, at.mean)
        around = at.mean + at.number(sigma).to(at.mean.dtype) * z
        return {
            "members": torch.cat([at.mean.unsqueeze(0), around]),
            "members_fitness": at.number(float("inf")).expand(population).clone(),
        }

    def sample(state: DEState) -> Tensor:
        x = state.members
        n, d = x.shape
        a, b, c = [x.index_select(0, i) for i in others(state, n)]
        if strategy == "best/1/bin":
            a = x.index_select(0, state.members_fitness.argmin().reshape(1))
        v = a + base.now(F, state, x) * (b - c)
        chance = randomness.uniform(base.key(state, "crossover"), (n, d), x.device)
        sure = randomness.uniform(base.key(state, "sure"), (n, 1), x.device)
        chosen = torch.arange(d, device=x.device) == (sure * d).floor()
        trial = torch.where((chance < base.now(CR, state, chance)) | chosen, v, x)
        return torch.where(state.step == 0, x, trial)

    def learn(state: DEState, x: Tensor, losses: Tensor) -> dict[str, Any]:
        better = (losses <= state.members_fitness) & losses.isfinite()
        return {
            "members": torch.where(better.unsqueeze(1), x, state.members),
            "members_fitness": torch.where(better, losses, state.members_fitness),
        }

    return method("differential_evolution", population, DEState, start, sample, learn, least=4)


def others(state: Any, n: int) -> list[Tensor]:
    """For each of n members three others, all four different: three times (n,) int64.

    Each is an index among the remaining members, which then skips those that are already chosen.
    """
    u = randomness.uniform(base.key(state, "others"), (3, n), state.members.device)
    taken = torch.arange(n, device=u.device).unsqueeze(0)
    for i in range(3):
        left = n - 1 - i
        pick = (u[i] * left).floor().to(torch.int64).clamp(max=left - 1)
        for row in taken.sort(0).values.unbind():
            pick = pick + (pick >= row).to(torch.int64)
        taken = torch.cat([taken, pick.unsqueeze(0)])
    return list(taken[1:].unbind())
