"""Monitoring of solvers: callbacks, which may stop them, and histories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core.calls import takes
from functional_optim.core.numbers import tensor_of
from functional_optim.core.ravel import Ravel
from functional_optim.solvers.slots import RUNNING, STOPPED


class IntermediateResult(NamedTuple):
    """The argument of a callback. With `batched=True` all fields have a leading dimension of
    problems, in the order of x0.

    Example::

        >>> import torch, functional_optim as fo
        >>> def callback(intermediate_result):
        ...     return intermediate_result.nit == 3  # stop
        >>> found = fo.minimize(lambda x: (x**4).sum(), torch.ones(2), callback=callback)
        >>> found.nit, found.status, found.message
        (3, -3, 'The callback stopped the search.')
    """

    x: Any
    """The current iterate, a tree like x0."""
    fun: Tensor
    """Its value: 0-dim, float64. For `least_squares` the cost, for `root` half the sum of squares.
    NaN for problems of a large batch that have not started."""
    nfev: Any
    """Evaluations of the function so far: an int, or a tensor (B,)."""
    nit: Any
    """Iterations so far: an int, or a tensor (B,)."""
    running: Any
    """Whether the search continues: a bool, or a bool tensor (B,)."""


class IterateHistory(NamedTuple):
    """All iterates, from x0 on. In a batch rows follow the dimension of problems, and a problem
    that has finished repeats its last row.

    Example::

        >>> import torch, functional_optim as fo
        >>> x0 = torch.ones(2, dtype=torch.float64)
        >>> found = fo.minimize(lambda x: (x**2).sum(), x0, return_history=True)
        >>> found.history.x.shape, found.history.fun[0]
        (torch.Size([3, 2]), tensor(2., dtype=torch.float64))
    """

    x: Any
    """A tree like x0: (nit + 1, ...), in a batch (B, largest nit + 1, ...)."""
    fun: Tensor
    """Their values, see `IntermediateResult`: (nit + 1,), in a batch (B, largest nit +
    1)."""


class Watch:
    """Looks at problems after each step of theirs.

    callback: gets an `IntermediateResult` after each iteration; or None. history: whether to store
    every iterate. look: from progress to points (B, n) and values (B,). x: the starting points.
    """

    def __init__(
        self, callback: Callable[[IntermediateResult], Any] | None, *, history: bool,
        look: Callable[[Any], tuple[Tensor, Tensor]], flat: Ravel, x: Tensor, batched: bool,
    ) -> None:  # fmt: skip
        if callback is not None and not callable(callback):
            raise TypeError(
                f"callback must be a function of an intermediate result, but got a "
                f"{type(callback).__name__}."
            )
        if callback is not None and not takes(callback, None):
            raise TypeError(
                "callback is called with one argument, callback(intermediate_result); write it "
                "with one, e.g. lambda result: result.fun < 1e-3."
            )
        self.callback, self.look, self.flat, self.batched = callback, look, flat, batched
        self.x = x.detach().clone()
        self.f = torch.full_like(x[:, 0], torch.nan, dtype=torch.float64)
        self.nit = torch.full_like(x[:, 0], -1, dtype=torch.int64)
        self.nfev, self.status = 0 * self.nit, 0 * self.nit + RUNNING
        self.stops = torch.zeros_like(self.nit, dtype=torch.bool)
        self.rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] | None = [] if history else None

    @property
    def seer(self) -> Callable[[Tensor, Any], Any] | None:
        """`see`, if there is a callback or a history."""
        return None if self.callback is None and self.rows is None else self.see

    def see(self, index: Tensor, s: Any) -> Any:
        """Look at problems `index`, (k,), and at the first k of what is known; what goes on of
        it."""
        count = len(index)
        x, f = self.look(s)
        moved = s.nit[:count] > self.nit[index]
        began = self.nit[index] < 0
        self.nit[index], self.nfev[index] = s.nit[:count], s.nfev[:count]
        self.status[index] = s.status[:count]
        which = moved.nonzero()[:, 0]
        if not len(which):
            return s
        at = index[which]
        self.x[at], self.f[at] = x[which], f[which]
        if self.rows is not None:
            self.rows.append((at, self.nit[at], self.x[at], self.f[at]))
        if self.callback is not None and bool((moved & ~began).any()):
            self.stops = self.stops | self._asked(self.callback)
        which = self.stops[index] & (s.status[:count] == RUNNING)
        if not bool(which.any()):
            return s
        status = s.status.clone()
        status[:count] = torch.where(which, STOPPED, status[:count])
        return s._replace(status=status)

    def _asked(self, callback: Callable[[IntermediateResult], Any]) -> Tensor:
        """Call the callback; which problems it stops, (B,)."""
        seen = IntermediateResult(
            self._tree(self.x.clone()), self.f.clone() if self.batched else self.f[0].clone(),
            self._number(self.nfev), self._number(self.nit.clamp(min=0)),
            self._number(self.status == RUNNING),
        )  # fmt: skip
        try:
            answer = callback(seen)
        except StopIteration:
            answer = True
        try:
            stops = tensor_of(False if answer is None else answer)
        except (TypeError, ValueError, RuntimeError):
            stops = self.f
        if stops.dtype != torch.bool or stops.shape not in ((), self.nit.shape):
            raise TypeError(
                f"the callback returned {answer!r}; return None, or True to stop, or in a batch a "
                "bool tensor with an element for each problem."
            )
        return stops.to(self.stops.device).expand_as(self.stops)

    def history(self) -> IterateHistory | None:
        """All iterates that were seen, or None if they are not kept."""
        if self.rows is None:
            return None
        length = int(self.nit.max()) + 1
        x = self.x.new_empty((len(self.x), length, self.x.shape[-1]))
        f = self.f.new_empty((len(self.x), length))
        for at, nit, points, values in self.rows:
            x[at, nit], f[at, nit] = points, values
        every = torch.arange(length, device=x.device).minimum(self.nit.unsqueeze(-1))
        numbers = torch.arange(len(x), device=x.device).unsqueeze(-1)
        x, f = x[numbers, every], f[numbers, every]
        return IterateHistory(self._trees(x), f if self.batched else f[0])

    def _trees(self, x: Tensor) -> Any:
        """Points (B, length, n) as a tree."""
        parts = x.split(self.flat.sizes, -1)
        shapes = [(*x.shape[:2], *shape) for shape in self.flat.shapes]
        leaves = [
            part.reshape(shape).to(p.dtype)
            for part, shape, p in zip(parts, shapes, self.flat.leaves, strict=True)
        ]
        return tree.with_leaves(
            self.flat.like, [leaf if self.batched else leaf[0] for leaf in leaves]
        )

    def _tree(self, x: Tensor) -> Any:
        return self.flat.tree(x if self.batched else x[0], stored=True)

    def _number(self, x: Tensor) -> Any:
        return x.clone() if self.batched else x[0].item()
