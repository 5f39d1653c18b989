"""`minimize`: the minimum of a smooth function, of one problem or of many at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import modes
from functional_optim.core.ravel import Ravel
from functional_optim.solvers import descent, programs
from functional_optim.solvers.arguments import check_tolerances, checked
from functional_optim.solvers.dense import DENSE
from functional_optim.solvers.given import (
    as_args,
    check_compile,
    checked_bounds,
    count_of,
    ending,
    first_value,
    mask_tree,
    solver_input,
)
from functional_optim.solvers.implicit import ProblemFunction, corrected, followed
from functional_optim.solvers.objectives import Objective, number
from functional_optim.solvers.quadratics import HISTORY
from functional_optim.solvers.underived import warn_of_underived
from functional_optim.solvers.watching import IntermediateResult, IterateHistory, Watch

Method = Literal["l-bfgs-b", "bfgs", "ssbfgs", "ssbroyden", "newton-cg"]
METHODS = ("l-bfgs-b", "bfgs", "ssbfgs", "ssbroyden", "newton-cg")
INSTEAD = {
    **dict.fromkeys(("nelder-mead", "powell"), "call functional_optim.search.cma_es"),
    **dict.fromkeys(("dogleg", "trust-ncg", "trust-exact", "trust-krylov"), "pass 'newton-cg'"),
}
"""What to do instead, for methods of scipy."""
FTOL = 2.220446049250313e-9
MESSAGES = {
    -3: "The callback stopped the search.",
    -2: "No progress: no step of the line search lowered the function.",
    -1: "The function or its gradient is not finite.",
    0: "The maximum number of iterations or function evaluations is exceeded.",
    1: "`gtol` termination condition is satisfied.",
    2: "`ftol` termination condition is satisfied.",
}


class Minimum(NamedTuple):
    """The result of `minimize`. With `batched=True` all fields have a leading dimension.

    Example::

        >>> import torch, functional_optim as fo
        >>> found = fo.minimize(lambda x: (x - 3).square().sum(), torch.zeros(2).double())
        >>> found.x, found.status, found.success
        (tensor([3.0000, 3.0000], dtype=torch.float64), 1, True)
    """

    x: Any
    """The solution, a tree like x0."""
    fun: Tensor
    """The function's value at x: 0-dim, float64. It has derivatives where x has them; other fields
    are constant."""
    grad: Any
    """Its gradient, a tree like x0."""
    optimality: Tensor
    """Largest element of the projected gradient x − P(x − g): 0-dim, float64."""
    active_mask: Any
    """For each element −1 at its lower bound, 1 at its upper one, else 0; a tree like x0, int64."""
    nfev: Any
    """Evaluations of the function, each with its gradient: an int, or a tensor (B,). It does not
    include those of "newton-cg" for products with the Hessian, one in each iteration."""
    njev: Any
    """The same number."""
    nit: Any
    """Iterations: accepted steps."""
    status: Any
    """1 gtol, 2 ftol, 0 maxiter or max_nfev, −1 not finite, −2 no progress, −3 stopped by the
    callback. (scipy has 0 for success.)"""
    success: Any
    """Whether status is above 0: a bool, or a bool tensor (B,)."""
    message: Any
    """The description of the status: a string, or a list of them."""
    nhev: Any
    """Products with the Hessian, of "newton-cg"; 0 for other methods."""
    history: IterateHistory | None
    """All iterates, with `return_history=True`."""


@checked
def minimize(
    fun: Callable[..., Any],
    x0: Any,
    args: tuple[Any, ...] = (),
    *,
    method: Method | None = None,
    bounds: tuple[Any, Any] | None = None,
    gtol: float = 1e-5,
    ftol: float = FTOL,
    maxiter: int | None = None,
    max_nfev: int | None = None,
    batched: bool = False,
    compile: bool = False,
    implicit: bool = True,
    callback: Callable[[IntermediateResult], Any] | None = None,
    return_history: bool = False,
) -> Minimum:
    """Minimize a smooth function, as scipy.optimize.minimize does.

    Gradients come from autograd. With `batched=True` many problems are solved in a batch: each has
    a separate line search, and converged ones do not wait for the slowest.

    Args:
        fun: `fun(x, *args)` returns the value of ONE problem: a real tensor of one element.
        x0: the starting point: a tree of real tensors. The solution has its dtype; values are
            compared, and steps computed, in float64.
        args: a tuple of trees of tensors for fun. The solution is differentiable with respect to
            them.
        method: "l-bfgs-b" (the default) stores the last 8 steps. "bfgs" stores a dense matrix;
            "ssbfgs" and "ssbroyden" also scale it down if it is too large, which pays off after
            hundreds of steps, e.g. in physics-informed networks. "newton-cg" computes up to 200
            products with the Hessian in a step, and follows directions of negative curvature; fun
            must be twice differentiable. All support bounds: a step leads to the minimum of a
            quadratic model, or near it, over the free variables at its Cauchy point.
        bounds: `(lower, upper)`: each None, a number, a tensor like x0, or a tree like x0 whose
            leaves may be None. fun is never evaluated outside the bounds: tensors with more digits
            than x0 are rounded inwards.
        gtol: stop if no element of the projected gradient is larger, ≥ 0. Tolerances are at least
            10 eps of x0's dtype. Defaults: scipy's for L-BFGS-B.
        ftol: stop after a step that lowered the function by less than this times max(|f|, 1).
        maxiter: maximum number of steps of each problem, ≥ 1. Default 15,000, scipy's.
        max_nfev: maximum number of evaluations of each problem, ≥ 1. Default 15,000, scipy's.
        batched: every leaf of x0 and args has a leading dimension of independent problems. Put
            shared values into fun's closure. fun runs under torch.vmap. Bounds may be shared or
            have that dimension, too.
        compile: record a step for one problem, and compile a library of C++ that solves all
            problems, eight at a time (`batched`, on CPUs). The first call takes 0.4 to 2 s, later
            ones a tenth of the time of eager steps. Libraries are cached for the same fun, which is
            recorded again at each call, so that changes of its closure are seen.
            On GPUs, for "newton-cg", and where fun has operations without C++, torch.compile
            compiles fun with its derivatives. Inside torch.func's transforms all runs eagerly.
        implicit: make x differentiable with respect to args, up to second derivatives, by the
            implicit function theorem, in plain autograd and in torch.func. Parameters at a bound,
            and problems that have not converged, are constant.
        callback: called as `callback(intermediate_result)` after each iteration, as in scipy; in a
            batch after each evaluation in which one of the problems has made an iteration. It stops
            the search by raising StopIteration or returning True, single problems of a batch by
            returning a bool tensor (B,). See `IntermediateResult`.
        return_history: store all iterates in `history`, which needs memory.

    Returns:
        `Minimum`, with scipy's fields.

    Raises:
        TypeError: if fun is not callable or does not return a real tensor; for complex or integer
            x0, for half types next to wider ones in x0 and, in a batch, for args that are not
            tensors.
        ValueError: for an unknown method; values out of range; lower bounds above upper ones; an x0
            outside the bounds; sizes that do not match; a value with more than one element; under
            torch.vmap; and, for one problem, if the function or its gradient is not finite at x0.
            In a batch such a problem has status −1.

    Exceptions of fun are not caught. A `RuntimeWarning` names parameters of a single problem that
    never moved and have derivative 0, although the value changes with them: fun reads their values,
    e.g. by `item()`. The search takes them for constants.

    The result of a problem does not depend on the other problems of a batch, bitwise, if the values
    of fun do not. In float32 a search ends if values differ only by rounding: with status 2, or −2
    if slopes give no direction either.

    Papers: Byrd, Lu, Nocedal, Zhu, "A limited memory algorithm for bound constrained optimization"
    (1995), https://doi.org/10.1137/0916069; Moré, Thuente, "Line search algorithms with guaranteed
    sufficient decrease" (1994), https://doi.org/10.1145/192115.192132; Urbán, Stefanou, Pons,
    "Unveiling the optimization process of physics informed neural networks" (2024),
    https://arxiv.org/abs/2405.04230, section 3, for self-scaling.

    Example::

        >>> import torch, functional_optim as fo
        >>> def rosenbrock(x, a):
        ...     return 100 * (x[1] - x[0] ** 2) ** 2 + (a - x[0]) ** 2
        >>> x0, a = torch.zeros(3, 2).double(), torch.tensor([1.0, 2.0, 3.0]).double()
        >>> found = fo.minimize(rosenbrock, x0, (a,), bounds=(None, 2.25), batched=True)
        >>> found.x.round(decimals=3).tolist(), found.active_mask.tolist()
        ([[1.0, 1.0], [1.501, 2.25], [1.502, 2.25]], [[0, 0], [0, 1], [0, 1]])
    """
    if not callable(fun):
        raise TypeError(
            f"minimize takes a function that returns a number first, but got a "
            f"{type(fun).__name__}."
        )
    args = as_args("minimize", args)
    check_compile(compile=compile, batched=batched)
    check_tolerances(gtol=gtol, ftol=ftol)
    counts = {"maxiter": maxiter, "max_nfev": max_nfev}
    numeric.check_count("minimize", 1, **{k: x for k, x in counts.items() if x is not None})
    _check_pairs(x0, bounds)
    taken = solver_input("minimize", fun, x0, args, bounds, batched=batched)
    flat, one, x, (limits,) = taken.flat, taken.one, taken.x, taken.others
    known = _chosen(method)
    box, x = checked_bounds(limits, flat, x)
    if modes.transformed():
        first_value("minimize", fun, number, one, x, taken.args, batched=batched)
    objective = Objective(taken.fun, one, batched=batched)
    eps = torch.finfo(flat.dtype).eps
    rules = descent.DescentRules(
        known, max(gtol, 10 * eps), max(ftol, 10 * eps), 10 * eps, eps, maxiter or 15000,
        max_nfev or 15000,
    )  # fmt: skip
    data = descent.DescentData(taken.own, box)
    watch = Watch(
        callback, history=return_history, look=lambda s: (s.at.x, s.at.f), flat=flat, x=x,
        batched=batched,
    )  # fmt: skip
    n = one.size
    size = n * (n if rules.method in DENSE else 2 * HISTORY) + 20 * n
    found = programs.run(
        "minimize", descent, rules, objective, x, taken.own, data, watch.seer, size,
        compile=compile, library=rules.method != "newton-cg",
    )  # fmt: skip
    if not batched and int(found.status) == -1:
        raise ValueError(
            "the function, or its gradient, is not finite at x0; start elsewhere, or bound the "
            "parameters to the domain of the function."
        )
    if not batched:
        warn_of_underived("minimize", objective.single, flat, box, (x, found.at.x), found.at.g)
    solution, value = found.at.x, found.at.f
    if implicit and args:
        function = ProblemFunction(
            lambda params, *own: number(fun(params, *own)), one, batched=batched
        )
        blocked = box.reach(found.at.x.to(torch.float64), -found.at.g) <= 0
        fixed = blocked | box.fixed(found.at.x)
        solution = corrected(function, found.at.x, args, fixed, found.status > 0)
        value = followed(function, found.at.f, solution, args, found.status > 0)
    return _result(found, solution, value, flat, data, watch, batched=batched)


def _result(
    found: descent.DescentProgress,
    solution: Tensor,
    value: Tensor,
    flat: Ravel,
    data: descent.DescentData,
    watch: Watch,
    *,
    batched: bool,
) -> Minimum:
    def as_tree(vector: Tensor, *, stored: bool = False) -> Any:
        return flat.tree(vector if batched else vector[0], stored=stored)

    at = found.at
    optimality = descent.projected(at, data.box).abs().amax(-1)

    count = partial(count_of, batched=batched)
    return Minimum(
        as_tree(solution, stored=True),
        value if batched else value[0],
        as_tree(at.g),
        optimality if batched else optimality[0],
        mask_tree(flat, data.box.sides(at.x), batched=batched),
        count(found.nfev),
        count(found.nfev),
        count(found.nit),
        *ending(found.status, MESSAGES, batched=batched),
        count(found.products),
        watch.history(),
    )


# ---------------------------------------------------------------- checks


def _chosen(method: Any) -> str:
    """The method's name. Raises ValueError for an unknown one."""
    if method is None:
        return "l-bfgs-b"
    chosen = str(method).lower()  # scipy ignores case, too
    if chosen not in METHODS:
        instead = INSTEAD.get(chosen) or f"choose one of {', '.join(map(repr, METHODS))}"
        raise ValueError(f"unknown method {method!r}; {instead}, or leave it out.")
    return chosen


def _check_pairs(x0: Any, bounds: Any) -> None:
    """Raise ValueError for a pair of bounds for each variable, which scipy's minimize takes: for
    two variables it would be read as lower and upper bounds."""
    listed = isinstance(bounds, (tuple, list)) and any(isinstance(x, (tuple, list)) for x in bounds)
    if isinstance(x0, Tensor) and listed:
        raise ValueError(
            "minimize takes bounds as (lower, upper), each None, a number or a tensor like x0, but "
            f"got a list; pass scipy's pairs as tuple(torch.tensor(pairs, dtype={x0.dtype}).T), "
            "with -torch.inf and torch.inf in place of None."
        )
