"""CMA-ES with a diagonal covariance matrix."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.factory import factory
from functional_optim.search import covariance
from functional_optim.search.base import Search, Start, check_positive, method, normal
from functional_optim.search.covariance import Rates, as_tensor
from functional_optim.search.shaping import weigh


class SepCMAState(NamedTuple):
    step: Tensor
    """Number of finished generations, 0-dim int64."""
    seed: Tensor
    """The seed, 0-dim int64."""
    best: Any
    """The best candidate so far, a tree like params."""
    best_fitness: Tensor
    """Its loss, 0-dim float64."""
    mean: Tensor
    """m, the parameters as one vector (d,), in float32 or float64."""
    sigma: Tensor
    """σ, the step size, 0-dim float64."""
    ps: Tensor
    """p_σ, the evolution path for σ, (d,)."""
    pc: Tensor
    """p_c, the evolution path for C, (d,): in units of the deviations at its generation."""
    C: Tensor
    """The diagonal of the covariance of candidates divided by σ², (d,)."""


@factory
def sep_cma_es(population: int, sigma: float | Tensor) -> Search:
    """CMA-ES restricted to a diagonal covariance matrix: O(d) in time and memory, adapts faster.

    Use it for many parameters, and for separable or nearly separable functions. It does not model
    correlations.

    ::

        C ← C exp(ln 2 (c₁ (p_c² − 1) + c_μ Σ wₖ (zₖ² − 1)))        zₖ = (xₖ − m) / (σ √C)

    element by element. The diagonal is multiplied, so it stays positive for all weights, and adapts
    quickly to scales that differ a thousandfold. p_c, like z, is in units of √C.

    Args:
        population: n ≥ 2; `default_population(params)` = 4 + ⌊3 ln d⌋ is the paper's.
        sigma: σ > 0 at first: a number or a 0-dim tensor.

    The rule and all constants are those of pycma 4.5.0 with CMA_diagonal=True,
    https://github.com/CMA-ES/pycma: the worse half has negative weights w that add up to
    −(1 + c₁/c_μ) at most, c₁ = 1 / (d + 2√d + μ_eff/d),
    c_μ = (μ_eff + 1/μ_eff − 1.75) / (d + 4√d + μ_eff/2) and
    c_c = (1 + (1 + μ_eff)/d) / (√d + (1 + 2 μ_eff)/d); σ, its path and h_σ are as in `cma_es`;
    where h_σ = 0, c₁ is multiplied by 1 − c_c (2 − c_c). Unlike pycma, this limits the change of
    each deviation √C in one generation to a factor of e, as that of σ, since user-supplied
    candidates may be far away.

    State: `SepCMAState`.

    Raises:
        ValueError: if sigma is not positive, or the population is below 2.

    Papers: Ros, Hansen, "A Simple Modification in CMA-ES Achieving Linear Time and Space
    Complexity", https://doi.org/10.1007/978-3-540-87700-4_30, has the idea; its C is a mean, with
    positive weights only. Akimoto, Hansen, "Diagonal Acceleration for Covariance Matrix Adaptation
    Evolution Strategies", https://arxiv.org/abs/1905.05885, section 4, has the exponential update.

    Example::

        >>> import torch, functional_optim as fo
        >>> method = fo.search.sep_cma_es(population=10, sigma=1.0)
        >>> state = method.init(torch.tensor([1.0, -2.0]))
        >>> for _ in range(60):
        ...     candidates, state = method.ask(state)
        ...     state = method.tell(candidates, candidates.square().sum(1), state)
        >>> bool(fo.search.center(state).abs().max() < 1e-3)
        True
    """
    check_positive("sep_cma_es", sigma=sigma)

    def start(at: Start) -> dict[str, Any]:
        return {**covariance.fields(at.mean, at.number(sigma)), "C": torch.ones_like(at.mean)}

    def sample(state: SepCMAState) -> Tensor:
        z = normal(state, population, state.mean)
        return state.mean + state.sigma.to(z.dtype) * state.C.sqrt() * z

    def learn(state: SepCMAState, x: Tensor, losses: Tensor) -> dict[str, Any]:
        rates = separable_rates(state.mean.shape[0], population)
        weights = as_tensor(rates.weights, x)
        deviation = state.sigma.to(x.dtype) * state.C.sqrt()
        z = (x - state.mean) / deviation
        shift = weigh(losses, weights.clamp(min=0)).to(x.dtype) @ z
        ps, h, pc = covariance.paths(state, shift, shift, rates)
        c1 = rates.c1 * (1 - (1 - h) * rates.cc * (2 - rates.cc))
        w = rates.cmu * weigh(losses, weights).to(x.dtype)
        growth = c1 * (pc.square() - 1) + w @ (z.square() - 1)
        return {
            "mean": state.mean + deviation * shift,
            "sigma": covariance.step_size(state.sigma, ps, rates),
            "ps": ps,
            "pc": pc,
            "C": state.C * (math.log(2) * growth).clamp(-2, 2).exp(),
        }

    return method("sep_cma_es", population, SepCMAState, start, sample, learn, least=2)


def separable_rates(d: int, population: int) -> Rates:
    """pycma's constants for a diagonal: those of C decrease with d, not with its square."""
    weights = covariance.log_weights(population)
    mueff = covariance.effective([w for w in weights if w > 0])
    c1 = 1 / (d + 2 * math.sqrt(d) + mueff / d)
    cmu = min(1 - c1, (mueff + 1 / mueff - 1.75) / (d + 4 * math.sqrt(d) + mueff / 2))
    cc = (1 + (1 + mueff) / d) / (math.sqrt(d) + (1 + 2 * mueff) / d)
    return covariance.complete(d, weights, cc=cc, c1=c1, cmu=cmu, definite=False)
