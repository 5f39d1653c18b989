"""`least_squares`: the minimum of a sum of squares, of one problem or of many at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core.ravel import Ravel
from functional_optim.solvers import linear, loop, programs
from functional_optim.solvers.arguments import check_tolerances, checked
from functional_optim.solvers.given import (
    as_args,
    check_compile,
    checked_bounds,
    count_of,
    ending,
    first_value,
    mask_tree,
    of_each,
    solver_input,
)
from functional_optim.solvers.implicit import Cost, ProblemFunction, corrected, followed
from functional_optim.solvers.losses import check_loss
from functional_optim.solvers.problems import Problem
from functional_optim.solvers.residuals import as_vector
from functional_optim.solvers.underived import warn_of_underived
from functional_optim.solvers.watching import IntermediateResult, IterateHistory, Watch

Method = Literal["lm", "dogleg", "trf"]
METHODS = ("lm", "dogleg", "trf")
MESSAGES = {
    -3: "The callback stopped the search.",
    -2: "No progress: steps became too short to change x.",
    -1: "Residuals or their Jacobian are not finite.",
    0: "The maximum number of function evaluations is exceeded.",
    1: "`gtol` termination condition is satisfied.",
    2: "`ftol` termination condition is satisfied.",
    3: "`xtol` termination condition is satisfied.",
    4: "Both `ftol` and `xtol` termination conditions are satisfied.",
}


class Result(NamedTuple):
    """The result of `least_squares`. With `batched=True` all fields have a leading dimension.

    Example::

        >>> import torch, functional_optim as fo
        >>> found = fo.least_squares(lambda x: x - 3, torch.zeros(2, dtype=torch.float64))
        >>> found.x, found.nfev, found.success
        (tensor([3.0000, 3.0000], dtype=torch.float64), 5, True)
    """

    x: Any
    """The solution, a tree like x0."""
    cost: Tensor
    """Half the sum of squares, or of the robust loss: 0-dim, float64. x, cost and fun have
    derivatives; other fields are constant."""
    fun: Tensor
    """Residuals at x: (m,)."""
    grad: Any
    """Gradient of the cost, a tree like x0."""
    optimality: Tensor
    """Largest element of the projected gradient: 0-dim, float64."""
    active_mask: Any
    """For each element −1 at its lower bound, 1 at its upper one, else 0; a tree like x0, int64."""
    nfev: Any
    """Evaluations of the residuals: an int, or a tensor (B,)."""
    njev: Any
    """Evaluations of the Jacobian."""
    nit: Any
    """Number of tried steps."""
    status: Any
    """1 gtol, 2 ftol, 3 xtol, 4 ftol and xtol, 0 max_nfev, −1 not finite, −2 no progress, −3
    stopped by the callback."""
    success: Any
    """Whether status is above 0: a bool, or a bool tensor (B,)."""
    message: Any
    """The description of the status: a string, or a list of them."""
    history: IterateHistory | None
    """All iterates, with `return_history=True`."""


@checked
def least_squares(
    fun: Callable[..., Any],
    x0: Any,
    args: tuple[Any, ...] = (),
    *,
    bounds: tuple[Any, Any] | None = None,
    method: Method = "lm",
    ftol: float = 1e-8,
    xtol: float = 1e-8,
    gtol: float = 1e-8,
    x_scale: Any = "jac",
    loss: str = "linear",
    f_scale: float = 1.0,
    max_nfev: int | None = None,
    linear_solver: linear.Kind = "auto",
    batched: bool = False,
    compile: bool = False,
    implicit: bool = True,
    callback: Callable[[IntermediateResult], Any] | None = None,
    return_history: bool = False,
) -> Result:
    """Minimize ½ Σ r(x)², or a robust loss of r, as scipy.optimize.least_squares does.

    Derivatives come from torch.func. With `batched=True` many problems are solved in a batch: each
    has separate steps, and converged ones do not wait for the slowest.

    Args:
        fun: `fun(x, *args)` returns the residuals of ONE problem: a real tensor of any shape, or a
            tree of such. Without args also a result of `per_sample` or `stack_residuals`.
        x0: the starting point: a tree of real tensors. The solution has its dtype; costs, norms and
            linear problems are computed in float64.
        args: a tuple of trees of tensors for fun. The solution is differentiable with respect to
            them.
        bounds: `(lower, upper)`: each None, a number, a tensor like x0, or a tree like x0 whose
            leaves may be None. They select the method "trf". fun is never evaluated outside the
            bounds: tensors with more digits than x0 are rounded inwards.
        method: "lm", Levenberg–Marquardt with Nielsen's damping (the default); "dogleg", Powell's
            trust region; "trf", the method for bounds. Unlike scipy's "trf", it takes
            Levenberg–Marquardt steps of the free parameters, truncated at the bounds (Kanzow,
            Yamashita, Fukushima, 2004, https://doi.org/10.1016/j.cam.2004.02.013), so a solution
            may be exactly at a bound.
        ftol: stop after an accepted step if the actual and the predicted relative decrease of the
            cost are below this. Tolerances are at least 10 eps of x0's dtype. Defaults: scipy's.
        xtol: stop if a step is shorter than this times the norm of x, in units of the scales.
        gtol: stop if no element of the projected gradient is larger, and r is as orthogonal to the
            columns of J.
        x_scale: sizes of the parameters: a number, a tensor or a tree like x0. "jac" (the default):
            1 over the largest norm so far of each column of J, as in MINPACK; 1 where J is not
            stored (see linear_solver).
        loss: "linear", "soft_l1", "huber", "cauchy" or "arctan": scipy's.
        f_scale: the size of a residual above which a robust loss reduces its weight, > 0.
        max_nfev: maximum number of evaluations of each problem, ≥ 1. Default 100 n, scipy's.
        linear_solver: "auto" (the default): "kernel" for fewer residuals than parameters, else
            "cholesky". "qr" does not square the condition of J. "cg" and "lsmr" do not store the
            Jacobian of a single problem. Bounds need "cholesky".
        batched: every leaf of x0 and args has a leading dimension of independent problems. Put
            shared values into fun's closure. fun runs under torch.vmap. Bounds may be shared or
            have that dimension, too.
        compile: record a step for one problem, and compile a library of C++ that solves all
            problems, eight at a time (`batched`, on CPUs). The first call takes 0.4 to 2 s, later
            ones a tenth of the time of eager steps. Libraries are cached for the same fun, which is
            recorded again at each call, so that changes of its closure are seen.
            On GPUs, and where fun has operations without C++, torch.compile compiles the step,
            which takes ten seconds or more. Inside torch.func's transforms all runs eagerly.
        implicit: make x differentiable with respect to args, up to second derivatives, by the
            implicit function theorem, in plain autograd and in torch.func. Parameters at a bound,
            and problems that have not converged, are constant.
        callback: called as `callback(intermediate_result)` after each iteration, as by scipy; in a
            batch after each step of all. It stops the search by raising StopIteration or returning
            True, single problems of a batch by returning a bool tensor (B,). See `minimize`.
        return_history: store all iterates in `history`, which needs memory.

    Returns:
        `Result`, with scipy's fields, except for `jac`.

    Raises:
        TypeError: if fun is not callable or does not return real tensors; for complex or integer
            x0, for half types next to wider ones in x0 and, in a batch, for args that are not
            tensors.
        ValueError: for an unknown method, loss or linear solver; lower bounds above upper ones; an
            x0 outside the bounds; sizes that do not match; under torch.vmap; and, for one problem,
            if residuals or their Jacobian are not finite at x0. In a batch such a problem has
            status −1.

    Exceptions of fun are not caught. A `RuntimeWarning` names parameters of a single problem that
    never moved and have derivative 0, although the value changes with them: fun reads their values,
    e.g. by `item()`. The search takes them for constants.

    The result of a problem does not depend on the other problems of a batch, bitwise, if the values
    of fun do not: a product with a shared matrix is one product of all problems, and may round
    differently in batches of other sizes.

    Papers: Moré, "The Levenberg-Marquardt algorithm: Implementation and theory" (1978),
    https://doi.org/10.1007/BFb0067700; Nielsen, "Damping parameter in Marquardt's method" (1999).

    Example::

        >>> import torch, functional_optim as fo
        >>> t = torch.linspace(0, 3, 20, dtype=torch.float64)
        >>> def fun(x, y):
        ...     return x["a"] * torch.exp(-x["rate"] * t) - y
        >>> one = torch.ones(2, dtype=torch.float64)  # two curves at once
        >>> y = torch.stack([3 * torch.exp(-2 * t), 2 * torch.exp(-0.5 * t)])
        >>> found = fo.least_squares(fun, {"a": one, "rate": one}, (y,), batched=True)
        >>> found.x["rate"], found.success
        (tensor([2.0000, 0.5000], dtype=torch.float64), tensor([True, True]))
    """
    if not callable(fun):
        raise TypeError(
            f"least_squares takes a function that returns residuals first, but got a "
            f"{type(fun).__name__}."
        )
    args = as_args("least_squares", args)
    _check_choices(method, bounds, linear_solver, batched=batched, compile=compile)
    others = bounds, x_scale, f_scale
    taken = solver_input("least_squares", fun, x0, args, *others, batched=batched)
    flat, one, x, (limits, scale, _) = taken.flat, taken.one, taken.x, taken.others
    known_loss = check_loss(loss, f_scale)
    most = 100 * one.size if max_nfev is None else max_nfev
    numeric.check_count("least_squares", 1, max_nfev=most)
    check_tolerances(ftol=ftol, xtol=xtol, gtol=gtol)
    box, x = checked_bounds(limits, flat, x)
    D = _scales(scale, flat, x)
    method = "trf" if box.exists else method
    first = first_value("least_squares", fun, as_vector, one, x, taken.args, batched=batched)
    m = as_vector(first).numel()
    shape = first.shape if isinstance(first, Tensor) else (m,)
    kind = "cholesky" if method == "trf" else linear.choose(linear_solver, one.size, m)
    problem = Problem(taken.fun, one, m, batched=batched, matrix_free=kind in ("cg", "lsmr"))
    eps = 10 * torch.finfo(flat.dtype).eps
    ftol, xtol, gtol = (max(t, eps) for t in (ftol, xtol, gtol))
    scaled = isinstance(scale, str)
    rules = loop.Rules(method, kind, known_loss, ftol, xtol, gtol, eps, most, scaled)
    data = loop.Data(taken.own, box, D)
    watch = Watch(
        callback, history=return_history, look=lambda s: (s.x, s.cost), flat=flat, x=x,
        batched=batched,
    )  # fmt: skip
    name, size = ("least_squares", m), (one.size + 1) * m
    found = programs.run(
        name, loop, rules, problem, x, taken.own, data, watch.seer, size, compile=compile,
        whole=True,
    )  # fmt: skip
    if not batched and int(found.status) == -1 and int(found.nfev) == 1:
        raise ValueError(
            "residuals, the sum of their squares, or their Jacobian, are not finite at x0; start "
            "elsewhere, bound the parameters to the domain of the function, or divide large "
            "residuals by a constant."
        )
    costs = Cost(fun, one, known_loss, batched=batched)
    if not batched:
        warn_of_underived(
            "least_squares", lambda p: costs(p, taken.args), flat, box, (x, found.x), found.g
        )
    solution, r, cost = found.x, found.r, found.cost
    if implicit and args:
        fixed = loop.outward(found.x, found.g, data) | box.fixed(found.x)
        usable = found.status > 0
        residuals = ProblemFunction(
            lambda params, *own: as_vector(fun(params, *own)), one, batched=batched
        )
        solution = corrected(costs, found.x, args, fixed, usable)
        r = followed(residuals, r, solution, args, usable)
        cost = followed(costs, cost, solution, args, usable)
    found = found._replace(r=r, cost=cost)
    return _result(found, solution, flat, data, shape, watch.history(), batched=batched)


def _result(
    found: loop.Progress, solution: Tensor, flat: Ravel, data: loop.Data, shape: tuple[int, ...],
    history: IterateHistory | None, *, batched: bool,
) -> Result:  # fmt: skip
    def as_tree(vector: Tensor, *, stored: bool = False) -> Any:
        return flat.tree(vector if batched else vector[0], stored=stored)

    free = torch.where(loop.outward(found.x, found.g, data), 0.0, found.g)
    count = partial(count_of, batched=batched)
    residuals = found.r.reshape(-1, *shape) if len(shape) != 1 else found.r
    return Result(
        as_tree(solution, stored=True),
        found.cost if batched else found.cost[0],
        residuals if batched else residuals[0],
        as_tree(found.g),
        free.abs().amax(-1) if batched else free.abs().amax(),
        mask_tree(flat, data.box.sides(found.x), batched=batched),
        count(found.nfev),
        count(found.njev),
        count(found.nit),
        *ending(found.status, MESSAGES, batched=batched),
        history,
    )


# ---------------------------------------------------------------- checks


def _check_choices(
    method: Any, bounds: Any, linear_solver: Any, *, batched: bool, compile: bool
) -> None:
    """Raise ValueError for unknown names and unsupported combinations."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of 'lm', 'dogleg', 'trf'.")
    linear.check_kind(linear_solver)
    if bounds is not None and method == "dogleg":
        raise ValueError(
            "method 'dogleg' does not support bounds; leave the method out to use 'trf', or leave "
            "out the bounds."
        )
    bounded = bounds is not None or method == "trf"
    if bounded and linear_solver not in ("auto", "cholesky"):
        raise ValueError(
            f"method 'trf' solves by 'cholesky', but got linear_solver={linear_solver!r}; leave it "
            "out."
        )
    check_compile(compile=compile, batched=batched)


def _scales(given: Any, flat: Ravel, x: Tensor) -> Tensor:
    """D, (B, n), float64: 1 over `x_scale`."""
    if isinstance(given, str):
        if given != "jac":
            raise ValueError(f"unknown x_scale {given!r}; pass 'jac', numbers or tensors.")
        return torch.zeros_like(x, dtype=torch.float64)
    sizes = of_each("x_scale", given, flat, x, 1.0)
    if not bool(((sizes > 0) & sizes.isfinite()).all()):
        raise ValueError("x_scale must be above 0 and finite for each parameter.")
    return 1 / sizes
