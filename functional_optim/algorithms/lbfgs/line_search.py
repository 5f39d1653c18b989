"""Line searches, one evaluation at a time.

Nocedal, Wright, "Numerical Optimization", 2nd ed. (2006): Algorithms 3.5 and 3.6 (strong Wolfe
conditions), equation 3.59 (cubic interpolation); with the safeguards of minFunc,
https://www.cs.ubc.ca/~schmidtm/Software/minFunc.html, as torch.optim.LBFGS has them.

A search is a record of its state between two evaluations, and a transition function for one
evaluation. So it can stop at any evaluation, and many problems can search in a batch, each at a
different stage. The code serves both: a scalar is a Python float or a 0-dim tensor for one problem,
a column of shape (problems, 1) for a batch; a vector has shape (n,) or (problems, n). A condition
on one problem is a bool, so that unneeded values are not computed; for a batch it is a column of
bools.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Number: TypeAlias = Any
Condition: TypeAlias = Any

C1 = 1e-4
"""Sufficient decrease, N&W (3.6a): their value for quasi-Newton methods, and torch's."""
C2 = 0.9
"""Curvature, N&W (3.6b): their value for quasi-Newton methods, and torch's."""
NARROW = 1e-9
"""A search stops if no parameter differs by this much between the ends of the bracket: torch's."""


class Point(NamedTuple):
    """A point on the line: step length t, value f, gradient g, and slope gᵀd."""

    t: Number
    f: Number
    g: Tensor
    slope: Number


class End(NamedTuple):
    """A point without its gradient, which is no longer needed."""

    t: Number
    f: Number
    slope: Number


class LineSearch(NamedTuple):
    """A search between two evaluations.

    k: evaluations so far. zooming: whether there is a bracket. low: the end of the bracket with the
    lower value; without a bracket, the newest point. high: the other end; without a bracket, the
    point before the newest. low_first: whether `low` is preferred if the values are equal. stalled:
    whether the last trial was close to an end of the bracket.
    """

    k: Number
    zooming: Condition
    low: Point
    high: End
    low_first: Condition
    stalled: Condition


def start(origin: Point) -> LineSearch:
    """The search before its first evaluation."""
    no = torch.zeros_like(origin.slope, dtype=torch.bool) if is_column(origin.slope) else False
    return LineSearch(no + 0, no, origin, end(origin), negate(no), no)


def strong_wolfe(
    search: LineSearch, origin: Point, new: Point, reach: Number, spent: Condition
) -> tuple[LineSearch, Number, Condition]:
    """The transition of a search by the evaluation of `new`.

    Args:
        search: its state before.
        origin: the point at t = 0.
        new: the point that was evaluated.
        reach: the largest element of |d|.
        spent: whether this was the last allowed evaluation.

    Returns:
        The search after it; the step length to try next; and whether the search is over. Then
        `search.low` is its result.
    """
    k, zooming, low, high, low_first, stalled = search
    steep = decide(new.f > origin.f + C1 * new.t * origin.slope)
    flat = decide(abs(new.slope) <= -C2 * origin.slope)
    no_lower = decide(new.f >= low.f)
    rising = decide(new.slope >= 0)
    gives_up = spent & negate(zooming)
    turned = gives_up | (no_lower & decide(k > 1)) | (rising & negate(flat))
    worse = steep | where(zooming, no_lower, turned)
    void = flat & negate(worse | zooming) & decide(new.f != new.f)  # NaN: torch's fails here

    old = choose(gives_up, origin, low)
    first = where(low_first, decide(old.f <= new.f), negate(decide(new.f <= old.f)))
    stays = worse & first
    crossed = decide(new.slope * (high.t - low.t) >= 0)
    moves = worse | negate(zooming) | crossed
    high = choose(stays, end(new), choose(moves, end(old), high))
    low = choose(stays | void, old, new)
    low_first = where(worse, low_first == first, low_first)
    zooming = zooming | worse

    narrow = decide(abs(high.t - low.t) * reach < NARROW)
    over = (flat & negate(worse)) | (zooming & (spent | narrow))
    t = new.t
    if over is not True:
        t, stalled = trial(zooming, low, high, stalled)
        t = t.detach() if isinstance(t, Tensor) else t  # no derivative of an interpolation
    return LineSearch(k + 1, zooming, low, high, low_first, stalled), t, over


def trial(
    zooming: Condition, low: Point, high: End, stalled: Condition
) -> tuple[Number, Condition]:
    """The next step length: inside the bracket, or beyond the newest point if there is none.

    If a second successive trial is close to an end of the bracket, or is equal to it, it is moved
    to a tenth of the bracket from the nearer end.
    """
    left, right = smaller(low.t, high.t), larger(low.t, high.t)
    least = where(zooming, left, low.t + 0.01 * (low.t - high.t))
    most = where(zooming, right, low.t * 10)
    t = cubic(low, high, least, most)
    tenth = 0.1 * (right - left)
    close = zooming & decide(smaller(right - t, t - left) < tenth)
    shifts = close & (stalled | decide(t >= right) | decide(t <= left))
    inside = where(decide(abs(t - right) < abs(t - left)), right - tenth, left + tenth)
    return where(shifts, inside, t), close & negate(shifts)


