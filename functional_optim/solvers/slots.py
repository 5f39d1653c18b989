"""The loop of all solvers: a batch of many problems, each in a separate slot.

A finished problem does not change. Waiting problems get the slots of finished ones, or these are
dropped, once a quarter of the slots is free. Problems do not affect each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.solvers.residuals import LIMIT

RUNNING, EMPTY = 10, 11
"""Internal values of `status`: of a running problem, and of an empty slot."""

STOPPED = -3
"""The `status` of a problem that a callback has stopped."""

ROWS = 16
"""Problems are evaluated in multiples of this: for the last elements of a tensor, fewer than two
vectors, torch may use other instructions."""

S = TypeVar("S", bound=Any)


def capacity(size: int) -> int:
    """The number of problems that are evaluated together, from the elements of each."""
    return max(ROWS, LIMIT // size // ROWS * ROWS)


def run(
    start: Callable[[Tensor, Any], S],
    step: Callable[[S, Any], S],
    x0: Tensor,
    data: Any,
    capacity: int,
    *,
    alone: bool,
    see: Callable[[Tensor, S], S] | None = None,
) -> S:
    """Solve all problems.

    Args:
        start: from points and data of some problems to their states: a tree of tensors with a
            leading dimension of problems, with a field `status`, which is RUNNING until the end.
        step: makes a step of the running problems, and does not change others.
        x0: (B, n).
        data: the data of each problem, a tree of tensors (B, ...).
        capacity: maximum number of problems that are evaluated together.
        alone: whether there is one problem, so that no slots are kept for others.
        see: gets, after each step, the indices of the problems in the first slots, (k,), and the
            states of all slots; returns the new states.
    """
    total = x0.shape[0]
    least = 1 if alone else ROWS

    def begin(first: int, last: int) -> tuple[S, Any, Tensor]:
        index = torch.arange(first, last, device=x0.device)
        own = tree.map(lambda x: x[first:last], (x0, data))
        x, mine = _filled(own, -(last - first) % least)
        s, mine = tree.map(lambda x: x[: last - first], (start(x, mine), mine))
        return s if see is None else see(index, s), mine, index

    taken = min(capacity, total)
    now, mine, index = begin(0, taken)
    results = tree.map(lambda x: x.new_empty((total, *x.shape[1:])), now)
    now, mine = _with_empty(now, mine, -now.status.shape[0] % least)
    while True:
        ended = now.status < RUNNING
        slots, waiting = ended.shape[0], total - taken
        left = len(index) - int(ended.sum())
        fewer = left + -left % least
        if not left or 4 * (left if waiting else fewer) <= 3 * slots:
            used = ended[: len(index)]
            done = used.nonzero()[:, 0]
            for target, x in zip(tree.leaves(results), tree.leaves(now), strict=True):
                target[index[done]] = x[done]
            kept = (~used).nonzero()[:, 0]
            now, mine = tree.map(lambda x, i=kept: x[i], (now, mine))
            index = index[kept]
            more = min(waiting, capacity - len(index))
            if more:
                new, own, numbers = begin(taken, taken + more)
                taken += more
                now, mine = tree.map(lambda a, b: torch.cat([a, b]), (now, mine), (new, own))
                index = torch.cat([index, numbers])
            if not len(index):
                return results
            now, mine = _with_empty(now, mine, -len(index) % least)
        now = step(now, mine)
        if see is not None:
            now = see(index, now)


def _filled(trees: Any, more: int) -> Any:
    """Trees padded with copies of the first problem."""
    if not more:
        return trees
    return tree.map(lambda x: torch.cat([x, x[:1].expand(more, *x.shape[1:])]), trees)


def _with_empty(s: Any, data: Any, more: int) -> tuple[Any, Any]:
    """The same, padded with empty slots."""
    s, data = _filled((s, data), more)
    if more:
        s = s._replace(status=torch.cat([s.status[:-more], s.status.new_full((more,), EMPTY)]))
    return s, data
