"""`root`: solutions of as many equations as unknowns, for one problem or a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core.ravel import Ravel
from functional_optim.solvers import broyden, newton, programs
from functional_optim.solvers.arguments import check_tolerances, checked
from functional_optim.solvers.given import (
    SolverInput,
    as_args,
    check_compile,
    count_of,
    ending,
    first_value,
    solver_input,
)
from functional_optim.solvers.implicit import ProblemFunction, corrected_root
from functional_optim.solvers.least_squares import least_squares
from functional_optim.solvers.problems import Problem
from functional_optim.solvers.residuals import as_vector
from functional_optim.solvers.watching import IntermediateResult, IterateHistory, Watch

Method = Literal["newton", "lm", "broyden"]
METHODS = ("newton", "lm", "broyden")
XTOL = 1.49012e-8
MESSAGES = {
    -3: "The callback stopped the search.",
    -2: "No progress: no step brings the values nearer to zero.",
    -1: "The function or its Jacobian is not finite.",
    0: "The maximum number of function evaluations is exceeded.",
    1: "The values are zero.",
    3: "`xtol` termination condition is satisfied.",
}


Found: TypeAlias = newton.NewtonProgress | broyden.BroydenProgress


class Root(NamedTuple):
    """The result of `root`. With `batched=True` all fields have a leading dimension.

    Example::

        >>> import torch, functional_optim as fo
        >>> found = fo.root(lambda x: x**2 - 4, torch.ones((), dtype=torch.float64))
        >>> found.x, found.status, found.success
        (tensor(2.0000, dtype=torch.float64), 3, True)
    """

    x: Any
    """The solution, a tree like x0."""
    fun: Tensor
    """The function's values at x: (n,)."""
    nfev: Any
    """Evaluations of the function: an int, or a tensor (B,)."""
    njev: Any
    """Evaluations of the Jacobian."""
    nit: Any
    """Iterations: accepted steps, with "lm" tried steps."""
    status: Any
    """1 values are zero, 3 xtol, 0 max_nfev, −1 not finite, −2 no progress, −3 stopped by the
    callback."""
    success: Any
    """Whether status is above 0: a bool, or a bool tensor (B,)."""
    message: Any
    """The description of the status: a string, or a list of them."""
    history: IterateHistory | None
    """All iterates, with `return_history=True`."""


@checked
def root(
    fun: Callable[..., Any],
    x0: Any,
    args: tuple[Any, ...] = (),
    *,
    method: Method = "newton",
    xtol: float = XTOL,
    max_nfev: int | None = None,
    batched: bool = False,
    compile: bool = False,
    implicit: bool = True,
    callback: Callable[[IntermediateResult], Any] | None = None,
    return_history: bool = False,
) -> Root:
    """Solve as many equations as there are unknowns, as scipy.optimize.root does.

    Jacobians come from torch.func. With `batched=True` many problems are solved in a batch. A fixed
    point of g is a root of x − g(x).

    Args:
        fun: `fun(x, *args)` returns the values of ONE problem to be made zero, as many as x has
            elements: a real tensor of any shape, or a tree of such.
        x0: the starting point: a tree of real tensors. The solution has its dtype; linear problems
            are solved in float64.
        args: a tuple of trees of tensors for fun. The solution is differentiable with respect to
            them.
        method: "newton" (the default), Newton's method with a line search; "lm",
            Levenberg–Marquardt on the sum of squares, for distant starting points; "broyden", for
            expensive functions, evaluates the Jacobian at the start, if it makes no progress, and
            at the end, and updates it from values in between.
        xtol: stop after a step that changes no unknown by more than this share of it, ≥ 0, but at
            least 10 eps of x0's dtype; with "lm" after one that is shorter than this times the norm
            of x, in units of the scales. If rounding hides smaller changes, a step is compared with
            the largest unknown. Default: that of scipy's "hybr".
        max_nfev: maximum number of evaluations of each problem, ≥ 1. Default 100 (n + 1).
        batched: every leaf of x0 and args has a leading dimension of independent problems. Put
            shared values into fun's closure. fun runs under torch.vmap.
        compile: record a step for one problem, and compile a library of C++ that solves all
            problems, eight at a time (`batched`, on CPUs). The first call takes 0.4 to 2 s, later
            ones a tenth of the time of eager steps. Libraries are cached for the same fun, which is
            recorded again at each call, so that changes of its closure are seen.
            On GPUs, and where fun has operations without C++, torch.compile compiles fun with its
            derivatives. Inside torch.func's transforms all runs eagerly.
        implicit: make x differentiable with respect to args, up to second derivatives, by the
            implicit function theorem, in plain autograd and in torch.func. Problems that have not
            converged are constant.
        callback: called as `callback(intermediate_result)` after each iteration; in a batch after
            each evaluation in which one of the problems has made an iteration. It stops the search
            by raising StopIteration or returning True, single problems of a batch by returning a
            bool tensor (B,). See `minimize`.
        return_history: store all iterates in `history`, which needs memory.

    Returns:
        `Root`, with scipy's fields. A minimum of the sum of squares that is not a root has status
        −2.

    Raises:
        TypeError: if fun is not callable or does not return real tensors; for complex or integer
            x0, for half types next to wider ones in x0 and, in a batch, for args that are not
            tensors.
        ValueError: for an unknown method; values out of range; another number of values than
            unknowns; sizes that do not match; under torch.vmap; and, for one problem, if values or
            their Jacobian are not finite at x0. In a batch such a problem has status −1.

    Exceptions of fun are not caught.

    The result of a problem does not depend on the other problems of a batch, bitwise, if the values
    of fun do not.

    Papers: Dennis, Schnabel, "Numerical Methods for Unconstrained Optimization and Nonlinear
    Equations" (1983), https://doi.org/10.1137/1.9781611971200, section 6.5; Broyden, "A class of
    methods for solving nonlinear simultaneous equations" (1965),
    https://doi.org/10.1090/S0025-5718-1965-0198670-6.

    Example::

        >>> import torch, functional_optim as fo
        >>> def kepler(E, M, e):
        ...     return E - e * torch.sin(E) - M
        >>> M, e = torch.tensor([0.5, 1.0, 2.0]).double(), torch.full((3,), 0.6).double()
        >>> found = fo.root(kepler, M, (M, e), batched=True)
        >>> found.x.round(decimals=4).tolist(), found.success.tolist()
        ([1.0072, 1.5997, 2.4037], [True, True, True])
    """
    if not callable(fun):
        raise TypeError(
            f"root takes a function that returns values first, but got a {type(fun).__name__}."
        )
    args = as_args("root", args)
    check_compile(compile=compile, batched=batched)
    _check_choices(method, xtol, max_nfev)
    taken = solver_input("root", fun, x0, args, batched=batched)
    flat, one = taken.flat, taken.one
    first = first_value("root", fun, as_vector, one, taken.x, taken.args, batched=batched)
    _check_square(as_vector(first).numel(), one.size)
    problem = Problem(taken.fun, one, one.size, batched=batched)
    floor = 10 * torch.finfo(flat.dtype).eps
    rules = newton.NewtonRules(max(xtol, floor), floor, max_nfev or 100 * (one.size + 1))
    watch = Watch(
        callback, history=return_history, look=_seen, flat=flat, x=taken.x, batched=batched
    )
    if method == "lm":
        how = {"compile": compile, "callback": callback, "return_history": return_history}
        found, history = _by_squares(fun, taken, rules, problem, how)
    else:
        known = newton if method == "newton" else broyden
        size = (problem.m + 1) * problem.m
        found = programs.run(
            method, known, rules, problem, taken.x, taken.own, taken.own, watch.seer, size,
            compile=compile,
        )  # fmt: skip
        history = watch.history()
    if not batched and int(found.status) == -1:
        raise ValueError(
            "the function's values, or their Jacobian, are not finite at x0; start elsewhere."
        )
    solution = found.x
    if implicit and args:
        function = ProblemFunction(
            lambda params, *own: as_vector(fun(params, *own)), one, batched=batched
        )
        solution = corrected_root(function, found.x, args, found.status > 0)
    return _result(found, solution, flat, history, batched=batched)


