"""L-BFGS, one evaluation at a time.

Nocedal, Wright, "Numerical Optimization", 2nd ed. (2006), Algorithms 7.4 (two-loop recursion) and
7.5; Liu, Nocedal, "On the limited memory BFGS method for large scale optimization", Mathematical
Programming 45 (1989), https://doi.org/10.1007/BF01589116. The first step, the stopping rules and
the choice of pairs are torch.optim.LBFGS's.

As in `line_search`, the code serves one problem and a batch. Two callers run it: `transform.py`,
for trees, and `adapters/lbfgs.py`, for the closure of an optimizer object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.algorithms.lbfgs.line_search import (
    Condition,
    LineSearch,
    Number,
    Point,
    axpy,
    choose,
    decide,
    dot,
    is_column,
    largest,
    negate,
    nought,
    smaller,
    start,
    strong_wolfe,
    total,
    where,
)

CURVED = 1e-10
"""A pair is stored if sᵀy is above this: torch's."""
GRAIN = 1 << 15
"""Maximum number of elements of blocks of stored vectors: above it, torch starts threads."""


class Memory(NamedTuple):
    """The last pairs, oldest first. An empty place has ρ = 0.

    s: steps. y: differences of gradients. rho: 1 / sᵀy. Each is a list: for one problem of vectors
    (and 0-dim ρ), for many of blocks of shape (problems, places, n). gamma: the first guess at the
    inverse Hessian is γ times the identity.
    """

    s: list[Tensor]
    y: list[Tensor]
    rho: list[Tensor]
    gamma: Number


def remember(memory: Memory, s: Tensor, y: Tensor, size: int, going: Condition) -> Memory:
    """Add a pair if its curvature is positive; if there are more than `size`, drop the oldest."""
    ys = dot(y, s)
    curved = decide(going & (ys > CURVED))
    if curved is False:
        return memory
    ys = where(curved, ys, 1.0)
    if is_column(curved):
        memory = make_room(memory, size)
    return Memory(
        push(memory.s, s, size, curved),
        push(memory.y, y, size, curved),
        push(memory.rho, 1.0 / ys, size, curved),
        where(curved, ys / where(curved, dot(y, y), 1.0), memory.gamma),
    )


def push(places: list[Tensor], x: Tensor, size: int, curved: Condition) -> list[Tensor]:
    """Put x at the end."""
    if not is_column(curved):
        return [*places, x][-size:]
    heads = [*[block[:, :1] for block in places[1:]], x.unsqueeze(1)]
    return [
        where(curved, torch.cat([block[:, 1:], head], 1), block)
        for block, head in zip(places, heads, strict=True)
    ]


def make_room(memory: Memory, size: int) -> Memory:
    """Four more places for every problem, up to `size`, if any problem has used all its places."""
    taken = sum([block.shape[1] for block in memory.rho])
    if taken >= size or not (taken == 0 or bool((memory.rho[0][:, 0] != 0).any())):
        return memory
    more = min(4, size - taken)
    s, y, rho = [_widen(places, more) for places in memory[:3]]
    return Memory(s, y, rho, memory.gamma)


def _widen(places: list[Tensor], more: int) -> list[Tensor]:
    first = places[0]
    room = first.new_zeros(first.shape[0], more, first.shape[2])
    if first.numel() + room.numel() > GRAIN and first.shape[1]:
        return [room, *places]
    return [torch.cat([room, first], 1), *places[1:]]


