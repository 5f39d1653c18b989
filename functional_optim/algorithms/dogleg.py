"""Powell's dogleg: Gauss–Newton steps within a trust region.

Powell, "A hybrid method for nonlinear equations" (1970); Nocedal, Wright, "Numerical Optimization",
2nd ed. (2006), Algorithm 4.1 and section 4.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.solvers import globalization, linear
from functional_optim.solvers.linear import Kind, norm
from functional_optim.solvers.steps import (
    FromResiduals,
    Scaling,
    check_scaling,
    here,
    number,
    scaled,
    tried,
    vector_view,
)


class DoglegState(NamedTuple):
    """n: number of parameters."""

    step: Tensor
    """Steps tried so far: 0-dim, int64."""
    radius: Tensor
    """Δ of the next step, in units of D: 0-dim, float64; 0 before the first."""
    scale: Tensor
    """D, the largest norm so far of each column of J, (n,), float64; 0 with `scaling=None`."""
    value: Tensor
    """Half the sum of squares before the last step: 0-dim, float64."""


@factory
def dogleg(
    radius: numeric.Number | None = None,
    linear_solver: Kind = "auto",
    scaling: Scaling | None = "jac",
) -> GradientTransformation:
    """Powell's dogleg: along the gradient, then to the Gauss–Newton step, within a radius Δ.

    One update tries one step: `update(None, state, params, residual_fn=fn)`. The update of a
    rejected step is −0.0, and Δ decreases. The matrix is decomposed without damping, so a rejected
    step would need no new decomposition; where J is nearly singular, `levenberg_marquardt` is the
    safer choice.

    Args:
        radius: Δ of the first step, in units of D, > 0. Default ‖D w‖, or 1 at w = 0.
        linear_solver: "auto" (the default): "kernel", in the space of the residuals, if there are
            fewer of them than parameters, else "cholesky"; or "qr", "cg", "lsmr". See
            `least_squares`.
        scaling: "jac" (the default): D is the largest norm so far of each column of J; with fewer
            residuals than parameters it is at least the root mean square of these norms. None: 1.
            "cg" and "lsmr", which have no columns, always use 1.

    State: `DoglegState`.

    Raises:
        ValueError: if radius is not above 0; for an unknown linear solver or scaling; from update,
            if residuals are not finite at params.
        TypeError: from update, without a `residual_fn`, or for complex parameters.

    Example::

        >>> import torch, functional_optim as fo
        >>> def fn(x):  # Rosenbrock's function
        ...     return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])
        >>> tx, x = fo.dogleg(), torch.tensor([-1.2, 1.0], dtype=torch.float64)
        >>> state = tx.init(x)
        >>> for _ in range(20):
        ...     updates, state = tx.update(None, state, x, residual_fn=fn)
        ...     x = fo.apply_updates(x, updates)
        >>> x
        tensor([1., 1.], dtype=torch.float64)
    """
    if callable(radius):
        raise TypeError("dogleg adapts its radius, so pass its initial value as a number.")
    if radius is not None:
        numeric.check(lambda x: x > 0.0, radius, "Invalid radius value: {}; it must be above 0")
    linear.check_kind(linear_solver)
    check_scaling(scaling)

    def init(params: Any) -> DoglegState:
        flat = vector_view("dogleg", params)
        one = number(flat, 1.0)
        first = torch.as_tensor(radius or 0.0, dtype=torch.float64, device=flat.device)
        return DoglegState(
            step=base.first_step(flat.leaves),
            radius=first * one,
            scale=flat.zeros(flat.size, dtype=torch.float64) * one,
            value=0 * one,
        )

    def update(
        grads: Any,
        state: DoglegState,
        params: Any = None,
        *,
        residual_fn: Any = base.NEEDED,
        **extra: Any,
    ) -> tuple[Any, DoglegState]:
        base.check_extra(extra, ("residual_fn",))
        at = here("dogleg", linear_solver, params, residual_fn)
        D, kept = scaled(scaling, at, state.scale)
        size = norm(D * at.x.to(torch.float64))
        first = torch.where(size > 0, size, 1.0)
        delta = torch.where(state.radius > 0, state.radius, first)
        p, _ = globalization.dogleg(at.kind, at.system, D, delta)
        trial = tried(at, residual_fn, p, p.isfinite().all())
        length = torch.where(trial.step.isfinite().all(), norm(D * trial.step), delta)
        delta = globalization.radius(delta, length, trial.ratio)
        return trial.updates(at), DoglegState(state.step + 1, delta, kept, at.cost)

    return FromResiduals(init, update)
