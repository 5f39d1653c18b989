"""Levenberg–Marquardt: damped Gauss–Newton steps, rejected if they increase the loss.

Moré, "The Levenberg-Marquardt algorithm: Implementation and theory" (1978),
https://doi.org/10.1007/BFb0067700, for the scales; Nielsen, "Damping parameter in Marquardt's
method", IMM-REP-1999-05 (1999), section 3.2; Transtrum, Sethna, "Improvements to the
Levenberg-Marquardt algorithm for nonlinear least-squares minimization",
https://arxiv.org/abs/1201.5885, for the geodesic acceleration.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.solvers import linear
from functional_optim.solvers.globalization import nielsen
from functional_optim.solvers.linear import Kind
from functional_optim.solvers.steps import (
    FromResiduals,
    Scaling,
    acceleration,
    check_scaling,
    here,
    number,
    scaled,
    tried,
    vector_view,
)


class LevenbergMarquardtState(NamedTuple):
    """n: number of parameters."""

    step: Tensor
    """Steps tried so far: 0-dim, int64."""
    damping: Tensor
    """μ of the next step: 0-dim, float64."""
    growth: Tensor
    """ν, by which the next rejected step multiplies μ: 0-dim, float64."""
    scale: Tensor
    """D, the largest norm so far of each column of J, (n,), float64; 0 with `scaling=None`."""
    value: Tensor
    """Half the sum of squares before the last step: 0-dim, float64."""


@factory
def levenberg_marquardt(
    damping: numeric.Number = 1e-3,
    geodesic: bool = False,
    linear_solver: Kind = "auto",
    scaling: Scaling | None = "jac",
) -> GradientTransformation:
    """Levenberg–Marquardt: w ← w − (JᵀJ + μ D²)⁻¹ Jᵀr, if that decreases ½ Σ r².

    One update tries one step: `update(None, state, params, residual_fn=fn)`, where `fn(params)`
    returns residuals, or is the result of `per_sample` or `stack_residuals`. The update of a
    rejected step is −0.0, and μ increases. To run one fit or many until convergence, call
    `least_squares`.

    Args:
        damping: μ of the first step, in units of D², > 0. Default 1e-3, Nielsen's τ; up to 1 for a
            poor starting point. It adapts from step to step.
        geodesic: add the second-order correction of the step, at the cost of two more derivatives
            of the residuals and one more solve. Use it for long, curved valleys.
        linear_solver: "auto" (the default): "kernel", in the space of the residuals, if there are
            fewer of them than parameters, else "cholesky"; or "qr", "cg", "lsmr". See
            `least_squares`.
        scaling: "jac" (the default): D is the largest norm so far of each column of J; with fewer
            residuals than parameters it is at least the root mean square of these norms. None: 1.
            "cg" and "lsmr", which have no columns, always take 1.

    State: `LevenbergMarquardtState`.

    Raises:
        ValueError: if damping is not above 0; for an unknown linear solver or scaling; from update,
            if residuals are not finite at params.
        TypeError: for a schedule as damping; from update, without a `residual_fn`, or for complex
            parameters.

    A step and its trial must use residuals of the same data. On mini-batches μ follows the noise;
    use large batches, and several steps on each.

    Example::

        >>> import torch, functional_optim as fo
        >>> def fn(x):  # Rosenbrock's function
        ...     return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])
        >>> tx, x = fo.levenberg_marquardt(), torch.tensor([-1.2, 1.0], dtype=torch.float64)
        >>> state = tx.init(x)
        >>> for _ in range(25):
        ...     updates, state = tx.update(None, state, x, residual_fn=fn)
        ...     x = fo.apply_updates(x, updates)
        >>> x
        tensor([1., 1.], dtype=torch.float64)
    """
    if callable(damping):
        raise TypeError(
            "levenberg_marquardt adapts its damping, so pass its initial value as a number; for a "
            "schedule use gauss_newton(damping=schedule)."
        )
    numeric.check(lambda x: x > 0.0, damping, "Invalid damping value: {}; it must be above 0")
    linear.check_kind(linear_solver)
    check_scaling(scaling)

    def init(params: Any) -> LevenbergMarquardtState:
        flat = vector_view("levenberg_marquardt", params)
        first = torch.as_tensor(damping, dtype=torch.float64, device=flat.device)
        one = number(flat, 1.0)
        return LevenbergMarquardtState(
            step=base.first_step(flat.leaves),
            damping=first * one,
            growth=2 * one,
            scale=flat.zeros(flat.size, dtype=torch.float64) * one,
            value=0 * one,
        )

    def update(
        grads: Any,
        state: LevenbergMarquardtState,
        params: Any = None,
        *,
        residual_fn: Any = base.NEEDED,
        **extra: Any,
    ) -> tuple[Any, LevenbergMarquardtState]:
        base.check_extra(extra, ("residual_fn",))
        at = here("levenberg_marquardt", linear_solver, params, residual_fn)
        mu = state.damping
        D, kept = scaled(scaling, at, state.scale)
        p, found = linear.solve(at.kind, at.system, mu, D)
        if geodesic:
            a, too_bent = acceleration(at, residual_fn, p, mu, D)
            p, found = p + torch.where(too_bent, 0.0, a), found & ~too_bent
        trial = tried(at, residual_fn, p, found)
        mu, growth = nielsen(mu, state.growth, trial.ratio, trial.accepted)
        new = LevenbergMarquardtState(state.step + 1, mu, growth, kept, at.cost)
        return trial.updates(at), new

    return FromResiduals(init, update)
