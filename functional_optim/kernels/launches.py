"""A loaded library that steps many tensors, and a call of it."""

from __future__ import annotations

import array
import ctypes
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_optim.kernels import watch
from functional_optim.kernels.graph import Unsuitable
from functional_optim.kernels.print_cpp import BLOCK, PARTS, Source

CHUNK = 1 << 13
"""Elements of a chunk of a tensor of several axes: few enough to stay in a core's cache."""

ALIGNED = 64
"""Bytes to which scratch memory is aligned."""


class Native:
    """A loaded library.

    name: under which it is kept. found: it was kept before, and not built by this process. source:
    what it was built from, which says how it is to be called.
    """

    def __init__(self, path: Path, symbol: str, source: Source, name: str, *, found: bool) -> None:
        self.name = name
        self.found = found
        self.source = source
        self.outputs = source.outputs
        library = ctypes.CDLL(str(path))
        self.call = getattr(library, symbol)
        self.call.restype = None
        self.call.argtypes = [ctypes.c_void_p]
        self.address: Any = ctypes.cast(self.call, ctypes.c_void_p).value


class Launch:
    """A library with the tensors that it goes over; one thread may call it at a time.

    Args:
        native: the library.
        sizes: of each tensor the sizes of the graph's axes.
        rows: for each tensor the addresses of the parameter and its slots.
        constants: for each tensor the constants that depend on its shape.
        threads: how many share the work.
        chunk: elements of a chunk.
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
    ) -> None:
        self.native = native
        count = len(sizes)
        self.rows = array.array("q")
        for row, own in zip(rows, constants, strict=True):
            self.rows.extend(row)
            self.rows.extend([struct.unpack("<q", struct.pack("<d", x))[0] for x in own])
        self.totals = array.array("d", bytes(8 * native.outputs))
        self.call = array.array("q", bytes(8 * 14))
        self.call[2], self.call[4] = self.rows.buffer_info()[0], count
        self.call[6], self.call[7] = threads, self.totals.buffer_info()[0]
        self.call[8] = READER
        self.address = self.call.buffer_info()[0]
        if native.source.blocks:
            self.table = _blocks([own[0] for own in sizes])
            self.call[0], self.call[1] = self.table.buffer_info()[0], len(self.table) // 3
        else:
            self._set_table(sizes, threads, chunk)

    def _set_table(self, sizes: Sequence[Sequence[int]], threads: int, chunk: int) -> None:
        entries = list(map(math.prod, sizes))
        # a thread that steps a large tensor alone is waited for
        limit = max(sum(entries) // (2 * threads), chunk) if threads > 1 else max(entries)
        order = sorted(range(len(sizes)), key=lambda i: -entries[i])
        large = sum(size > limit for size in entries)
        needed, self.table = [0], array.array("q")
        for own in sizes:
            row, last = self._row(own, chunk)
            self.table.extend(row)
            needed.append(last)
        alone = max([needed[1 + i] for i in order[large:]], default=0)
        together = max([needed[1 + i] for i in order[:large]], default=0)
        self.scratch = torch.empty(max(alone * threads, together) + ALIGNED, dtype=torch.uint8)
        at = -(-self.scratch.data_ptr() // ALIGNED) * ALIGNED
        self.order = array.array("q", order)
        self.call[0], self.call[1] = self.table.buffer_info()[0], large
        self.call[11], self.call[12] = self.order.buffer_info()[0], at
        self.call[13] = alone

    def _row(self, sizes: Sequence[int], chunk: int) -> tuple[list[int], int]:
        """A row of the table of tensors: sizes, rows of a chunk, chunks, and where each value lies
        in scratch memory; and how much of that there is."""
        first, inner = sizes[0], math.prod(sizes[1:])
        chunks = min(first, -(-first * inner // chunk))
        rows = -(-first // max(chunks, 1))
        chunks = -(-first // max(rows, 1))
        at, offsets = 0, []
        for width, axes, parts in self.native.source.layout:
            offsets.append(at)
            size = width * math.prod([n for i, n in enumerate(sizes) if axes >> i & 1])
            if parts == PARTS:
                size *= chunks
            at += -(-size // ALIGNED) * ALIGNED
        return [*sizes, rows, chunks, *offsets], at

    def ready(
        self, grads: list[Tensor], numbers: list[tuple[Any, ...]]
    ) -> Callable[[], tuple[float, ...]]:
        """The call, which this object must outlive: it returns the sums over all tensors.

        Args:
            grads: each tensor's gradient, plain tensors.
            numbers: of each rule.
        """
        if READER and watch.module is not None:
            launch, function = watch.module.launch, self.native.address
            return partial(launch, function, self.address, grads, numbers, True, self.native.outputs)
        return partial(self._through_ctypes, grads, numbers)

    def _through_ctypes(
        self, grads: list[Tensor], numbers: list[tuple[Any, ...]]
    ) -> tuple[float, ...]:
        vector = array.array("d", itertools.chain(*numbers))
        given = array.array("q", list(map(id if READER else Tensor.data_ptr, grads)))
        self.call[3], self.call[5] = given.buffer_info()[0], vector.buffer_info()[0]
        ctypes.memset(self.totals.buffer_info()[0], 0, 8 * len(self.totals))
        self.native.call(self.address)
        return tuple(self.totals)


def _blocks(sizes: Sequence[int]) -> array.array[int]:
    """Blocks that cover tensors of these sizes: of each one the index of its tensor, its first
    element and its length."""
    blocks = array.array("q")
    for i, size in enumerate(sizes):
        for at in range(0, size, BLOCK):
            blocks.extend((i, at, min(BLOCK, size - at)))
    return blocks


def _reader() -> int:
    """The address of torch's function from a tensor object to its data; 0 where this torch has
    none."""
    dynamo = getattr(torch._C, "_dynamo", None)
    guards = getattr(dynamo, "guards", None)
    return getattr(guards, "_torchinductor_pyobject_tensor_data_ptr", 0)


READER = _reader()


def compare(x: Tensor, expected: Tensor) -> None:
    """Raise Unsuitable unless a library has done what the rules do."""
    loose = 1e-2 if x.element_size() <= 2 else 1e-4
    if not torch.allclose(x, expected.reshape(x.shape), rtol=loose, atol=loose, equal_nan=True):
        raise Unsuitable("a library that does something else than the rule")
