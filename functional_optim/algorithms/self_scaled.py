"""Self-scaled BFGS and Broyden: quasi-Newton methods with a dense inverse Hessian, for physics.

Al-Baali, "Numerical experience with a class of self-scaling quasi-Newton algorithms", J. Optim.
Theory Appl. 96 (1998), https://doi.org/10.1023/A:1022608410710; Urbán, Stefanou, Pons, "Unveiling
the optimization process of physics informed neural networks" (2024),
https://arxiv.org/abs/2405.04230; Kiyani et al., "Optimizing the optimizer for physics-informed
neural networks and Kolmogorov-Arnold networks" (2025), https://arxiv.org/abs/2501.16371.
`solvers/dense.py` has the updates, and `solvers/descent.py` the steps; this module extends them to
trees.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.lbfgs.batching import checked_value
from functional_optim.algorithms.lbfgs.line_search import can_branch
from functional_optim.algorithms.lbfgs.transform import (
    ValueAndGrad,
    check_function,
    flat_of,
    pair_of,
)
from functional_optim.core import base, modes
from functional_optim.core.base import GradientTransformation, check_grads
from functional_optim.core.factory import factory
from functional_optim.core.ravel import Ravel
from functional_optim.solvers import descent
from functional_optim.solvers.arguments import check_tolerances
from functional_optim.solvers.box import Box
from functional_optim.solvers.dense import DenseInverse
from functional_optim.solvers.implicit import has_tangent, is_derived
from functional_optim.solvers.objectives import number
from functional_optim.solvers.slots import RUNNING


class SSBFGSState(NamedTuple):
    """n: number of parameters."""

    n_iter: Tensor
    """Iterations so far: 0-dim, int64."""
    func_evals: Tensor
    """Evaluations so far, that of each `value` included: 0-dim, int64."""
    pairs: Tensor
    """Steps that H has learned from: 0-dim, int64."""
    inverse_hessian: Tensor
    """H, (n, n), float64."""


class SSBroydenState(NamedTuple):
    """The fields of `SSBFGSState`, with another name for H, by which loading tells them apart."""

    n_iter: Tensor
    func_evals: Tensor
    pairs: Tensor
    broyden_inverse_hessian: Tensor


SelfScaledState = SSBFGSState | SSBroydenState

STATES: dict[str, type[SelfScaledState]] = {"ssbfgs": SSBFGSState, "ssbroyden": SSBroydenState}
"""The state of each method: its matrix comes from the method's own updates."""


@factory
def ssbfgs(
    max_iter: int = 20,
    max_eval: int | None = None,
    tolerance_grad: float = 1e-7,
    tolerance_change: float = 0.0,
) -> GradientTransformation:
    """BFGS that scales its matrix down where it is too large: for physics-informed networks.

    After hundreds of steps it is orders of magnitude below BFGS and L-BFGS, as long as an n × n
    matrix fits in memory. One update makes up to `max_iter` iterations, each with a line search for
    the strong Wolfe conditions. It needs the objective function::

        updates, state = tx.update(grads, state, params, value=value, value_and_grad=fn)

    where `value, grads = fn(params)`. (torch.func.grad_and_value returns them in the opposite
    order.) The update is a constant for autograd: torch.func's transforms, which would take its
    derivative for 0, raise an error. Train in float64: float32 ends where differences
    of values are rounding errors. `minimize(method="ssbfgs")` runs until convergence, and takes
    bounds and batches.

    Args:
        max_iter: iterations in one update, ≥ 1. Default 20, that of `lbfgs`.
        max_eval: no iteration begins after so many evaluations in one update, the one given as
            `value` included, ≥ 1. The first always begins. Default 1.25 max_iter.
        tolerance_grad: end an update when no element of the gradient is larger, ≥ 0.
        tolerance_change: end an update when the value decreases by less than this value times
            max(|value|, 1), ≥ 0. Default 0, since losses in physics go far below 1.

    State: `SSBFGSState`. An iteration that finds no lower value resets H to the identity.

    Raises:
        ValueError: for values out of range; if the parameters have no elements; from
            update, if the value or the gradients are not finite at params, under torch.vmap, and
            where torch.func differentiates the update.
        TypeError: from update, without `value` and `value_and_grad`, if the latter does not return
            a number and gradients, and for a state of another transformation.

    Not for noisy gradients: mini-batches break both H and the line search.

    Papers: Al-Baali (1998), https://doi.org/10.1023/A:1022608410710; Urbán, Stefanou, Pons (2024),
    https://arxiv.org/abs/2405.04230, equation 11; Kiyani et al. (2025),
    https://arxiv.org/abs/2501.16371.

    Example::

        >>> import torch, functional_optim as fo
        >>> def rosenbrock(x):
        ...     return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2
        >>> def fn(x):
        ...     grad, value = torch.func.grad_and_value(rosenbrock)(x)
        ...     return value, grad
        >>> tx = fo.ssbfgs(max_iter=100)
        >>> x = torch.tensor([-1.2, 1.0], dtype=torch.float64)
        >>> value, grads = fn(x)
        >>> updates, state = tx.update(grads, tx.init(x), x, value=value, value_and_grad=fn)
        >>> fo.apply_updates(x, updates)
        tensor([1.0000, 1.0000], dtype=torch.float64)
    """
    return _self_scaled("ssbfgs", max_iter, max_eval, tolerance_grad, tolerance_change)


