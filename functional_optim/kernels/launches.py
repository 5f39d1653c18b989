"""A loaded library that steps many tensors, and a call of it."""

from __future__ import annotations

import array
import ctypes
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from functional_optim.kernels import watch
from functional_optim.kernels.libraries import Native
from functional_optim.kernels.print_cpp import BLOCK, LOCAL, PARTS
from functional_optim.kernels.private import data_reader as READER

CHUNK = 1 << 13
"""Elements of a chunk of a tensor of several axes: few enough to stay in a core's cache."""

PER_BYTE = 4
"""Elements, at least, that a chunk has for each byte that it leaves, such as a sum of each column:
the chunks' parts are written, and read once more, so they should be few."""

ALIGNED = 64
"""Bytes to which scratch memory is aligned."""


TableRow = tuple[list[int], int, int]
"""A row of the table of tensors, the bytes of scratch memory that the tensor needs, and those that
each thread needs for it."""


class Launch:
    """A library with the tensors that it goes over; one thread may call it at a time.

    Args:
        native: the library.
        sizes: of each tensor the sizes of the graph's axes.
        rows: for each tensor the addresses of the parameter and its slots.
        constants: for each tensor the constants that depend on its shape.
        threads: how many share the work.
        chunk: elements of a chunk.
        wholes: for each tensor the rows that it has in all processes together.
    """

    def __init__(
        self,
        native: Native,
        sizes: Sequence[Sequence[int]],
        rows: Sequence[Sequence[int]],
        constants: Sequence[Sequence[float]],
        threads: int,
        *,
        chunk: int = CHUNK,
        wholes: Sequence[int] | None = None,
    ) -> None:
        self.native = native
        self.wholes = [own[0] for own in sizes] if wholes is None else wholes
        self.table_rows: list[TableRow] = []  # none for a library without phases
        self.scratch = torch.empty(0, dtype=torch.uint8, device="cpu")
        count = len(sizes)
        self.rows = array.array("q")
        for row, own in zip(rows, constants, strict=True):
            self.rows.extend(row)
            self.rows.extend([struct.unpack("<q", struct.pack("<d", x))[0] for x in own])
        self.totals = array.array("d", bytes(8 * native.source.outputs))
        self.call = array.array("q", bytes(8 * 17))
        self.call[15] = -1
        self.call[2], self.call[4] = self.rows.buffer_info()[0], count
        self.call[6], self.call[7] = threads, self.totals.buffer_info()[0]
        self.call[8], self.call[9] = READER, TEAM
        self.address = self.call.buffer_info()[0]
        if native.source.blocks:
            self.table = _blocks([own[0] for own in sizes])
            self.call[0], self.call[1] = self.table.buffer_info()[0], len(self.table) // 3
        else:
            self._set_table(sizes, threads, chunk)
        several = self.call[1] if native.source.blocks else count
        self.parts = array.array("q", bytes(8 * (native.source.outputs * several + count)))
        self.call[10] = self.parts.buffer_info()[0]

    def _set_table(self, sizes: Sequence[Sequence[int]], threads: int, chunk: int) -> None:
        """Make the table of tensors, and scratch memory."""
        entries = [math.prod(own[: len(self.native.source.graph.sizes)]) for own in sizes]
        # a thread that steps a large tensor alone is waited for
        limit = max(sum(entries) // (2 * threads), chunk) if threads > 1 else max(entries)
        order = sorted(range(len(sizes)), key=lambda i: -entries[i])
        large = sum(size > limit for size in entries)
        self.table_rows = rows = [self._row(i, own, chunk) for i, own in enumerate(sizes)]
        self.table = array.array("q", [x for row, _, _ in rows for x in row])
        alone = max([rows[i][1] for i in order[large:]], default=0)
        together = max([rows[i][1] for i in order[:large]], default=0)
        own = max([row[2] for row in rows])
        needed = own * threads + max(alone * threads, together) + ALIGNED
        self.scratch = torch.empty(needed, dtype=torch.uint8, device="cpu")
        self.order = array.array("q", order)
        self.call[0], self.call[1] = self.table.buffer_info()[0], large
        self.call[11] = self.order.buffer_info()[0]
        self.call[12] = -(-self.scratch.data_ptr() // ALIGNED) * ALIGNED
        self.call[13], self.call[14] = alone, own

    def _row(self, i: int, sizes: Sequence[int], chunk: int) -> TableRow:
        """A row of the table of tensors: sizes, rows of a chunk, chunks, rows of all processes, and
        where each value lies in scratch memory; how much of that the tensor needs, and how much
        each thread."""
        axes = len(self.native.source.graph.sizes)
        first, inner = sizes[0], math.prod(sizes[1:axes])
        bytes_of = [
            (kind, width * math.prod([n for i, n in enumerate(sizes[:axes]) if mask >> i & 1]))
            for width, mask, kind in self.native.source.layout
        ]
        left = sum([size for kind, size in bytes_of if kind == PARTS])
        chunk = max(chunk, left * PER_BYTE * chunk // CHUNK)
        chunks = min(first, -(-first * inner // chunk))
        rows = -(-first // max(chunks, 1))
        chunks = -(-first // max(rows, 1))
        offsets: list[int] = []
        used = [0, 0]
        for kind, size in bytes_of:
            local = kind == LOCAL
            offsets.append(used[local])
            if kind == PARTS:
                size *= chunks
            used[local] += -(-size // ALIGNED) * ALIGNED
        return [*sizes, rows, chunks, self.wholes[i], *offsets], used[0], used[1]

    def ready(self, grads: list[Tensor], scalars: Any) -> Callable[[], tuple[float, ...]]:
        """`bound` with the scalars of a step."""
        return self.bound(grads, scalars.numbers)

    def bound(
        self, grads: list[Tensor], numbers: list[tuple[Any, ...]]
    ) -> Callable[[], tuple[float, ...]]:
        """The call, which this object must outlive: it returns the sums over all tensors.

        Args:
            grads: each tensor's gradient, plain tensors.
            numbers: of each rule, in tuples, which may hold tuples.
        """
        if READER and watch.module is not None:
            launch, function, outputs = watch.module.launch, self.native.address, len(self.totals)
            return partial(launch, function, self.address, grads, numbers, outputs)
        return partial(self._through_ctypes, grads, numbers)

    def _through_ctypes(
        self, grads: list[Tensor], numbers: list[tuple[Any, ...]]
    ) -> tuple[float, ...]:
        vector = array.array("d", list(_flat(numbers)))
        given = array.array("q", list(map(id if READER else Tensor.data_ptr, grads)))
        self.call[3], self.call[5] = given.buffer_info()[0], vector.buffer_info()[0]
        ctypes.memset(self.totals.buffer_info()[0], 0, 8 * len(self.totals))
        self.native.call(self.address)
        return tuple(self.totals)


class Together:
    """What runs a task for all tensors of a group.

    Args:
        runners: of some tensors each.
        written: the tensors whose versions a step raises, as it writes past autograd.
        explain: called where something raises; it may raise a better error.
    """

    def __init__(
        self, runners: Sequence[Any], written: list[Tensor], explain: Callable[[], None]
    ) -> None:
        self.runners = runners
        self.written = written
        self.explain = explain

    def step(self, grads: list[Tensor], scalars: Any) -> list[Callable[[], object]]:
        """The step of every tensor and its slots, in place, as writes that are ready to be made."""
        try:
            writes = [one for x in self.runners for one in x.step(grads, scalars)]
        except Exception:
            self.explain()
            raise
        if self.written:
            increment_version(self.written)
        return writes

    def measure(self, grads: list[Tensor], scalars: Any) -> list[Sequence[Any]]:
        """What the last of the rules measures, in parts still to be summed."""
        try:
            return [part for x in self.runners for part in x.measure(grads, scalars)]
        except Exception:
            self.explain()
            raise


@dataclass(eq=False, repr=False)
class Launches:
    """The launches of a task: over all its tensors, or over those of a kind each.

    Args:
        found: each launch, with the indices of its tensors among those of the task.
        members: the indices of the task's gradients among those that are handed over; None: they
            are all of them, in this order.
        readable: turns gradients into such whose memory is what they say, laid out as their
            parameters are; None: they are so.
    """

    found: Sequence[tuple[list[int], Any]]
    members: list[int] | None
    readable: Callable[[list[Tensor]], list[Tensor]] | None

    def __post_init__(self) -> None:
        self.only = self.found[0][1] if len(self.found) == 1 else None

    def step(self, grads: list[Tensor], scalars: Any) -> list[Callable[[], tuple[float, ...]]]:
        """The calls, which return what they measure. scalars: those of the step."""
        if self.members is not None:
            grads = [grads[i] for i in self.members]
        if self.readable is not None:
            grads = self.readable(grads)
        if self.only is not None:
            return [self.only.ready(grads, scalars)]
        return [one.ready([grads[i] for i in own], scalars) for own, one in self.found]

    def measure(self, grads: list[Tensor], scalars: Any) -> list[tuple[float, ...]]:
        """What the calls measure, in parts still to be summed."""
        return [one() for one in self.step(grads, scalars)]


def _flat(numbers: Sequence[Any]) -> Iterator[float]:
    for x in numbers:
        yield from _flat(x) if isinstance(x, tuple) else (x,)


def _blocks(sizes: Sequence[int]) -> array.array[int]:
    """Blocks that cover tensors of these sizes: of each one the index of its tensor, its first
    element and its length."""
    blocks = array.array("q")
    for i, size in enumerate(sizes):
        for at in range(0, size, BLOCK):
            blocks.extend((i, at, min(BLOCK, size - at)))
    return blocks


def _team() -> int:
    """The address of the function that runs another one in threads of torch's OpenMP runtime,
    whose library is among those that any other one sees; 0 if there is none."""
    found = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return ctypes.cast(found, ctypes.c_void_p).value or 0 if found is not None else 0


TEAM = _team()
