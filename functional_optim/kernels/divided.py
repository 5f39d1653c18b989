"""A loaded library that steps the rows that this process has of tensors."""

from __future__ import annotations

import array
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from functional_optim.kernels.launches import ALIGNED, Launch
from functional_optim.kernels.libraries import Native

Combination = Literal["sum", "max", "min"]
"""How numbers of several processes become one."""

Combine = Callable[[Combination, Tensor], Callable[[], Tensor]]
"""Begins to put together what processes have in a vector, and returns a function that waits for the
result; all of them call it in the same order."""

Passes = Generator[None, None, tuple[float, ...]]
"""The passes of a launch, with a pause wherever the processes put numbers together: other passes
may run meanwhile. It returns the sums over all tensors."""


class DividedLaunch(Launch):
    """A launch whose tensors have their other rows in other processes.

    The passes of the library are called one by one. What is reduced over rows is put together in
    between, for all tensors at once. Each tensor has separate scratch memory, which lasts from one
    pass to the next; launches that run one after the other share it. Call `use` before `passes`.

    Args:
        combine: puts vectors of the processes together.
    """

    def __init__(
        self,
        native: Native,
        sizes: Sequence[Sequence[int]],
        rows: Sequence[Sequence[int]],
        constants: Sequence[Sequence[float]],
        threads: int,
        *,
        wholes: Sequence[int],
        combine: Combine,
    ) -> None:
        super().__init__(native, sizes, rows, constants, threads, wholes=wholes)
        self.combine = combine
        self.sizes = sizes
        self.phases: list[list[Total]] = [[]]

    @property
    def needed(self) -> int:
        """Bytes of scratch memory."""
        return sum([own for _, own, _ in self.table_rows]) + ALIGNED

    def use(self, memory: Tensor) -> None:
        """Take scratch memory: bytes, at least as many as are needed."""
        if not self.table_rows:
            return
        self.memory = memory
        base = memory.data_ptr()
        at = [*accumulate([own for _, own, _ in self.table_rows[:-1]], initial=-base % ALIGNED)]
        self.homes = array.array("q", [base + x for x in at])
        self.call[16] = self.homes.buffer_info()[0]
        source = self.native.source
        offsets = [row[0][source.sizes + 3 :] for row in self.table_rows]
        self.phases = []
        for kept in source.totals:
            found: dict[tuple[Combination, torch.dtype], Total] = {}
            for own in kept:
                how: Any = own.combined
                dtype = own.dtype
                assert own.place is not None
                total = found.setdefault((how, dtype), Total(how))
                for i, size in enumerate(self.sizes):
                    first = at[i] + offsets[i][own.place]
                    count = torch.Size([size[k] for k in own.axes]).numel()
                    view = memory[first : first + count * dtype.itemsize].view(dtype)
                    total.add(view, empty=size[0] == 0)
            self.phases.append([*found.values()])

    def passes(self, grads: list[Tensor], scalars: Any) -> Passes:
        """The passes of a step. grads: this process's rows."""
        return self._run(self.ready(grads, scalars))

    def _run(self, run: Callable[[], tuple[float, ...]]) -> Passes:
        found: tuple[float, ...] = ()
        for phase, totals in enumerate(self.phases):
            self.call[15] = -1 if len(self.phases) == 1 else phase
            found = run()
            waiting = [total.begin(self.combine) for total in totals]
            if waiting:
                yield
            for total, wait in zip(totals, waiting, strict=True):
                total.complete(wait())
        return found


class Total:
    """Values of tensors that processes put together: where each of them is, in memory."""

    def __init__(self, how: Combination) -> None:
        self.how: Combination = how
        self.views: list[Tensor] = []
        self.sizes: list[int] = []
        self.empty: list[Tensor] = []

    def add(self, view: Tensor, *, empty: bool) -> None:
        """One more. empty: whether this process has no row that counts."""
        self.views.append(view)
        self.sizes.append(len(view))
        if empty and self.how != "sum":
            self.empty.append(view)

    def begin(self, combine: Combine) -> Callable[[], Tensor]:
        """Begin to put together what the processes have."""
        for view in self.empty:
            limit = torch.inf if view.is_floating_point() else torch.iinfo(view.dtype).max
            view.fill_(limit if self.how == "min" else -limit)
        return combine(self.how, torch.cat(self.views))

    def complete(self, whole: Tensor) -> None:
        """Replace what this process has by what all have together."""
        torch.split_with_sizes_copy(whole, self.sizes, out=self.views)
