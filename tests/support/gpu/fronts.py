"""Threads that stand at the same instruction, with their registers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gpu.kinds import resize
from gpu.memory import Memory

Array = np.ndarray

LOCAL = 1 << 60
"""Where the local memory of every thread begins, as seen by generic addresses."""


@dataclass
class Launch:
    """What all threads of a run share. `shared` is [blocks, bytes], `local` [threads, bytes]."""

    memory: Memory
    threads: int
    grid: int
    blocks: range
    widths: dict[str, int]
    symbols: dict[str, int]
    parameters: dict[str, Array]
    shared: Array
    local: Array


@dataclass
class Front:
    """Threads in lockstep, as [rows, columns].

    A row is a block and a column a thread of it, for as long as all threads of a block are
    together; otherwise each row is one thread. A register that does not differ along an axis has
    length 1 there.
    """

    launch: Launch
    block: Array
    thread: Array
    registers: dict[str, Array] = field(default_factory=dict)
    active: Array | None = None
    """Which threads the present instruction is for; None: all."""

    @property
    def shape(self) -> tuple[int, int]:
        return np.broadcast_shapes(self.block.shape, self.thread.shape)

    @property
    def whole(self) -> bool:
        """Whether all threads of its blocks are here."""
        return self.shape[1] == self.launch.threads

    @property
    def lane(self) -> Array:
        """The number of each thread among all threads of this run."""
        local = self.block.astype(np.int64) - self.launch.blocks.start
        return local * self.launch.threads + self.thread.astype(np.int64)

    def read(self, name: str) -> Array:
        try:
            return self.registers[name]
        except KeyError:
            raise ValueError(f"{name} is read before it is written.") from None

    def write(self, name: str, raw: Array, signed: bool = False) -> None:
        """Bits for a register, which is as wide as it was declared to be."""
        width = self.launch.widths.get(_prefix(name))
        if width is not None and width > 1:
            raw = resize(raw, width, signed)
        if self.active is not None:
            old = self.registers.get(name)
            raw = np.where(self.active, raw, np.zeros((1, 1), raw.dtype) if old is None else old)
        self.registers[name] = raw

    def rows(self, chosen: Array, live: set[str]) -> Front:
        """The chosen rows, with the registers that are still read."""
        count = self.shape[0]
        registers = {
            name: raw[chosen] if raw.shape[0] == count else raw
            for name, raw in self.registers.items()
            if name in live
        }
        thread = self.thread[chosen] if self.thread.shape[0] == count else self.thread
        return Front(self.launch, self.block[chosen], thread, registers)

    def single(self) -> Front:
        """The same threads, each as a row."""
        registers = {
            name: raw if raw.shape == (1, 1) else self._column(raw)
            for name, raw in self.registers.items()
        }
        return Front(self.launch, self._column(self.block), self._column(self.thread), registers)

    def _column(self, raw: Array) -> Array:
        return np.broadcast_to(raw, self.shape).reshape(-1, 1)


_PREFIXES: dict[str, str] = {}


def _prefix(name: str) -> str:
    if name not in _PREFIXES:
        found = re.match(r"%([a-zA-Z]+)", name)
        _PREFIXES[name] = found[1] if found else ""
    return _PREFIXES[name]


def start(launch: Launch) -> Front:
    block = np.array(launch.blocks, np.uint32).reshape(-1, 1)
    thread = np.arange(launch.threads, dtype=np.uint32).reshape(1, -1)
    front = Front(launch, block, thread)
    front.registers = {
        "%ctaid.x": block,
        "%tid.x": thread,
        "%laneid": thread % np.uint32(32),
        "%ntid.x": np.full((1, 1), launch.threads, np.uint32),
        "%nctaid.x": np.full((1, 1), launch.grid, np.uint32),
    }
    zero = np.zeros((1, 1), np.uint32)
    for axis in "yz":
        front.registers |= {f"%tid.{axis}": zero, f"%ctaid.{axis}": zero}
        front.registers |= {f"%ntid.{axis}": zero + 1, f"%nctaid.{axis}": zero + 1}
    return front


def together(fronts: Sequence[Front], live: set[str]) -> Front:
    """Several fronts at one place as one, in the order of their threads."""
    if all(front.whole for front in fronts):
        return _stacked(fronts, live, by_row=True)
    single = [front.single() if front.whole else front for front in fronts]
    one = _stacked(single, live, by_row=False)
    threads = one.launch.threads
    if len(one.block) % threads or (one.block.reshape(-1, threads) != one.block[::threads]).any():
        return one
    registers = {
        name: raw if raw.shape[0] == 1 else raw.reshape(-1, threads)
        for name, raw in one.registers.items()
    }
    return Front(one.launch, one.block[::threads], one.thread[:threads].reshape(1, -1), registers)


def _stacked(fronts: Sequence[Front], live: set[str], by_row: bool) -> Front:
    shapes = [front.shape for front in fronts]

    def stack(parts: list[Array], order: Array) -> Array:
        if all(part.shape[0] == 1 for part in parts) and _equal(parts):
            return parts[0]
        wide = max(part.shape[1] for part in parts)
        full = [np.broadcast_to(x, (n, wide)) for x, (n, _) in zip(parts, shapes, strict=True)]
        return np.concatenate(full)[order]

    block = np.concatenate([front.block for front in fronts])
    if by_row:
        order = np.argsort(block[:, 0])
        thread = fronts[0].thread
    else:
        order = np.argsort(np.concatenate([front.lane for front in fronts])[:, 0])
        thread = stack([np.broadcast_to(front.thread, front.shape) for front in fronts], order)
    found = {name for front in fronts for name in front.registers if name in live}
    registers = {}
    for name in found:
        parts = [front.registers.get(name) for front in fronts]
        dtype = next(part.dtype for part in parts if part is not None)
        # a register that some of the threads never wrote
        missing = np.zeros((1, 1), dtype)
        registers[name] = stack([missing if x is None else x for x in parts], order)
    return Front(fronts[0].launch, block[order], thread, registers)


def _equal(parts: list[Array]) -> bool:
    return all(part.shape == parts[0].shape and (part == parts[0]).all() for part in parts[1:])