def _seen(s: Found) -> tuple[Tensor, Tensor]:
    return s.x, 0.5 * (s.F * s.F).sum(-1)


def _by_squares(
    fun: Callable[..., Any], taken: SolverInput, rules: newton.NewtonRules, problem: Problem,
    how: dict[str, Any],
) -> tuple[newton.NewtonProgress, IterateHistory | None]:  # fmt: skip
    """The least sum of squares, which must be a root: Newton's next step is short there, or, as
    a singular Jacobian has no such step, values are what a change of x by xtol can cause."""
    found = least_squares(
        fun, taken.x0, taken.args, ftol=0.0, xtol=rules.xtol, gtol=0.0, max_nfev=rules.max_nfev,
        batched=problem.batched, implicit=False, **how,
    )  # fmt: skip
    with torch.no_grad():
        x = taken.flat.vector(found.x).reshape(-1, problem.m)
        F, columns = newton.evaluated(problem, x, taken.own)
        p = newton.solved(columns, -F)
        zero = (F == 0).all(-1)
        near, size = math.sqrt(rules.xtol), x.abs().maximum(taken.x.abs())
        of_largest = torch.where(taken.x == 0, near, 0.0) * size.amax(-1, keepdim=True)
        short = (p.abs() <= near * size.maximum(of_largest).to(p.dtype)).all(-1)
        good = short | newton.is_rounding(F, columns, x, rules.xtol)
        status = torch.as_tensor(found.status, device=x.device).reshape(-1)
        status = torch.where(status > 0, torch.where(zero, 1, torch.where(good, 3, -2)), status)
        counts = (found.nfev, found.njev, found.nit)
        count = [torch.as_tensor(n, device=x.device).reshape(-1) for n in counts]
    return newton.NewtonProgress(x, F, x.abs(), p, F[:, 0], F[:, 0], status, *count), found.history


def _result(
    found: Found, solution: Tensor, flat: Ravel, history: IterateHistory | None, *, batched: bool
) -> Root:

    count = partial(count_of, batched=batched)
    return Root(
        flat.tree(solution if batched else solution[0]),
        found.F if batched else found.F[0],
        count(found.nfev),
        count(found.njev),
        count(found.nit),
        *ending(found.status, MESSAGES, batched=batched),
        history,
    )


def _check_choices(method: Any, xtol: float, max_nfev: int | None) -> None:
    """Raise ValueError for unknown names, and values out of range."""
    if method not in METHODS:
        raise ValueError(
            f"unknown method {method!r}; choose one of {', '.join(map(repr, METHODS))}."
        )
    check_tolerances(xtol=xtol)
    if max_nfev is not None:
        numeric.check_count("root", 1, max_nfev=max_nfev)


def _check_square(m: int, n: int) -> None:
    """Raise ValueError unless there are as many values as unknowns."""
    if m != n:
        raise ValueError(
            f"root needs as many values as unknowns, but the function returned {m} for {n}; use "
            "least_squares for another number."
        )
