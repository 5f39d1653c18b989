"""The tables on a device that Triton kernels go over, and the launches of a step."""

from __future__ import annotations

import array
import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.kernels.drivers import DRIVERS, CaptureError, Launcher
from functional_optim.kernels.node import Unsuitable
from functional_optim.kernels.print_triton import Pass, TritonSource, how
from functional_optim.kernels.triton_primitives import DEEP, WIDE, join_text
from functional_optim.kernels.triton_spaces import tile_of

LIMIT = (1 << 31) - 4096
"""Elements that kernels count in 32 bits."""

ALIGNMENT = 16
"""Bytes at a multiple of which a tensor begins whose elements can be read several at once."""


def uploaded(values: array.array[int], device: torch.device, here: Tensor | None = None) -> Tensor:
    """Integers as a tensor on a device, by way of pinned memory that holds nothing else until the
    copy is done. here: that memory."""
    here = DRIVERS[device.type].pinned(len(values)) if here is None else here
    here.copy_(torch.tensor(values, dtype=torch.int64, device="cpu"))
    return here.to(device, non_blocking=True)


class Gradients:
    """The addresses of the gradients of some tensors, as a vector on a device.

    It is rewritten where one has changed, into new memory: a kernel of an earlier step
    may still be reading the last one. count: of the tensors.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.driver = DRIVERS[device.type]
        self.device = device
        self.count = count
        self.known: list[int] = []
        self.there: Tensor | None = None
        self.spare: Tensor | None = None
        self.recorded: list[tuple[list[int], Tensor, Tensor]] = []
        """What captured steps read: the addresses, and the memory on both sides of the copy."""

    def address(self, addresses: list[int]) -> int:
        """Where these addresses are on the device."""
        if self.driver.capturing():
            return self._recorded(addresses).data_ptr()
        if self.spare is None:
            self.spare = self.driver.pinned(self.count)
        if self.there is None or addresses != self.known:
            self.there = uploaded(array.array("q", addresses), self.device)
            self.known = addresses
        return self.there.data_ptr()

    def _recorded(self, addresses: list[int]) -> Tensor:
        """The vector in a captured step. A copy that is captured has not been made, so steps that
        are not captured must not read it; and no memory can be pinned meanwhile."""
        if self.there is not None and addresses == self.known:
            self.recorded.append((addresses, self.there, self.there))
            return self.there
        if not self.recorded or self.recorded[-1][0] != addresses:
            here, self.spare = self.spare, None
            here = self.driver.pinned(self.count) if here is None else here
            there = uploaded(array.array("q", addresses), self.device, here)
            self.recorded.append((addresses, here, there))
        return self.recorded[-1][2]


class Join(NamedTuple):
    """A launch that puts together what programs have left. how: sum, max or min. tile: of
    `join_text`. entries: of source, target, and the sizes of both axes; the target of a result of
    the step is an offset."""

    how: str
    tile: tuple[int, int]
    entries: list[tuple[int, int, int, int]]


class Stage(NamedTuple):
    """Where the work of a launch is on the device. parts: for each kernel whether it takes aligned
    tensors, its programs' table, and how many they are. joins: what follows it, in the same way,
    and where its entries are."""

    parts: list[tuple[bool, int, int]]
    joins: list[tuple[Launcher, int, int, int]]


class Tables:
    """Tensors that the launches of a graph go over.

    Args:
        source: the launches.
        device: of the tensors, which must outlive this.
        sizes: of each tensor the sizes of the graph's axes.
        rows: for each tensor the addresses of the parameter and its slots.
        constants: for each tensor the constants that depend on its shape.
    """

    def __init__(
        self,
        source: TritonSource,
        device: torch.device,
        sizes: Sequence[Sequence[int]],
        rows: Sequence[Sequence[int]],
        constants: Sequence[Sequence[float]],
    ) -> None:
        self.source = source
        self.device = device
        self.sizes = sizes
        self.even = [not any(x % ALIGNMENT for x in row) for row in rows]
        if any(self._largest(own, i) >= LIMIT for own in source.passes for i in range(len(sizes))):
            raise Unsuitable("a dimension of more than 2³¹ elements")
        self.odd: list[int] | None = None
        self.stages: list[Stage] = []
        self.alignments: set[bool] = set()
        """Whether there are aligned tensors, and whether there are others."""
        self.counts = [
            [self._across(own, i) * self._parts(own, i) for i in range(len(sizes))]
            for own in source.passes
        ]
        places, joins, needed = self._laid_out()
        self.scratch = torch.zeros(needed, dtype=torch.float64, device=device)
        base = self.scratch.data_ptr()
        table = array.array("q")
        for size, row, some, at in zip(sizes, rows, constants, places, strict=True):
            table.extend([*size, *row, *map(_bits, some), *[base + 8 * x for x in at]])
        self.joins: list[list[tuple[Join, int]]] = []
        """For each launch those that follow it, and where their entries are in the table."""
        for own, found in zip(source.passes, joins, strict=True):
            self.joins.append([])
            for join in found:
                self.joins[-1].append((join, len(table)))
                for parts, target, count, length in join.entries:
                    at = 8 * target + (0 if own.found else base)
                    table.extend([base + 8 * parts, at, count, length])
        self.table = uploaded(table, device)

    def _elements(self, i: int, axes: Sequence[int]) -> int:
        """How many elements a tensor has on some axes."""
        if self.source.graph.block and axes:
            return self.sizes[i][-1]
        return math.prod([self.sizes[i][axis] for axis in axes])

    def _largest(self, own: Pass, i: int) -> int:
        """The most elements of a tensor that a kernel counts in 32 bits."""
        if own.kept:
            gone = [axis for axis in own.domain if axis not in own.kept]
            return max(self._elements(i, own.kept), self._elements(i, gone))
        several = len(own.domain) > 1 and not self.source.graph.block
        return max([self.sizes[i][axis] for axis in own.domain]) if several else 0

    def _across(self, own: Pass, i: int) -> int:
        """How many programs go over what is kept."""
        if not own.kept:
            return 1
        return -(-self._elements(i, own.kept) // tile_of(own.domain, own.kept).kept)

    def _parts(self, own: Pass, i: int) -> int:
        """How many programs share what is put together."""
        gone = [axis for axis in own.domain if axis not in own.kept]
        chunk = tile_of(own.domain, own.kept).chunk if own.kept else self.source.chunk
        return -(-self._elements(i, gone) // chunk)

    def _laid_out(self) -> tuple[list[list[int]], list[list[Join]], int]:
        """Where what is reduced lies in the scratch memory, for each tensor; the joins of each
        launch; and the size of that memory, in numbers."""
        places: list[list[int]] = [[] for _ in self.sizes]
        every: list[list[Join]] = []
        size = 0
        for own, counts in zip(self.source.passes, self.counts, strict=True):
            joins: dict[str, Join] = {}
            for node in own.reduced:
                for i, mine in enumerate(places):
                    parts, length = self._parts(own, i), self._elements(i, node.axes)
                    target = source = size
                    size += length
                    if parts > 1:
                        source, size = size, size + parts * length
                        join = Join(how(node), WIDE if own.kept else DEEP, [])
                        entry = (source, target, parts, length)
                        joins.setdefault(join.how, join).entries.append(entry)
                    mine += [target, source]
            for i, _ in own.found:
                join = joins.setdefault("sum", Join("sum", DEEP, []))
                join.entries.append((size, i, sum(counts), 1))
                for mine, count in zip(places, counts, strict=True):
                    mine.append(size)
                    size += count
            every.append(list(joins.values()))
        return places, every, size

    def divide(self, grads: Sequence[int]) -> None:
        """Divide the work: unaligned tensors have separate kernels. grads: the
        addresses of the gradients.

        Raises:
            CaptureError: in a capture, if that would be another division than before.
        """
        odd = [i for i, even in enumerate(self.even) if not even or grads[i] % ALIGNMENT]
        if odd == self.odd:
            return
        if DRIVERS[self.device.type].capturing():
            raise CaptureError(
                "a step is being captured whose gradients begin at other multiples of bytes than "
                "those of the step before, which divides the work again; make a step with "
                "gradients like these before."
            )
        among, values = set(odd), array.array("q")
        stages: list[Stage] = []
        for own, counts, joins in zip(self.source.passes, self.counts, self.joins, strict=True):
            stages.append(Stage([], []))
            for even in (True, False):
                first = len(values)
                for i, count in enumerate(counts):
                    if (bool(own.kept) or i not in among) is even:
                        values.extend(range(i << 32, (i << 32) + count))
                if len(values) > first:
                    stages[-1].parts.append((even, first, len(values) - first))
            for join, entries in joins:
                first = len(values)
                for i, (_, _, _, length) in enumerate(join.entries):
                    values.extend(range(i << 32, (i << 32) + -(-length // join.tile[1])))
                launch = joining(join.how, join.tile, self.device)
                stages[-1].joins.append((launch, first, len(values) - first, entries))
        self.chunks = uploaded(values, self.device)
        self.stages = stages
        self.alignments = {even for stage in stages for even, _, _ in stage.parts}
        self.odd = odd

    def run(
        self,
        launchers: dict[bool, list[Launcher]],
        grads: int,
        numbers: Sequence[Any],
        skip: Tensor | None,
        alive: Any = None,
    ) -> Sequence[Tensor]:
        """Make all launches; returns the results, summed over all tensors.

        Args:
            launchers: the kernels of aligned tensors, and those of others.
            grads: where the addresses of the gradients are on the device.
            numbers: those of the step, as values or tensors of no dimensions.
            skip: a float32 that says whether all is left out.
            alive: what must not be freed before.
        """
        count = len(self.source.graph.results)
        totals = torch.empty(count, dtype=torch.float64, device=self.device) if count else None
        chunks, rows = self.chunks.data_ptr(), self.table.data_ptr()
        args = [x.data_ptr() if isinstance(x, Tensor) else x for x in numbers]
        for k, (own, stage) in enumerate(zip(self.source.kernels, self.stages, strict=True)):
            given = [rows, grads, *[args[i] for i in own.numbers]]
            if skip is not None and own.own.stores:
                given.append(skip.data_ptr())
            for even, first, programs in stage.parts:
                launchers[even][k](programs, [chunks + 8 * first, *given])
            base = totals.data_ptr() if own.own.found and totals is not None else 0
            for launch, first, programs, entries in stage.joins:
                launch(programs, [chunks + 8 * first, rows + 8 * entries, base])
        return () if totals is None else totals.unbind()


def _bits(x: float) -> int:
    """A float64 as an integer."""
    return struct.unpack("<q", struct.pack("<d", x))[0]


@functools.cache
def joining(how: str, tile: tuple[int, int], device: torch.device) -> Launcher:
    """The kernel that puts parts together, on a device."""
    return DRIVERS[device.type].load(join_text(how, tile), device)