def cubic(a: Point | End, b: Point | End, least: Number, most: Number) -> Number:
    """The minimizer of the cubic through two points, N&W (3.59), between `least` and `most`.

    If the cubic has no minimum, the midpoint.

    Example::

        >>> import torch
        >>> from functional_optim.algorithms.lbfgs.line_search import End, cubic
        >>> a = End(0.0, 1.0, torch.tensor(-2.0))
        >>> b = End(2.0, 1.0, torch.tensor(2.0))
        >>> cubic(a, b, 0.0, 2.0)
        tensor(1.)
    """
    d1 = a.slope + b.slope - ratio(3 * (a.f - b.f), a.t - b.t)
    square = d1 * d1 - a.slope * b.slope
    exists = decide(square >= 0)
    middle = (least + most) / 2.0
    if exists is False:
        return middle
    d2 = square.sqrt()
    a, b = end(a), end(b)
    forward = decide(a.t <= b.t)
    a, b = choose(forward, a, b), choose(forward, b, a)
    t = b.t - (b.t - a.t) * ((b.slope + d2 - d1) / (b.slope - a.slope + 2 * d2))
    return where(exists, smaller(larger(t, least), most), middle)


# ---------------------------------------------------------------- one problem, or a column of them


def can_branch(*values: Any) -> bool:
    """Whether values may be used in conditions; False under torch.vmap and in traces."""
    if torch.compiler.is_compiling():
        return False
    try:
        for x in values:
            if isinstance(x, Tensor):
                bool(x.sum() == 0)
    except RuntimeError:
        return False
    return True


def is_column(x: Any) -> bool:
    """Whether x has a scalar for each problem of a batch."""
    return isinstance(x, Tensor) and x.dim() > 0


def decide(condition: Any) -> Condition:
    """One problem's condition as a bool; a column as it is."""
    return condition if is_column(condition) else bool(condition)


def negate(condition: Condition) -> Condition:
    """Not."""
    return ~condition if isinstance(condition, Tensor) else not condition


def where(condition: Condition, a: Any, b: Any) -> Any:
    """a where the condition holds, else b: numbers, vectors, or stacks of vectors."""
    if not isinstance(condition, Tensor):
        return a if condition else b
    if a is b:
        return a
    deep = isinstance(a, Tensor) and a.dim() > condition.dim()
    return torch.where(condition.unsqueeze(-1) if deep else condition, a, b)


def choose(condition: Condition, a: Any, b: Any) -> Any:
    """`where` for records, field by field."""
    if not isinstance(condition, Tensor):
        return a if condition else b
    fields = [
        choose(condition, x, y) if isinstance(x, tuple) else where(condition, x, y)
        for x, y in zip(a, b, strict=True)
    ]
    return type(a)(*fields)


def smaller(a: Number, b: Number) -> Number:
    """min(a, b); a if they cannot be compared."""
    return where(decide(b < a), b, a)


def larger(a: Number, b: Number) -> Number:
    """max(a, b); a if they cannot be compared."""
    return where(decide(b > a), b, a)


def nought(like: Number) -> Number:
    """Zero, as a number like another."""
    return torch.zeros_like(like) if is_column(like) else 0


def ratio(a: Number, b: Number) -> Number:
    """a / b; NaN where b is zero, for a column as for a Python number."""
    if is_column(b):
        return torch.where(b == 0, math.nan, a / b)
    return a / b if b else math.nan


def end(point: Point | End) -> End:
    """A point without its gradient."""
    return End(point.t, point.f, point.slope)


def dot(x: Tensor, y: Tensor) -> Number:
    """xᵀy: 0-dim, or a column of them."""
    return torch.dot(x, y) if x.dim() == 1 else (x * y).sum(-1, keepdim=True)


def axpy(a: Number, x: Tensor, y: Tensor) -> Tensor:
    """y + a x, rounded as torch.add(y, x, alpha=a) rounds it.

    addcmul does, and is differentiable in a; but not in half types, which only an optimizer object
    computes in.
    """
    if isinstance(a, Tensor) and y.dtype not in (torch.bfloat16, torch.float16):
        return torch.addcmul(y, x, a)
    alpha: Any = a
    return torch.add(y, x, alpha=alpha)


def largest(x: Tensor) -> Number:
    """The largest element of |x|."""
    return x.abs().max() if x.dim() == 1 else x.abs().amax(-1, keepdim=True)


def total(x: Tensor) -> Number:
    """The sum of the elements."""
    return x.sum() if x.dim() == 1 else x.sum(-1, keepdim=True)
