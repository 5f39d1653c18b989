"""Gauss–Newton: steps of Newton's method for a sum of squares, without second derivatives.

Nocedal, Wright, "Numerical Optimization", 2nd ed. (2006), section 10.3; with damping Levenberg, "A
method for the solution of certain non-linear problems in least squares" (1944). The step is that of
the natural gradient for Gaussian residuals.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base, modes
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.solvers import linear
from functional_optim.solvers.linear import Kind
from functional_optim.solvers.steps import FromResiduals, Here, here, number, vector_view
from functional_optim.transforms.scaling import scale_by_lr


class GaussNewtonState(NamedTuple):
    step: Tensor
    """Steps so far: 0-dim, int64."""
    value: Tensor
    """Half the sum of squares before the last step: 0-dim, float64."""


@factory
def scale_by_gauss_newton(
    damping: numeric.Hyper = 0.0, linear_solver: Kind = "auto"
) -> GradientTransformation:
    """The direction of Gauss and Newton: (JᵀJ + λ)⁻¹ Jᵀr.

    A part of a chain: add a learning rate after it, such as `scale_by_lr`. It ignores gradients:
    `update(None, state, params, residual_fn=fn)`.

    Args:
        damping: λ, ≥ 0: a number, a 0-dim tensor or a schedule. Default 0, for residuals that
            determine all parameters.
        linear_solver: "auto" (the default): "kernel", in the space of the residuals, if there are
            fewer of them than parameters, else "cholesky"; or "qr", "cg", "lsmr". See
            `least_squares`.

    State: `GaussNewtonState`.

    Raises:
        ValueError: for a negative number or an unknown linear solver; from update, if residuals are
            not finite or do not determine the step. In a traced update that step is −0.0.
        TypeError: from update, without a `residual_fn`, or for complex parameters.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.scale_by_gauss_newton(), fo.scale_by_lr(1.0))
        >>> A, b = torch.tensor([[2.0, 0.0], [0.0, 4.0], [1.0, 1.0]]), torch.tensor([2.0, 8.0, 3.0])
        >>> w = torch.zeros(2)
        >>> tx.update(None, tx.init(w), w, residual_fn=lambda w: A @ w - b)[0]
        tensor([1., 2.])
    """
    numeric.check_range(None, "of 0 or more", damping=damping)
    linear.check_kind(linear_solver)

    def init(params: Any) -> GaussNewtonState:
        flat = vector_view("gauss_newton", params)
        return GaussNewtonState(base.first_step(flat.leaves), number(flat, 0.0))

    def update(
        grads: Any,
        state: GaussNewtonState,
        params: Any = None,
        *,
        residual_fn: Any = base.NEEDED,
        **extra: Any,
    ) -> tuple[Any, GaussNewtonState]:
        base.check_extra(extra, ("residual_fn",))
        at = here("gauss_newton", linear_solver, params, residual_fn)
        t = state.step + 1
        now = numeric.at(damping, t.to(torch.float64))
        mu = torch.as_tensor(now, dtype=torch.float64, device=at.x.device)
        p, found = linear.solve(at.kind, at.system, mu, torch.ones_like(at.diagonal))
        if not modes.traced() and not bool(found):
            raise ValueError(_singular(at))
        u = torch.where(found, -p, -0.0).to(at.x.dtype)
        return at.flat.tree(u, stored=False), GaussNewtonState(t, at.cost)

    return FromResiduals(init, update)


def _singular(at: Here) -> str:
    """That a linear solver found no step, and what to do."""
    matrix, advice = "JᵀJ", "Set damping above 0"
    if at.kind == "kernel":
        matrix = "JJᵀ"
        if at.system.r.numel() > at.flat.size:
            advice = "Choose another linear_solver, since there are more residuals than parameters"
    return (
        f"linear_solver {at.kind!r} finds no step, since {matrix} is singular; no parameter was "
        f"changed. {advice}, or use levenberg_marquardt."
    )


@factory
def gauss_newton(
    lr: numeric.Hyper = 1.0, damping: numeric.Hyper = 0.0, linear_solver: Kind = "auto"
) -> GradientTransformation:
    """Gauss–Newton: w ← w − η (JᵀJ + λ)⁻¹ Jᵀr.

    Call `update(None, state, params, residual_fn=fn)`, where `fn(params)` returns residuals, or is
    made by `per_sample` or `stack_residuals`. Every step is taken; `levenberg_marquardt` and
    `dogleg` reject steps that increase the loss.

    Args:
        lr: η, ≥ 0. Default 1, which is the full step.
        damping: λ, ≥ 0. Default 0; for networks, which have more parameters than their residuals
            determine, 1e-6 to 1e-2, or a decreasing schedule. linear_solver: as in
            `scale_by_gauss_newton`.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `GaussNewtonState`, and that of `scale_by_lr`.

    Raises:
        ValueError, TypeError: as `scale_by_gauss_newton`.

    Example::

        >>> import torch, functional_optim as fo
        >>> t = torch.linspace(0, 2, 9)
        >>> fn = fo.per_sample(lambda p, t, y: torch.exp(-p["b"] * t) - y, t, torch.exp(-0.7 * t))
        >>> tx, params = fo.gauss_newton(), {"b": torch.tensor(0.5)}
        >>> state = tx.init(params)
        >>> for _ in range(5):
        ...     updates, state = tx.update(None, state, params, residual_fn=fn)
        ...     params = fo.apply_updates(params, updates)
        >>> params
        {'b': tensor(0.7000)}
    """
    return chain(scale_by_gauss_newton(damping, linear_solver), scale_by_lr(lr))
