"""The arguments of all solvers: checks of parameters, args and bounds, and their vector view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core import modes
from functional_optim.core.calls import takes
from functional_optim.core.ravel import Ravel
from functional_optim.solvers.box import Box
from functional_optim.solvers.implicit import constants, has_tangent, is_derived
from functional_optim.solvers.residuals import is_searched, searched


class SolverInput(NamedTuple):
    """The arguments of a solver, without derivatives.

    flat, one: the vector views of all problems and of one. x: (B, n). fun: of one problem's
    parameters and, in a batch, its own arguments. own: those of each problem. others: the arguments
    besides x0 and args.
    """

    x0: Any
    args: Any
    flat: Ravel
    one: Ravel
    x: Tensor
    fun: Callable[..., Any]
    own: tuple[Any, ...]
    others: tuple[Any, ...]


def solver_input(
    name: str, fun: Callable[..., Any], x0: Any, args: Any, *others: Any, batched: bool
) -> SolverInput:
    """Check and convert the arguments of a solver.

    Raises:
        TypeError: for a function of other arguments, for parameters that are not real
            floating-point tensors and, in a batch, for args that are not tensors.
        ValueError: under torch.vmap, for tensors on the meta device, if args and x0 have different
            numbers of problems, if a batch has none, and for other arguments with derivatives.
        RuntimeError: in torch's inference mode.
    """
    check_derivatives(name)
    check_constant(name, others)
    x0, args, *rest = constants((x0, args, *others))
    check_start(x0)
    check_known(name, (x0, args, *rest))
    flat = Ravel(x0, batched=batched)
    if batched and not flat.leaves[0].shape[0]:
        raise ValueError(f"{name} got a batch without problems; pass x0 with one problem or more.")
    one = Ravel(tree.map(lambda p: p[0], x0)) if batched else flat
    if batched:
        check_batched(args, flat)
    if not takes(fun, x0, *args):
        raise TypeError(
            f"{name} calls fun(x, *args) with {len(args)} args, which the function does not take; "
            "pass args=(a, b) for fun(x, a, b), or put values into its closure."
        )
    bound = fun if batched or not args else lambda params: fun(params, *args)
    x = flat.vector(x0).reshape(-1, one.size)
    return SolverInput(x0, args, flat, one, x, bound, args if batched else (), tuple(rest))


def as_args(name: str, args: Any) -> tuple[Any, ...]:
    """args as a tuple. Raises TypeError for a word, such as scipy's third argument."""
    if isinstance(args, str):
        raise TypeError(
            f"{name} takes args third, which fun gets after x, but got {args!r}; pass method= by "
            "name, and leave jac out, since derivatives come from autograd."
        )
    return args if isinstance(args, tuple) else (args,)


def check_constant(name: str, others: Any) -> None:
    """Raise ValueError for bounds or scales with derivatives, which a solver would lose."""
    for x in tree.leaves(others):
        if isinstance(x, Tensor) and is_derived(x):
            raise ValueError(
                f"{name} differentiates its solution with respect to args only, but bounds, "
                "x_scale or f_scale require derivatives; detach them."
            )


def first_value(
    name: str, fun: Callable[..., Any], convert: Callable[[Any], Tensor], one: Ravel, x: Tensor,
    args: Any, *, batched: bool,
) -> Any:  # fmt: skip
    """What a function returns for the first problem of x, (B, n). convert: makes it a tensor.

    Raises:
        TypeError, ValueError: those of convert.
        ValueError: for a value that autograd does not derive with respect to x, and for one that
            depends, outside of args, on a tensor that torch.func derives or on the x of another
            solver, which would take the derivative for 0.
    """
    own = tree.map(lambda a: a[0], args) if batched else args
    if modes.transformed():
        value = fun(one.tree(x[0]), *own)
        found = convert(value)
        check_known(name, found)
        check_lost(name, lost=is_derived(found))
        return constants(value)
    point = searched(x[0])
    with torch.enable_grad():
        value = fun(one.tree(point), *own)
        found = convert(value)
    check_recorded(name, found, point)
    return constants(value)


def check_recorded(name: str, found: Tensor, point: Tensor) -> None:
    """Raise ValueError for values that autograd has not recorded from a point, and for those that
    depend on the x of another solver."""
    points = [a for a in sources(found) if is_searched(a)]
    if not any(a is point for a in points):
        raise ValueError(
            "the value does not depend on x by operations that autograd records; leave out detach, "
            "item, numpy and torch.tensor in the function."
        )
    check_lost(name, lost=len(points) > 1 or has_tangent(found))


