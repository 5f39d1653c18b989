"""Solvers of many problems: as one program in C++, from a recording of one problem, or in slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core import modes
from functional_optim.kernels.drivers import DRIVERS
from functional_optim.kernels.lane_library import LaneLibrary, compiled
from functional_optim.kernels.node import Unsuitable
from functional_optim.kernels.tape import Tape, recorded
from functional_optim.solvers import slots
from functional_optim.solvers.compiled import in_blocks, key_of, used
from functional_optim.solvers.given import nodes_of
from functional_optim.solvers.slots import RUNNING

Evaluate = Callable[..., Tensor]
"""A user's function of one problem: `f(x, *args)`, of tensors without a dimension of problems."""

Make = Callable[[Evaluate], tuple[Callable[..., Any], Callable[..., Any]]]
"""From an evaluation to a start `start(x, data)` and a step `step(s, data)`, which both return the
state of problems: a NamedTuple of tensors."""


class Known(NamedTuple):
    """compiled: a solver's library, or None. calls: what its recording saw of the user's function.
    state: one of one problem."""

    compiled: LaneLibrary | None
    calls: Any
    state: Any


_known: OrderedDict[Any, Known] = OrderedDict()


def run(
    name: Any, solver: Any, rules: Any, problem: Any, x: Tensor, args: Any, data: Any,
    see: Callable[[Tensor, Any], Any] | None, size: int, *, compile: bool, whole: bool = False,
    library: bool = True,
) -> Any:  # fmt: skip
    """The final states of all problems, solved without autograd.

    Args:
        name: of the solver, in the keys of cached libraries and graphs.
        solver: a module with `start(rules, problem, x, data)` and `advance(rules, problem, s,
            data)`.
        rules: the settings of the solver.
        problem: a `Problem` or an `Objective`.
        x: (B, n).
        args: the arguments of the user's function.
        data: all data of the solver, also these arguments.
        see: as in `slots.run`.
        size: the number of elements of a problem.
        compile: compile a library; where none solves the problems, compile evaluations.
        whole: compile whole steps instead of evaluations.
        library: whether a library may solve the problems.
    """

    start, advance = solver.start, solver.advance

    def of(problem: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return (
            lambda x, own: start(rules, problem, x, own),
            lambda s, own: advance(rules, problem, s, own),
        )

    begin, step = of(problem)
    if compile:
        one = problem.one
        key = (name, key_of(problem.fun), one.layout, tree.structure(one.like), rules)
        make, single = (lambda evaluate: of(problem.of_one(evaluate))), problem.single
        found = solve(key, make, single, x, args, data, see) if library else None
        if found is not None:
            return found
        if whole:
            step = in_blocks(key, step)
        else:
            problem.graph = in_blocks(key[:-1], problem.together)
    alone = not problem.batched
    with torch.no_grad():
        most = 1 if alone else slots.capacity(size)
        return slots.run(begin, step, x, data, most, alone=alone, see=see)


@torch.no_grad()
def solve(
    key: Any,
    make: Make,
    evaluate: Evaluate,
    x: Tensor,
    args: Any,
    data: Any,
    see: Callable[[Tensor, Any], Any] | None,
) -> Any:
    """The final states of all problems; None, and nothing done, where no library solves them.

    Args:
        key: of the cached library.
        make: the solver.
        evaluate: the user's function.
        x: (B, n), contiguous.
        args: the arguments of evaluate, trees of tensors (B, ...).
        data: all data of the solver, trees of tensors (B, ...).
        see: as in `slots.run`.
    """
    leaves = tree.leaves(data)
    known_kind = x.device.type == "cpu" or x.device.type in DRIVERS
    if not known_kind or modes.intercepted() or any(a.device != x.device for a in leaves):
        return None
    now = _called(evaluate, x, args)
    if now is None:
        return None
    looks = [(a.dtype, a.shape[1:]) for a in (x, *leaves)]
    key = (key, x.device, tree.structure(data), *looks)
    known = _known.get(key)
    if known is None or known.calls != now.calls:
        known = _made(make, evaluate, x[:1], data, now)
        if known is None:  # a function that stores something when it is first called
            now = _called(evaluate, x, args) or now
            known = _made(make, evaluate, x[:1], data, now) or Known(None, now.calls, None)
        _known[key] = known
    used(_known, key)
    if known.compiled is None:
        return None
    run, states = known.compiled.run, known.compiled.states(len(x))
    states[0].copy_(x)
    run(states, leaves, now.captured, begins=True)
    s = tree.with_leaves(known.state, states)
    if see is None:
        run(states, leaves, now.captured, begins=False)
        return s
    index = torch.arange(len(x), device=x.device)
    s = see(index, s)
    while bool((s.status == RUNNING).any()):
        states = [a.contiguous() for a in tree.leaves(s)]
        run(states, leaves, now.captured, begins=False, most=1)
        s = see(index, tree.with_leaves(known.state, states))
    return s


def _called(evaluate: Evaluate, x: Tensor, args: Any) -> Tape | None:
    """What the user's function does for the first problem; None for what no library does.

    It tells whether a cached library still fits, and which tensors the function reads.
    """
    tape, own = Tape(), tree.leaves(args)
    value: Any = None

    def body(x: Tensor, *given: Tensor) -> Sequence[Tensor]:
        nonlocal value
        point = x[0].detach().requires_grad_()
        with torch.enable_grad():
            value = _captured(tape, evaluate)(point, *_first(args, given))
        return [value]

    try:
        (found,) = recorded(body, [x[:1].clone(), *[a[:1].clone() for a in own]], tape)
    except (Unsuitable, NotImplementedError):
        return None
    tape.calls.append(found.index)
    if _is_custom(value):
        tape.calls.append(object())  # its backward may do anything: it is recorded each time
    return tape


def _first(args: Any, leaves: Sequence[Tensor]) -> Any:
    """The arguments of the first problem."""
    return tree.with_leaves(args, [a[0] for a in leaves])


def _captured(tape: Tape, evaluate: Evaluate) -> Evaluate:
    def own(*given: Any) -> Tensor:
        with tape.capturing():
            return evaluate(*given)

    return own


def _is_custom(value: Any) -> bool:
    """Whether a torch.autograd.Function has made a value, or one that it depends on."""
    return any(isinstance(x, torch.autograd.function.BackwardCFunction) for x in nodes_of(value))


def _made(make: Make, evaluate: Evaluate, x: Tensor, data: Any, now: Tape) -> Known | None:
    """A library from the recordings of the first problem; None if they differ from `now`."""
    tapes = Tape(), Tape()
    start, _ = make(_captured(tapes[0], evaluate))
    _, step = make(_captured(tapes[1], evaluate))
    like: Any = None

    def begin(x: Tensor, *given: Tensor) -> Sequence[Tensor]:
        nonlocal like
        like = start(x, tree.with_leaves(data, [*given]))
        return tree.leaves(like)

    def advance(*given: Tensor) -> Sequence[Tensor]:
        count = len(tree.leaves(like))
        s, own = tree.with_leaves(like, [*given[:count]]), tree.with_leaves(data, [*given[count:]])
        return tree.leaves(step(s, own))

    def status() -> int:
        return next(i for i, a in enumerate(tree.leaves(like)) if a is like.status)

    data = tree.map(lambda a: a[:1].clone(), data)
    try:
        library = compiled(begin, advance, x.clone(), tree.leaves(data), tapes, status, RUNNING)
    except (Unsuitable, NotImplementedError):
        library = None
    if library is not None and not tapes[0].repeats(now):
        return None
    return Known(library, now.calls, like)
