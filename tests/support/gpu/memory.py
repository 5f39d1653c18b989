"""The memory that a simulated kernel may touch, which is this process's own."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import torch

Array = np.ndarray

FIRST = 1 << 16
"""No address below it belongs to anything."""

DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""An array's dtype for accesses of so many bytes; complex128 only moves 16 of them at once."""

_bytes = np.frombuffer((ctypes.c_uint8 * (1 << 56)).from_address(FIRST), dtype=np.uint8)
SPACE = {size: _bytes.view(dtype) for size, dtype in DTYPES.items()}
"""All of the address space as one array, which is indexed only by addresses that were checked."""


@dataclass
class Range:
    """Bytes that may be touched. `read` and `written` count how many of them were, by kernels."""

    start: int
    end: int
    writable: bool
    read: int = 0
    written: int = 0


class Memory:
    """The ranges that may be touched. Everything else is an error.

    One instruction of one block counts an address once, however many of its threads touch it.
    """

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self._kept: list[object] = []
        self._starts = self._ends = np.zeros(0, np.uint64)
        self._writable = np.zeros(0, bool)

    @property
    def read(self) -> int:
        return sum(one.read for one in self.ranges)

    @property
    def written(self) -> int:
        return sum(one.written for one in self.ranges)

    def allow(self, address: int, size: int, writable: bool = True) -> Range | None:
        """Permits `size` bytes from `address` on. What overlaps must have been permitted whole."""
        if size == 0:
            return None
        at = bisect_right([one.start for one in self.ranges], address)
        if at and address + size <= self.ranges[at - 1].end:
            if self.ranges[at - 1].writable != writable:
                raise ValueError(f"{address:#x} is allowed both for writing and for reading only.")
            return self.ranges[at - 1]
        before = at and self.ranges[at - 1].end > address
        if before or (at < len(self.ranges) and self.ranges[at].start < address + size):
            raise ValueError(f"{size} bytes at {address:#x} overlap a range that is allowed.")
        self.ranges.insert(at, Range(address, address + size, writable))
        self._starts = np.array([one.start for one in self.ranges], np.uint64)
        self._ends = np.array([one.end for one in self.ranges], np.uint64)
        self._writable = np.array([one.writable for one in self.ranges])
        return self.ranges[at]

    def allow_tensor(self, tensor: torch.Tensor, writable: bool = True) -> Range | None:
        """Permits a tensor's elements, and what lies between them; the tensor is kept alive."""
        self._kept.append(tensor)
        if tensor.numel() == 0:
            return None
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return self.allow(tensor.data_ptr(), (last + 1) * tensor.element_size(), writable)

    def load(self, addresses: Array, active: Array | None, blocks: Array, size: int) -> Array:
        """What lies at each address, `size` bytes wide; 0 where no thread is active.

        `addresses` is [blocks, threads]; an axis of length 1 stands for all blocks or threads.
        """
        at, counts = self._check(addresses, active, blocks, size, "read")
        for one, count in _totals(at, counts):
            self.ranges[one].read += count
        shift = size.bit_length() - 1
        if active is None:
            return SPACE[size].take(_index(addresses, shift))
        out = np.zeros(active.shape, DTYPES[size])
        out[active] = SPACE[size].take(_index(addresses[active], shift))
        return out

    def store(self, addresses: Array, active: Array | None, blocks: Array, values: Array) -> None:
        """Writes `values` [blocks, threads] where threads are active."""
        size = values.itemsize
        at, counts = self._check(addresses, active, blocks, size, "write")
        if not self._writable[at].all():
            bad = self.ranges[at[int(np.argmin(self._writable[at]))]]
            raise MemoryError(f"A write into {bad.start:#x}, which may only be read.")
        for one, count in _totals(at, counts):
            self.ranges[one].written += count
        index = _index(addresses, size.bit_length() - 1)
        if active is None:
            SPACE[size][index] = values
        else:
            SPACE[size][index[active]] = values[active]

    def _check(
        self, addresses: Array, active: Array | None, blocks: Array, size: int, what: str
    ) -> tuple[Array, Array]:
        """Indices of the ranges, and how many bytes of each are touched."""
        wrong = (addresses & np.uint64(size - 1)) != 0
        if active is not None:
            wrong &= active
        if wrong.any():
            bad = int(addresses[wrong][0])
            raise MemoryError(f"A {what} of {size} bytes at {bad:#x} is misaligned.")
        low, high = _span(addresses, active)
        at = np.searchsorted(self._starts, low, side="right") - 1
        touched = low <= high
        ends = self._ends[at] if len(self._ends) else np.zeros_like(low)
        inside = (at >= 0) & (high + np.uint64(size) <= ends)
        if (inside | ~touched).all():
            counts = _distinct(addresses, active) * size
            return at[touched], counts[touched]
        if addresses.shape[1] > 1:
            return self._check_lanes(addresses, active, blocks, size, what)
        bad = int(low[~inside & touched][0])
        raise MemoryError(f"A {what} of {size} bytes at {bad:#x} is outside of every range.")

    def _check_lanes(
        self, addresses: Array, active: Array | None, blocks: Array, size: int, what: str
    ) -> tuple[Array, Array]:
        """Where the threads of a block touch several ranges: every thread by itself."""
        blocks = np.broadcast_to(blocks, addresses.shape)
        if active is None:
            active = np.ones(addresses.shape, bool)
        pairs = np.stack([blocks[active].astype(np.uint64), addresses[active]])
        of_each = np.unique(pairs, axis=1)
        return self._check(of_each[1].reshape(-1, 1), None, of_each[0].reshape(-1, 1), size, what)


def _index(addresses: Array, shift: int) -> Array:
    return ((addresses - np.uint64(FIRST)) >> np.uint64(shift)).view(np.int64)


def _totals(at: Array, counts: Array) -> list[tuple[int, int]]:
    sums = np.bincount(at, counts)
    return [(int(one), int(sums[one])) for one in np.flatnonzero(sums)]


def _span(addresses: Array, active: Array | None) -> tuple[Array, Array]:
    """The lowest and the highest address of each block; low above high where none is active."""
    if active is None:
        return addresses.min(axis=1), addresses.max(axis=1)
    low = np.where(active, addresses, np.uint64(2**64 - 1)).min(axis=1)
    return low, np.where(active, addresses, np.uint64(0)).max(axis=1)


def _distinct(addresses: Array, active: Array | None) -> Array:
    """How many addresses the threads of each block touch."""
    if addresses.shape[1] == 1:
        every = np.ones(len(addresses), np.int64)
        return every if active is None else active[:, 0].astype(np.int64)
    if active is None:
        if (addresses[:, 1:] > addresses[:, :-1]).all():
            return np.full(len(addresses), addresses.shape[1])
        active = np.ones(addresses.shape, bool)
    row, touched = active.nonzero()[0], addresses[active]
    if ((touched[1:] > touched[:-1]) | (row[1:] != row[:-1])).all():
        return active.sum(axis=1)
    return np.array([len(np.unique(of[on])) for of, on in zip(addresses, active, strict=True)])
