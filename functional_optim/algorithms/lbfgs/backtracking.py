"""Backtracking line search.

Nocedal, Wright, "Numerical Optimization", 2nd ed. (2006), Algorithm 3.1; Armijo, "Minimization of
functions having Lipschitz continuous first partial derivatives", Pacific J. Math. 16 (1966).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.lbfgs.line_search import (
    Condition,
    Number,
    can_branch,
    decide,
    dot,
    negate,
    smaller,
    where,
)
from functional_optim.core import base
from functional_optim.core.base import GradientTransformation, apply_updates
from functional_optim.core.factory import factory
from functional_optim.core.ravel import Ravel


class BacktrackingState(NamedTuple):
    learning_rate: Tensor
    """The last step length, 0-dim."""


@factory
def scale_by_backtracking_linesearch(
    max_backtracking_steps: int = 20,
    slope_rtol: float = 1e-4,
    decrease_factor: float = 0.8,
    increase_factor: float = 1.5,
    max_learning_rate: float = 1.0,
) -> GradientTransformation:
    """Multiply a descent direction by the first step length that decreases the value enough.

    That is t with f(p + t u) ≤ f(p) + slope_rtol · t · gᵀu. The first trial is the last step length
    times `increase_factor`, each further one is smaller by `decrease_factor`. If all trials fail,
    the update is zero::

        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=fn)

    Put it at the end of a chain, after `scale(-1)`: its input must be a descent direction.

    Args:
        max_backtracking_steps: number of shorter steps to try, ≥ 0. After a failed search, the next
            one continues from the shortest step.
        slope_rtol: required fraction of the decrease that the slope predicts, in (0, 1). Default
            1e-4, Nocedal and Wright's.
        decrease_factor: in (0, 1). Default 0.8, optax's, as are the next two.
        increase_factor: ≥ 1. `math.inf` starts each search at `max_learning_rate`.
        max_learning_rate: the longest step, > 0.

    Extra arguments of `update`: `value`, f(params); `grad`, the gradients at params; `value_fn`,
    the function params → value. Alternatively `value_and_grad`, params → (value, gradients).
    Under torch.vmap and torch.compile all steps are tried, and masks keep the first good one.

    State: `learning_rate`.

    Raises:
        ValueError: for hyperparameters out of range; if a value is not a single number.
        TypeError: from update, without `value_fn` and `value_and_grad`.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.scale(-1), fo.scale_by_backtracking_linesearch())
        >>> def fn(x):
        ...     return 10 * (x * x).sum()
        >>> x = torch.tensor([1.0, 2.0])
        >>> g = 20 * x
        >>> u, state = tx.update(g, tx.init(x), x, value=fn(x), grad=g, value_fn=fn)
        >>> bool(fn(x + u) < fn(x)), round(float(state[1].learning_rate), 4)  # 0.8¹¹
        (True, 0.0859)
    """
    name = "scale_by_backtracking_linesearch"
    shares = {"slope_rtol": slope_rtol, "decrease_factor": decrease_factor}
    numeric.check_count(name, 0, max_backtracking_steps=max_backtracking_steps)
    numeric.check_range(name, "in (0, 1)", **shares)
    numeric.check_range(name, "of 1 or more", increase_factor=increase_factor)
    numeric.check_range(name, "positive", max_learning_rate=max_learning_rate)

    def init(params: Any) -> BacktrackingState:
        return BacktrackingState(Ravel(params).zeros() + 1)

    def update(
        updates: Any,
        state: BacktrackingState,
        params: Any = None,
        *,
        value: Any = base.NEEDED,
        grad: Any = base.NEEDED,
        value_fn: Callable[[Any], Any] | None = None,
        value_and_grad: Callable[[Any], tuple[Any, Any]] | None = None,
    ) -> tuple[Any, BacktrackingState]:
        base.check_needed(name, value=value, grad=grad)
        base.check_passed(params)
        fn = value_alone(value_fn, value_and_grad)
        flat = Ravel(params)
        u, last = flat.vector(updates), state.learning_rate
        start, slope = base.one_number(value, u), dot(flat.vector(grad), u)
        alone = can_branch(u, slope, last, start)

        def number(x: Tensor) -> Tensor:
            return x.reshape(()) if alone else x.reshape(1)

        def decreases(t: Number) -> Condition:
            f = base.one_number(fn(apply_updates(params, flat.tree(t * u, stored=False))), u)
            return decide(number(f) <= number(start) + slope_rtol * t * number(slope))

        longest = torch.full_like(number(last), max_learning_rate)
        t = smaller(number(last) * increase_factor, longest)
        found = decreases(t)
        for _ in range(max_backtracking_steps):
            if found is True:
                break
            t = where(found, t, t * decrease_factor)
            found = found | (negate(found) & decreases(t))
        kept = t.clamp(min=torch.finfo(t.dtype).tiny)  # zero would stay zero
        step = where(found, t * u, torch.zeros_like(u))
        return flat.tree(step, stored=False), BacktrackingState(kept.reshape(last.shape))

    return GradientTransformation(init, update)


def value_alone(
    value_fn: Callable[[Any], Any] | None, value_and_grad: Callable[[Any], tuple[Any, Any]] | None
) -> Callable[[Any], Any]:
    """The function params → value, from either of the extra arguments."""
    if value_fn is not None:
        return value_fn
    if value_and_grad is None:
        raise TypeError("backtracking needs value_fn, or value_and_grad, to try steps with.")
    return lambda params: value_and_grad(params)[0]