def check_lost(name: str, *, lost: bool) -> None:
    """Raise ValueError for a derivative with respect to a tensor that is not in args."""
    if lost:
        raise ValueError(
            f"the function of {name} uses a tensor that requires derivatives, and that is not in "
            "args; pass it in args, or detach it if its derivative is to be 0."
        )


def sources(x: Tensor) -> list[Tensor]:
    """The tensors without history from which autograd has recorded x."""
    return [node.variable for node in nodes_of(x) if type(node).__name__ == "AccumulateGrad"]


def nodes_of(x: Tensor) -> Iterator[Any]:
    """The nodes of autograd's graph that lead to x."""
    waiting = [torch.autograd.graph.get_gradient_edge(x).node] if x.requires_grad else []
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        before = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= before
        waiting += before


def check_derivatives(name: str) -> None:
    """Raise RuntimeError, in a solver's name, where autograd records nothing."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{name} needs derivatives, which torch.inference_mode() switches off; call it under "
            "torch.no_grad() instead."
        )


def check_start(x0: Any) -> None:
    """Raise TypeError unless every leaf of x0 is a real floating-point tensor, none of them of a
    half type next to a wider one."""
    for path, p in tree.items(x0):
        where = f"x0 at {path!r}" if path else "x0"
        if not isinstance(p, Tensor):
            raise TypeError(
                f"{where} is a {type(p).__name__}, not a tensor; pass e.g. "
                "torch.tensor([1.0, 2.0], dtype=torch.float64), a dict of tensors, or "
                "torch.from_numpy(x0) for an array."
            )
        if p.is_complex():
            raise TypeError(
                f"{where} has dtype {p.dtype}, but parameters must be real; use "
                "torch.view_as_real(x0), and torch.view_as_complex inside of the function."
            )
        if not p.is_floating_point():
            raise TypeError(
                f"{where} has dtype {p.dtype}, but parameters must be floating-point numbers; "
                "pass x0.double()."
            )
    coarse = [path for path, p in tree.items(x0) if p.dtype.itemsize == 2]
    if coarse and len(coarse) < len(tree.leaves(x0)):
        raise TypeError(
            f"x0 at {coarse[0]!r} has a half type, whose rounding keeps the wider parameters "
            "next to it from converging; pass it as float32 or wider."
        )


def check_known(name: str, trees: Any) -> None:
    """Raise ValueError for tensors without values: those on the meta device, and those under
    torch.vmap, where loops cannot depend on values. name: of the solver."""
    tensors = [x for x in tree.leaves(trees) if isinstance(x, Tensor)]
    if any(x.is_meta for x in tensors):
        raise ValueError(
            f"{name} got a tensor on the meta device, which holds no values; create it on a real "
            "device, or load its values first."
        )
    try:
        for x in tensors:
            bool(x.sum() == 0)
    except RuntimeError as error:
        raise ValueError(
            f"{name} cannot run under torch.vmap, since its loop depends on values; pass "
            "batched=True, with a leading dimension of problems in x0 and args."
        ) from error


def check_compile(*, compile: bool, batched: bool) -> None:
    """Raise ValueError for compile=True with a single problem."""
    if compile and not batched:
        raise ValueError(
            "compile=True compiles steps of many problems; pass batched=True, with a leading "
            "dimension of problems, or leave it out."
        )


def check_batched(args: Any, flat: Ravel) -> None:
    """Raise an error unless every leaf of args has a row for each problem."""
    count = flat.leaves[0].shape[0]
    for path, x in tree.items(args):
        if not isinstance(x, Tensor):
            raise TypeError(
                f"with batched=True all args are tensors with a row for each problem, but "
                f"args.{path} is a {type(x).__name__}; put what all problems share into the "
                "function's closure."
            )
        if tuple(x.shape[:1]) != (count,):
            raise ValueError(
                f"x0 has {count} problems, but args.{path} has shape {tuple(x.shape)}; give it a "
                "leading dimension of problems, or put it into the function's closure."
            )


def checked_bounds(bounds: Any, flat: Ravel, x: Tensor) -> tuple[Box, Tensor]:
    """The bounds, and x within them.

    Tensors of a wider dtype than x0's are rounded inwards: fun is evaluated within them. An x that
    is at such a bound, rounded to nearest, moves to the bound.

    Raises:
        TypeError: for bounds that are not numbers.
        ValueError: for infeasible ones.
    """
    if bounds is None:
        return Box(None, None), x
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise ValueError(
            "bounds must be a pair (lower, upper), each None, a number, a tensor or a tree like "
            "x0; pass scipy's Bounds as (bounds.lb, bounds.ub)."
        )
    lower, upper = [
        of_each("bounds", side, flat, x, missing)
        for side, missing in zip(bounds, (-torch.inf, torch.inf), strict=True)
    ]
    if bool((lower.isnan() | upper.isnan() | (lower > upper)).any()):
        raise ValueError("a lower bound is above its upper bound, or NaN; exchange or fix them.")
    if bool(((x < rounded(lower, flat)) | (x > rounded(upper, flat))).any()):
        raise ValueError(
            "x0 is outside the bounds; start inside, e.g. from x0.clamp(lower, upper)."
        )
    lower, upper = rounded(lower, flat, torch.inf), rounded(upper, flat, -torch.inf)
    if bool((lower > upper).any()):
        raise ValueError(
            "no number of x0's dtype is between a lower bound and its upper bound; pass both in "
            "x0's dtype, or x0 in float64."
        )
    box = Box(lower, upper)
    return box, box.inside(x)


def rounded(bound: Tensor, flat: Ravel, inwards: float | None = None) -> Tensor:
    """A bound, float64, (B, n), in the leaves' dtypes and then in the vectors' dtype.

    inwards: infinity with the sign of the direction to round in; None rounds to nearest.
    """
    parts = []
    for part, p in zip(bound.split(flat.sizes, -1), flat.leaves, strict=True):
        near = part.to(p.dtype)
        if inwards is not None:
            outside = (near.to(part.dtype) < part) if inwards > 0 else (near.to(part.dtype) > part)
            near = torch.where(outside, near.nextafter(torch.full_like(near, inwards)), near)
        parts.append(near.to(flat.dtype))
    return torch.cat(parts, -1)


def of_each(name: str, given: Any, flat: Ravel, x: Tensor, missing: float) -> Tensor:
    """A number, a tensor or a tree as a number for each element: (B, n), float64.

    Python's numbers are rounded to the dtype of x, as in operations of torch.
    """
    if given is None or isinstance(given, (int, float)):
        return torch.full_like(x, missing if given is None else given).to(torch.float64)
    if isinstance(given, Tensor) and len(flat.leaves) > 1 and given.numel() == 1:
        return torch.full_like(x, float(given), dtype=torch.float64)
    whole = flat.like
    if isinstance(given, Tensor) and not isinstance(whole, Tensor):
        raise ValueError(
            f"{name} is one tensor, but x0 a tree of {len(flat.leaves)} tensors; pass a tree like "
            "x0."
        )
    columns = []
    try:
        rows = tree.rows(whole, given)
    except ValueError:
        raise ValueError(
            f"{name} and x0 have different structures: {tree.summary(given)} against "
            f"{tree.summary(whole)}."
        ) from None
    for p, side in rows:
        value = _as_numbers(name, missing if side is None else side, x)
        try:
            columns.append(value.expand(p.shape).reshape(x.shape[0], -1))
        except RuntimeError:
            raise ValueError(
                f"{name} of shape {tuple(value.shape)} do not match a parameter of shape "
                f"{tuple(p.shape)}."
            ) from None
    return torch.cat(columns, -1)


def _as_numbers(name: str, side: Any, x: Tensor) -> Tensor:
    """A tensor, an array, or numbers, as float64."""
    exact = isinstance(side, Tensor) or (hasattr(side, "dtype") and not isinstance(side, float))
    dtype = torch.float64 if exact else x.dtype
    try:
        return torch.as_tensor(side, dtype=dtype, device=x.device).to(torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"{name} got {side!r} for a parameter; pass None, a number, a tensor like x0, or a "
            "tree like x0."
        ) from None


def mask_tree(flat: Ravel, mask: Tensor, *, batched: bool) -> Any:
    rows = mask if batched else mask[0]
    parts = [
        x.reshape((*flat.problems, *shape))
        for x, shape in zip(rows.split(flat.sizes, -1), flat.shapes, strict=True)
    ]
    return tree.with_leaves(flat.like, parts)


def count_of(x: Tensor, *, batched: bool) -> Any:
    """A count of each problem, (B,), as a result has it: of one problem an int."""
    return x if batched else int(x)


def ending(status: Tensor, messages: Mapping[int, str], *, batched: bool) -> tuple[Any, Any, Any]:
    """`status`, `success` and `message` of a result, from the statuses (B,)."""
    said = [messages[x] for x in status.tolist()]
    success = status > 0
    return (status, success, said) if batched else (int(status), bool(success), said[0])