def split_blocks(stack: Tensor) -> list[Tensor]:
    """A stack of shape (problems, places, n) in blocks of at most GRAIN elements."""
    each = max(1, GRAIN // max(1, stack.shape[0] * stack.shape[2]))
    return list(stack.split(each, 1))


def two_loop(q: Tensor, memory: Memory) -> tuple[Tensor, list[Number]]:
    """H q for the inverse Hessian that the pairs imply, Algorithm 7.4; and its α, oldest first."""
    columns = memory[:3]
    if q.dim() > 1:
        columns = [[x for block in places for x in block.unbind(1)] for places in columns]
    pairs = list(zip(*columns, strict=True))
    alphas = []
    for s, y, rho in reversed(pairs):
        alpha = dot(s, q) * rho
        q = axpy(-alpha, y, q)
        alphas.append(alpha)
    alphas.reverse()
    r = q * memory.gamma
    for (s, y, rho), alpha in zip(pairs, alphas, strict=True):
        beta = dot(y, r) * rho
        r = axpy(alpha - beta, s, r)
    return r, alphas


# ---------------------------------------------------------------- Algorithm 7.5


class Settings(NamedTuple):
    """The constants of a run.

    The arguments of `fo.lbfgs`; wolfe: whether to use a line search. snap: rounds a vector to the
    dtype of the parameters.
    """

    lr: Number
    max_iter: int
    max_eval: int
    tolerance_grad: float
    tolerance_change: float
    history_size: int
    wolfe: bool
    snap: Callable[[Tensor], Tensor]

    def transitions(self) -> int:
        """The maximum number of evaluations of a run after its first."""
        most = max(self.max_eval, 1)
        return most if self.wolfe else min(most, max(self.max_iter - 1, 0))


class Past(NamedTuple):
    """The data that a run receives from the previous one.

    memory: the pairs. d, t: the last direction and step length. g: the gradient before that step.
    n_iter: iterations so far.
    """

    memory: Memory
    d: Tensor
    t: Number
    g: Tensor
    n_iter: Number


class Line(NamedTuple):
    """The current line of a search.

    origin: its start. d: its direction. reach: the largest element of |d|. t: the step length to
    evaluate next; when the run is over, the one taken. search: the state of the search.
    """

    origin: Point
    d: Tensor
    reach: Number
    t: Number
    search: LineSearch


class Run(NamedTuple):
    """A run between two evaluations.

    x: with a line search, the start of the line; without one, the point to evaluate next. When the
    run is over, the result. alphas: those of the last two-loop recursion, for one problem. here:
    iterations of this run. n_iter: of all runs. evals: evaluations of this run. done: is it over?
    """

    x: Tensor
    line: Line
    memory: Memory
    alphas: list[Number]
    here: Number
    n_iter: Number
    evals: Number
    done: Condition

    def past(self) -> Past:
        """The data for the next run."""
        line = self.line
        return Past(self.memory, line.d, line.t, line.origin.g, self.n_iter)


def aim(settings: Settings, run: Run) -> Tensor:
    """The point to evaluate next; for a finished problem, its result."""
    if not settings.wolfe:
        return run.x
    return where(run.done, run.x, axpy(run.line.t, run.line.d, run.x))


def begin(settings: Settings, x: Tensor, f: Number, g: Tensor, past: Past) -> Run:
    """The run that starts at x, where the value is f and the gradient g."""
    zero = nought(f)
    origin = Point(zero, f, past.g, zero)
    line = Line(origin, past.d, zero, past.t, start(origin))
    done = decide(largest(g) <= settings.tolerance_grad) | (settings.max_iter < 1)
    none = 0 * past.n_iter
    run = Run(x, line, past.memory, [], none, past.n_iter, none + 1, done)
    return run if done is True else turn(settings, run, f, g, negate(done))


def advance(settings: Settings, run: Run, f: Number, g: Tensor) -> Run:
    """The transition of a run by the evaluation of its next point, with value f and gradient g."""
    line, search, live = run.line, run.line.search, negate(run.done)
    evals = run.evals + live
    new = Point(line.t, f, g, dot(g, line.d))
    if settings.wolfe:
        spent = decide(evals > settings.max_eval)
        search, t, found = strong_wolfe(search, line.origin, new, line.reach, spent)
    else:
        search, t, found = search._replace(low=new), line.t, live
    found = found & live
    line = line._replace(search=search, t=where(live, t, line.t))
    run = run._replace(line=line, evals=evals)
    return run if found is False else land(settings, run, found)


def land(settings: Settings, run: Run, found: Condition) -> Run:
    """Move to the result of the search, and start the next line unless a stopping rule holds."""
    line = run.line
    t, f, g, _ = line.search.low
    stops = (
        decide(run.here == settings.max_iter)
        | decide(run.evals >= settings.max_eval)
        | decide(largest(g) <= settings.tolerance_grad)
        | decide(largest(line.d * t) <= settings.tolerance_change)
        | decide(abs(f - line.origin.f) < settings.tolerance_change)
    )
    if settings.wolfe:
        line = line._replace(t=where(found, t, line.t))
        run = run._replace(x=move(settings, run.x, line, found), line=line)
    run = run._replace(done=run.done | (found & stops))
    going = found & negate(stops)
    return run if going is False else turn(settings, run, f, g, going)


def turn(settings: Settings, run: Run, f: Number, g: Tensor, going: Condition) -> Run:
    """Choose the next line, from x, where the value is f and the gradient g."""
    line = run.line
    s, y = line.d * line.t, g - line.origin.g
    memory = remember(run.memory, s, y, settings.history_size, going)
    d, alphas = two_loop(-g, memory)
    first = smaller(1.0, 1.0 / total(g.abs())) * settings.lr
    t = where(decide(run.n_iter == 0), first, settings.lr)
    origin = Point(nought(t), f, g, dot(g, d))
    line = choose(going, Line(origin, d, largest(d), t, start(origin)), line)
    here, n_iter = run.here + going, run.n_iter + going
    level = going & decide(origin.slope > -settings.tolerance_change)
    x, done = run.x, run.done | level
    if not settings.wolfe:
        steps = going & negate(level)
        x = move(settings, x, line, steps)
        done = done | (steps & decide(here == settings.max_iter))
    return Run(x, line, memory, [] if is_column(t) else alphas, here, n_iter, run.evals, done)


def move(settings: Settings, x: Tensor, line: Line, going: Condition) -> Tensor:
    """The end of a line that starts at x, in the dtype of the parameters."""
    return x if going is False else where(going, settings.snap(axpy(line.t, line.d, x)), x)
