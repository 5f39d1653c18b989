"""CMA-ES with a diagonal covariance matrix."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.search import covariance
from functional_optim.search.base import Search, Start, check_positive, method, normal
from functional_optim.search.covariance import Rates, as_tensor, effective, log_weights
from functional_optim.search.shaping import weigh


class SepCMAState(NamedTuple):
    step: Tensor
    """Generations told so far, 0-dim int64."""
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
    """p_σ, the path that steers σ, (d,)."""
    pc: Tensor
    """p_c, the path that stretches C, (d,)."""
    C: Tensor
    """The diagonal of the covariance of candidates divided by σ², (d,)."""


def sep_cma_es(population: int, sigma: float | Tensor) -> Search:
    """CMA-ES restricted to a diagonal covariance matrix: O(d) in time and memory, learns faster.

    For many parameters, and functions that separate or nearly do. It knows no correlations.

    Args:
        population: n ≥ 2; `default_population(params)` = 4 + ⌊3 ln d⌋ is the paper's.
        sigma: σ > 0 at first: a number or a 0-dim tensor.

    Weights ln(n/2 + ½) − ln k of the better half, and the paper's constants: CMA-ES's of its time,
    with a learning rate of C that is (d + 2)/3 times as large; h_σ as in `cma_es`. (pycma's
    CMA_diagonal is another method, multiplicative and with negative weights: it learns scales that
    differ a thousandfold sooner.)

    State: `SepCMAState`.

    Raises:
        ValueError: if sigma is no positive number, or the population is below 2.

    Paper: Ros, Hansen, "A Simple Modification in CMA-ES Achieving Linear Time and Space
    Complexity", https://doi.org/10.1007/978-3-540-87700-4_30, section 3.

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
        return {
            **covariance.fields(at.mean, at.number(sigma)),
            "C": torch.ones_like(at.mean),
        }

    def sample(state: SepCMAState) -> Tensor:
        z = normal(state, population, state.mean)
        return state.mean + state.sigma.to(z.dtype) * state.C.sqrt() * z

    def learn(state: SepCMAState, x: Tensor, losses: Tensor) -> dict[str, Any]:
        rates = separable_rates(state.mean.shape[0], population)
        sigma = state.sigma.to(x.dtype)
        w = weigh(losses, as_tensor(rates.weights, x)).to(x.dtype)
        y = (x - state.mean) / sigma
        shift = w @ y
        ps = covariance.step_path(state.ps, shift / state.C.sqrt(), rates)
        h = covariance.keeps_pace(ps, state.step, rates)
        pc = covariance.shape_path(state.pc, shift, h, rates)
        C = (1 - rates.c1 - rates.cmu) * state.C + rates.c1 * pc.square()
        return {
            "mean": state.mean + sigma * shift,
            "sigma": covariance.step_size(state.sigma, ps, rates),
            "ps": ps,
            "pc": pc,
            "C": C + rates.cmu * (w @ y.square()),
        }

    return method("sep_cma_es", population, SepCMAState, start, sample, learn, least=2)


def separable_rates(d: int, population: int) -> Rates:
    """The paper's constants: c₁ = c_cov/μ_cov and c_μ = c_cov (1 − 1/μ_cov) with μ_cov = μ_eff."""
    weights = [max(w, 0.0) for w in log_weights(population)]
    mueff = effective(weights)
    full = 2 / (d + math.sqrt(2)) ** 2 / mueff
    full += (1 - 1 / mueff) * min(1, (2 * mueff - 1) / ((d + 2) ** 2 + mueff))
    cov = min(1.0, full * (d + 2) / 3)
    cs = (mueff + 2) / (d + mueff + 3)
    return Rates(
        weights=weights,
        mueff=mueff,
        cc=4 / (d + 4),
        c1=cov / mueff,
        cmu=cov * (1 - 1 / mueff),
        cs=cs,
        damps=1 + 2 * max(0.0, math.sqrt((mueff - 1) / (d + 1)) - 1) + cs,
    )
