"""Covariance matrix adaptation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core import modes
from functional_optim.core.factory import factory
from functional_optim.linalg import eigh
from functional_optim.search import covariance
from functional_optim.search.base import Search, Start, check_positive, method, normal
from functional_optim.search.covariance import Rates, as_tensor
from functional_optim.search.shaping import weigh

CONDITION = 1e14
"""The largest condition number of C for sampling; pycma stops there."""


class CMAState(NamedTuple):
    step: Tensor
    """Number of finished generations, 0-dim int64."""
    seed: Tensor
    """The seed, 0-dim int64."""
    best: Any
    """The best candidate so far, a tree like params."""
    best_fitness: Tensor
    """Its loss, 0-dim float64."""
    mean: Tensor
    """m, the parameters as one vector (d,): this and all following fields in float64."""
    sigma: Tensor
    """σ, the step size, 0-dim."""
    ps: Tensor
    """p_σ, the evolution path for σ, (d,)."""
    pc: Tensor
    """p_c, the evolution path for C, (d,)."""
    C: Tensor
    """The covariance of candidates divided by σ², (d, d)."""
    B: Tensor
    """C's eigenvectors as columns, of its last decomposition, (d, d)."""
    D: Tensor
    """The roots of its eigenvalues, (d,)."""
    decomposed: Tensor
    """The step of the last decomposition, 0-dim int64."""


@factory
def cma_es(population: int, sigma: float | Tensor) -> Search:
    """CMA-ES: a normal distribution whose covariance matrix adapts to the shape of the function.

    Use it for up to a few hundred parameters. It is invariant under rotation and scaling of the
    parameters and any increasing function of the loss. It includes negative weights (active CMA). C
    needs O(d²) memory; its decomposition, O(d³), is as infrequent as in pycma (a traced or vmapped
    `tell` computes it each time, and uses it as infrequently).

    Args:
        population: n ≥ 3; `default_population(params)` = 4 + ⌊3 ln d⌋ is the tutorial's.
        sigma: σ > 0 at first, about a third of the range in which the solution is expected: a
            number or a 0-dim tensor.

    All constants (weights, c₁, c_μ, c_c, c_σ, d_σ, h_σ) are those of pycma 4.5.0,
    https://github.com/CMA-ES/pycma, which differ from the tutorial's table 1 in details. Other
    features of pycma are not included: restarts, stopping criteria, bounds, mirrored candidates in
    populations below 6, corrections for condition numbers above 1e8, and moving a part of σ into C
    once σ has grown ten-thousandfold. C starts as the unit matrix; pycma's differs from it by 1e-4.

    State: `CMAState`. It is in float64 for parameters of any dtype.

    Raises:
        ValueError: if sigma is not positive, or the population is below 3.

    Paper: Hansen, "The CMA Evolution Strategy: A Tutorial", https://arxiv.org/abs/1604.00772.

    Example::

        >>> import torch, functional_optim as fo
        >>> method = fo.search.cma_es(population=10, sigma=0.5)
        >>> state = method.init(torch.tensor([-1.0, 1.0]))
        >>> for _ in range(80):
        ...     x, state = method.ask(state)
        ...     rosenbrock = 100 * (x[:, 1] - x[:, 0] ** 2) ** 2 + (1 - x[:, 0]) ** 2
        ...     state = method.tell(x, rosenbrock, state)
        >>> bool((fo.search.center(state) - 1).abs().max() < 1e-3)
        True
    """
    check_positive("cma_es", sigma=sigma)

    def start(at: Start) -> dict[str, Any]:
        eye = torch.eye(at.flat.size, dtype=at.mean.dtype, device=at.mean.device)
        return {
            **covariance.fields(at.mean, at.number(sigma)),
            "C": eye,
            "B": eye.clone(),
            "D": torch.ones_like(at.mean),
            "decomposed": torch.zeros_like(at.step),
        }

    def sample(state: CMAState) -> Tensor:
        z = normal(state, population, state.mean)
        return state.mean + state.sigma * (z * state.D) @ state.B.mT

    def learn(state: CMAState, x: Tensor, losses: Tensor) -> dict[str, Any]:
        d = state.mean.shape[0]
        rates = active_rates(d, population)
        weights = as_tensor(rates.weights, x)
        y = (x - state.mean) / state.sigma
        shift = weigh(losses, weights.clamp(min=0)) @ y
        white = (y @ state.B) / state.D
        white_shift = state.B @ ((state.B.mT @ shift) / state.D)
        ps, h, pc = covariance.paths(state, white_shift, shift, rates)
        lost = rates.c1 * (1 - h) * rates.cc * (2 - rates.cc)
        w = rates.cmu * weigh(losses, weights)
        length = (white.square().sum(1).sqrt() + 1e-9).square()
        scaled = torch.where(w < 0, w * d / length, w)
        C = (1 - rates.c1 + lost - w.sum()) * state.C + (y.mT * scaled) @ y
        C = C + rates.c1 * torch.outer(pc, pc)
        return {
            "mean": state.mean + state.sigma * shift,
            "sigma": covariance.step_size(state.sigma, ps, rates),
            "ps": ps,
            "pc": pc,
            **decompose(state, (C + C.mT) / 2, rates),
        }

    return method(
        "cma_es", population, CMAState, start, sample, learn, least=3, dtype=torch.float64
    )


def active_rates(d: int, population: int) -> Rates:
    """pycma's constants (https://arxiv.org/abs/1604.00772, equations 46 to 53, and details)."""
    weights = covariance.log_weights(population)
    mueff = covariance.effective([w for w in weights if w > 0])
    c1 = min(1, population / 6) * 2 / ((d + 1.3) ** 2 + mueff)
    cmu = min(1 - c1, 2 * (0.25 + mueff + 1 / mueff - 2) / ((d + 2) ** 2 + mueff))
    cc = (4 + mueff / d) / (d + 4 + 2 * mueff / d)
    return covariance.complete(d, weights, cc=cc, c1=c1, cmu=cmu, definite=True)


def decompose(state: CMAState, C: Tensor, rates: Rates) -> dict[str, Any]:
    """C, B and D: decomposed again if 1 / (10 d (c₁ + c_μ)) generations have passed."""
    step = state.step + 1
    gap = 1 / (rates.c1 + rates.cmu) / C.shape[0] / 10
    due = step >= state.decomposed + gap
    if gap > 1 and not modes.traced() and not bool(due):
        return {"C": C, "B": state.B, "D": state.D, "decomposed": state.decomposed}
    values, B, _ = eigh(C)
    D = torch.maximum(values, values[-1:] / CONDITION).sqrt()
    return {
        "C": C,
        "B": torch.where(due, B.contiguous(), state.B),
        "D": torch.where(due, D, state.D),
        "decomposed": torch.where(due, step, state.decomposed),
    }