@factory
def ssbroyden(
    max_iter: int = 20,
    max_eval: int | None = None,
    tolerance_grad: float = 1e-7,
    tolerance_change: float = 0.0,
) -> GradientTransformation:
    """`ssbfgs` with an update between BFGS and DFP, with weights that adapt from step to step.

    In physics it often reaches lower losses than `ssbfgs`, at the same cost.

    Args:
        max_iter: see `ssbfgs`.
        max_eval: see there.
        tolerance_grad: see there.
        tolerance_change: see there.

    State: `SSBroydenState`.

    Raises:
        ValueError, TypeError: see `ssbfgs`.

    Papers: Al-Baali (1998), https://doi.org/10.1023/A:1022608410710; Urbán, Stefanou, Pons (2024),
    https://arxiv.org/abs/2405.04230, equations 13 to 23.

    Example::

        >>> import torch, functional_optim as fo
        >>> scales = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
        >>> def fn(x):
        ...     return 0.5 * (scales * x * x).sum(), scales * x
        >>> tx, x = fo.ssbroyden(), torch.ones(3, dtype=torch.float64)
        >>> value, grads = fn(x)
        >>> updates, state = tx.update(grads, tx.init(x), x, value=value, value_and_grad=fn)
        >>> bool(fn(fo.apply_updates(x, updates))[0] < 1e-12)
        True
    """
    return _self_scaled("ssbroyden", max_iter, max_eval, tolerance_grad, tolerance_change)


