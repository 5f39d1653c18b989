"""Evolution strategies that pass a gradient estimate to any transformation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.factory import factory
from functional_optim.core.ravel import Ravel
from functional_optim.search.base import Search, Start, antithetic, check_positive, method, now
from functional_optim.search.shaping import centered_ranks, seen


class OpenAIESState(NamedTuple):
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
    tx: Any
    """The state of the transformation."""


@factory
def openai_es(population: int, sigma: numeric.Hyper, tx: base.GradientTransformation) -> Search:
    """Evolution strategy of OpenAI: ranks of antithetic candidates estimate a gradient for `tx`.

    ::

        xᵢ = m + σ zᵢ;   g = 1/(nσ) Σ rᵢ zᵢ;   m ← m + tx(g)

    with z standard normal, in pairs of opposite sign, and r the centred ranks. Ranks have no scale,
    and neither has g: use a transformation that normalizes it, such as `adam`, or tune `lr`.

    Args:
        population: n ≥ 2. The last candidate of an odd population has no opposite.
        sigma: deviation of the candidates, > 0: a number, a 0-dim tensor or a schedule. The paper
            uses 0.02 for networks of unit scale.
        tx: any transformation; it gets trees like params in float32 (or float64), so selection by
            path, weight decay and similar work as with gradients. If it takes the loss (`value`),
            it gets the mean of the finite losses.

    z is computed from the candidates. If a parameter's dtype is too coarse for σ (bfloat16 has 3
    digits), candidates that round to the mean have no weight.

    State: `OpenAIESState`.

    Raises:
        ValueError: if sigma is not positive, or the population is below 2.
        TypeError: if tx is not a transformation.

    Paper: Salimans et al., "Evolution Strategies as a Scalable Alternative to Reinforcement
    Learning", https://arxiv.org/abs/1703.03864, algorithm 1.

    Example::

        >>> import torch, functional_optim as fo
        >>> method = fo.search.openai_es(population=32, sigma=0.1, tx=fo.adam(0.1))
        >>> state = method.init(torch.tensor([1.0, -2.0]))
        >>> for _ in range(60):
        ...     candidates, state = method.ask(state)
        ...     state = method.tell(candidates, candidates.square().sum(1), state)
        >>> bool(fo.search.center(state).abs().max() < 0.1)
        True
    """
    base.check_transformation("openai_es", tx, "openai_es(64, 0.02, fo.adam(0.01))")
    check_positive("openai_es", sigma=sigma)

    def start(at: Start) -> dict[str, Any]:
        return {"mean": at.mean, "tx": tx.init(at.flat.tree(at.mean, stored=False))}

    def sample(state: OpenAIESState) -> Tensor:
        return state.mean + _sigma(sigma, state) * antithetic(state, population, state.mean)

    def learn(state: OpenAIESState, x: Tensor, losses: Tensor) -> dict[str, Any]:
        s = _sigma(sigma, state)
        z = (x - state.mean) / s
        g = centered_ranks(losses).to(z.dtype) @ z / (population * s)
        return _descend(tx, state, g, losses)

    return method("openai_es", population, OpenAIESState, start, sample, learn, least=2)


class PGPEState(NamedTuple):
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
    tx: Any
    """The state of the transformation."""


@factory
def pgpe(
    population: int,
    sigma: float | Tensor,
    tx: base.GradientTransformation,
    *,
    lr_sigma: numeric.Hyper = 0.1,
    max_change: float = 0.2,
) -> Search:
    """Policy gradients with parameter-based exploration, by symmetric sampling.

    ::

        xᵢ = m + σ zᵢ;   m ← m + tx(1/n Σ rᵢ σ zᵢ);   σ ← σ − α 1/n Σ rᵢ σ (zᵢ² − 1)

    with z standard normal, in pairs of opposite sign, r the centred ranks (the paper: rewards less
    a baseline), all products element-wise. Unlike `openai_es` it adapts a deviation for each
    element.

    Args:
        population: n ≥ 2. The last candidate of an odd population has no opposite.
        sigma: deviation of the candidates at first, > 0: a number or a 0-dim tensor.
        tx: any transformation; it gets trees like params in float32 (or float64).
        lr_sigma: α ≥ 0: a number, a 0-dim tensor or a schedule. Default: EvoTorch's 0.1.
        max_change: the largest relative change of σ in one generation, in (0, 1). Default:
            EvoTorch's 0.2, https://docs.evotorch.ai.

    State: `PGPEState`.

    Raises:
        ValueError: if an argument is out of range, or the population is below 2.
        TypeError: if tx is not a transformation.

    Paper: Sehnke et al., "Parameter-exploring policy gradients",
    https://doi.org/10.1016/j.neunet.2009.12.004, section 3.

    Example::

        >>> import torch, functional_optim as fo
        >>> method = fo.search.pgpe(population=32, sigma=0.5, tx=fo.adam(0.1))
        >>> state = method.init(torch.tensor([1.0, -2.0]))
        >>> for _ in range(100):
        ...     candidates, state = method.ask(state)
        ...     state = method.tell(candidates, candidates.square().sum(1), state)
        >>> bool(fo.search.center(state).abs().max() < 0.1)
        True
    """
    base.check_transformation("pgpe", tx, "pgpe(64, 0.1, fo.adam(0.01))")
    check_positive("pgpe", sigma=sigma)
    numeric.check_range("pgpe", "of 0 or more", lr_sigma=lr_sigma)
    numeric.check_range("pgpe", "in (0, 1)", max_change=max_change)

    def start(at: Start) -> dict[str, Any]:
        deviations = at.deviations(sigma)
        return {
            "mean": at.mean,
            "sigma": deviations,
            "tx": tx.init(at.flat.tree(at.mean, stored=False)),
        }

    def sample(state: PGPEState) -> Tensor:
        return state.mean + state.sigma * antithetic(state, population, state.mean)

    def learn(state: PGPEState, x: Tensor, losses: Tensor) -> dict[str, Any]:
        z = (x - state.mean) / state.sigma
        r = centered_ranks(losses).to(z.dtype) / population
        change = -now(lr_sigma, state, z) * (r @ (z.square() - 1))
        new = state.sigma * (1 + change.clamp(-max_change, max_change))
        return {"sigma": new, **_descend(tx, state, state.sigma * (r @ z), losses)}

    return method("pgpe", population, PGPEState, start, sample, learn, least=2)


def _descend(
    tx: base.GradientTransformation, state: Any, g: Tensor, losses: Tensor
) -> dict[str, Any]:
    extra = {"value": seen(losses)} if "value" in tx.extra else {}
    flat = Ravel(state.best, dtype=g.dtype)
    wide = flat.tree(state.mean, stored=False)
    updates, inner = tx.update(flat.tree(g, stored=False), state.tx, wide, **extra)
    return {"mean": state.mean + flat.vector(updates), "tx": inner}


def _sigma(sigma: numeric.Hyper, state: OpenAIESState) -> Any:
    value = numeric.at(sigma, (state.step + 1).to(torch.float64))
    return value.to(state.mean) if isinstance(value, Tensor) else value