def _self_scaled(
    method: str, max_iter: int, max_eval: int | None, tolerance_grad: float,
    tolerance_change: float,
) -> GradientTransformation:  # fmt: skip
    numeric.check_count(method, 1, max_iter=max_iter)
    most = max_iter * 5 // 4 if max_eval is None else max_eval
    numeric.check_count(method, 1, max_eval=most)
    check_tolerances(tolerance_grad=tolerance_grad, tolerance_change=tolerance_change)

    def init(params: Any) -> SelfScaledState:
        flat = Ravel(params)
        eye = torch.eye(flat.size, dtype=torch.float64, device=flat.device)
        count = torch.zeros((), dtype=torch.int64, device=flat.device)
        return STATES[method](*[base.batched(x, flat.leaves) for x in (count, count, count, eye)])

    def update(
        grads: Any,
        state: SelfScaledState,
        params: Any = None,
        *,
        value: Tensor = base.NEEDED,
        value_and_grad: ValueAndGrad = base.NEEDED,
        **extra: Any,
    ) -> tuple[Any, SelfScaledState]:
        base.check_extra(extra, ("value", "value_and_grad"))
        check_function(method, value, value_and_grad)
        flat = flat_of(params, grads)
        checked_value(value, flat)
        _check_state(method, state, flat)
        x, g = flat.vector(params), flat.vector(grads)
        _check_plain(method, x, g, value)
        eps = torch.finfo(flat.dtype).eps
        rules = descent.DescentRules(
            method, tolerance_grad, tolerance_change, 10 * eps, eps, max_iter, sys.maxsize
        )

        as_before = base.recorded if torch.is_grad_enabled() else base.unrecorded

        def evaluate(point: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
            value, grads = pair_of(as_before(value_and_grad, flat.tree(point[0])))
            checked_value(value, flat)
            check_grads(params, grads)
            _check_plain(method, value, found := flat.vector(grads))
            return wide(value, found)

        at = descent.Iterate(x.detach().unsqueeze(0), *wide(value, g))
        return base.unrecorded(_run, rules, most, evaluate, at, state, flat)

    return GradientTransformation(init, update)


def wide(value: Any, grads: Tensor) -> tuple[Tensor, Tensor]:
    """A value and gradients of one problem: (1,) and (1, n), float64."""
    f = number(value).detach().reshape(1).to(grads.device, torch.float64)
    return f, grads.detach().unsqueeze(0).to(torch.float64)


def _run(
    rules: descent.DescentRules, most: int, evaluate: descent.Evaluate, at: descent.Iterate,
    state: SelfScaledState, flat: Ravel,
) -> tuple[Any, SelfScaledState]:  # fmt: skip
    """The iterations of one update."""
    data = descent.DescentData((), Box(None, None))
    model = DenseInverse(state[-1].unsqueeze(0), state.pairs.reshape(1))
    s = descent.begun(rules, evaluate, at, model, data)
    if int(s.status) == -1:
        raise ValueError(
            "the value, or its gradient, is not finite at these parameters; nothing was changed. "
            "Start from other parameters, or restore earlier ones."
        )
    spent = False
    while int(s.status) == RUNNING and not spent:
        before = s.nit
        s = descent.advance(rules, evaluate, s, data)
        spent = int(s.nfev) >= most and bool(s.nit > before)
    known = s.model
    assert isinstance(known, DenseInverse)
    new = type(state)(
        state.n_iter + s.nit[0], state.func_evals + s.nfev[0], known.pairs[0], known.H[0]
    )
    step = torch.where(s.at.x == at.x, -0.0, s.at.x - at.x)
    return flat.tree(step[0], stored=False), new


def _check_plain(method: str, *values: Any) -> None:
    """Raise ValueError for values of torch.vmap, and for those that torch.func, or forward mode,
    differentiates."""
    if torch.compiler.is_compiling():
        return
    inside = modes.transformed()
    if inside and not can_branch(*values):
        raise ValueError(
            f"{method} cannot run under torch.vmap, since its loop depends on values; for many "
            f"problems call minimize(method={method!r}, batched=True)."
        )
    lost = is_derived if inside else has_tangent
    if any(isinstance(x, Tensor) and lost(x) for x in values):
        raise ValueError(
            f"the update of {method} has no derivatives, but torch.func or forward mode "
            "differentiates its parameters, value or gradients; call lbfgs, or "
            f"minimize(method={method!r}), whose solution has derivatives with respect to args, or "
            "detach them if the derivative is to be 0."
        )


def _check_state(method: str, state: Any, flat: Ravel) -> None:
    """Raise an error unless the state has this type and matches the parameters."""
    if not isinstance(state, STATES[method]):
        raise TypeError(
            f"update of {method} got a state of type {type(state).__name__}; pass the state that "
            "this transformation's own init returned, in this order: update(grads, state, params)."
        )
    if state[-1].shape != (flat.size, flat.size):
        raise ValueError(
            f"update got a state for {state[-1].shape[-1]} parameters, but there are "
            f"{flat.size}; pass the state that {method}'s init returned for these parameters."
        )
