"""Runs the PTX of a kernel on the CPU, on this process's memory.

    memory = Memory()
    memory.allow_tensor(x)
    Program(compiled.asm["ptx"]).run(grid, [x.data_ptr(), x.numel(), 0.5], memory)

Threads run in lockstep, many blocks at once, one numpy operation for each instruction. Where
blocks take different branches, those that are behind run first, until all are together again.
Threads of one block may part for a branch forwards (a slow path in libdevice), and must be
together again at the next barrier or shuffle; a loop that they leave at different times is an
error.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from gpu import conversions, transfers
from gpu.arithmetic import PURE
from gpu.fronts import Front, Launch, start, together
from gpu.memory import Memory
from gpu.ordering import put_in_order
from gpu.parsing import Instruction, parse
from gpu.transfers import Divergence

__all__ = ["Divergence", "Memory", "Program"]

LANES = 1 << 15
"""How many threads run at once, if blocks are smaller: numpy's overhead against the cache."""
SHARED = 48 << 10
"""Bytes of shared memory that every kernel may have."""

Action = Callable[[Front], None]
Number = int | float


class Program:
    """The one kernel of a PTX module.

    `executed` counts instructions by name, once for all threads that ran one together; `parted`
    counts branches at which the threads of a block went different ways.
    """

    def __init__(self, ptx: str, shared: int = SHARED) -> None:
        listing = parse(ptx)
        put_in_order(listing.kernel)
        self.threads = listing.threads
        self.parameters = listing.kernel.parameters
        self.code = listing.kernel.code
        self.labels = listing.kernel.labels
        self.executed: Counter[str] = Counter()
        self.parted = 0
        self._widths = listing.kernel.widths
        self._shared = shared if "shared" in ptx else 0
        self._steps = [_step(instruction) for instruction in self.code]
        self._borders = set(self.labels.values())
        self._tables = {
            name: np.frombuffer(data + bytes(-len(data) % 8), np.uint64).copy()
            for name, data in listing.constants.items()
        }
        self._symbols, self._local = _places(listing.kernel.local)
        self._symbols |= {name: table.ctypes.data for name, table in self._tables.items()}
        self._symbols["global_smem"] = 0

    def run(self, grid: int, args: Sequence[Number], memory: Memory) -> None:
        """Runs `grid` blocks. Pointers are addresses; pointers left out at the end are null."""
        parameters = self._bound(args)
        for table in self._tables.values():
            memory.allow(table.ctypes.data, table.nbytes, writable=False)
        at_once = max(1, LANES // self.threads)
        with np.errstate(all="ignore"):
            for first in range(0, grid, at_once):
                blocks = range(first, min(grid, first + at_once))
                self._run(self._launch(memory, grid, blocks, parameters))

    def _bound(self, args: Sequence[Number]) -> dict[str, np.ndarray]:
        missing = self.parameters[len(args) :]
        if len(args) > len(self.parameters) or any(kind != "u64" for _, kind in missing):
            raise TypeError(f"The kernel has {len(self.parameters)} parameters, got {len(args)}.")
        given = [*args, *[0] * len(missing)]
        pairs = zip(self.parameters, given, strict=True)
        return {name: _bits(value, kind) for (name, kind), value in pairs}

    def _launch(
        self, memory: Memory, grid: int, blocks: range, parameters: dict[str, np.ndarray]
    ) -> Launch:
        shared = np.zeros((len(blocks), self._shared), np.uint8)
        local = np.zeros((len(blocks) * self.threads if self._local else 1, self._local), np.uint8)
        return Launch(
            memory=memory,
            threads=self.threads,
            grid=grid,
            blocks=blocks,
            widths=self._widths,
            symbols=self._symbols,
            parameters=parameters,
            shared=shared,
            local=local,
        )

    def _run(self, launch: Launch) -> None:
        waiting: dict[int, list[Front]] = {0: [start(launch)]}
        while waiting:
            place = min(waiting)
            fronts = waiting.pop(place)
            front = together(fronts, self._live[place]) if len(fronts) > 1 else fronts[0]
            for target, part in self._advance(front, place):
                waiting.setdefault(target, []).append(part)

    def _advance(self, front: Front, place: int) -> list[tuple[int, Front]]:
        """As far as a branch, or a label where others may wait."""
        code, steps, executed = self.code, self._steps, self.executed
        first = place
        while place < len(code):
            if place in self._borders and place != first:
                return [(place, front)]
            instruction = code[place]
            front.active = _active(front, instruction)
            executed[instruction.name] += 1
            if instruction.head in ("bra", "ret"):
                return self._branch(front, place)
            steps[place](front)
            place += 1
        return []

    def _branch(self, front: Front, place: int) -> list[tuple[int, Front]]:
        instruction = self.code[place]
        ends = instruction.head == "ret"
        target = len(self.code) if ends else self.labels[instruction.operands[0]]
        taken, front.active = front.active, None
        if taken is None:
            return [] if ends else [(target, front)]
        if not taken.any():
            return [(place + 1, front)]
        if taken.shape[1] > 1 and (taken.any(axis=1) != taken.all(axis=1)).any():
            self.parted += 1
            front, taken = front.single(), np.broadcast_to(taken, front.shape).reshape(-1, 1)
        if target <= place and not _agree(front, taken):
            raise Divergence(
                f"Some threads of a block go back to {instruction.operands[0]} and others leave the"
                " loop: a branch backwards must be taken by all threads of a block or by none."
            )
        chosen = np.broadcast_to(taken[:, 0], front.shape[:1])
        stays = (place + 1, front.rows(~chosen, self._live[place + 1]))
        return [stays] if ends else [(target, front.rows(chosen, self._live[target])), stays]

    @cached_property
    def _live(self) -> list[set[str]]:
        """The registers that may still be read, from each place of the code on."""
        live: list[set[str]] = [set() for _ in range(len(self.code) + 1)]
        flows = [(one.results(), one.sources()) for one in self.code]
        changed = True
        while changed:
            changed = False
            for place in reversed(range(len(self.code))):
                instruction = self.code[place]
                after = set(live[place + 1])
                if instruction.head in ("bra", "ret"):
                    after = after if instruction.predicate else set()
                    if instruction.head == "bra":
                        after = after | live[self.labels[instruction.operands[0]]]
                results, sources = flows[place]
                now = (after - results) | sources
                changed |= now != live[place]
                live[place] = now
        return live


def _agree(front: Front, taken: np.ndarray) -> bool:
    """Whether the threads of each block do the same."""
    if front.whole:
        return True
    chosen = np.broadcast_to(taken[:, 0], front.shape[:1])
    return not np.isin(front.block[chosen], front.block[~chosen]).any()


def _active(front: Front, instruction: Instruction) -> np.ndarray | None:
    if instruction.predicate is None:
        return None
    chosen = front.read(instruction.predicate)
    chosen = ~chosen if instruction.negated else chosen
    return None if chosen.all() else chosen


def _step(instruction: Instruction) -> Action:
    head = instruction.head
    if head in ("bra", "ret"):
        return lambda front: None
    if head in PURE:
        formula, target = PURE[head](instruction), instruction.operands[0]
        return lambda front: front.write(target, formula(front))
    for actions in (conversions.ACTIONS, transfers.ACTIONS):
        if head in actions:
            return actions[head](instruction)
    raise NotImplementedError(f"The instruction {instruction.name} is not simulated.")


def _bits(value: Number, kind: str) -> np.ndarray:
    if kind in ("f32", "f64"):
        number = np.float32(value) if kind == "f32" else np.float64(value)
        return np.full((1, 1), number).view(np.uint32 if kind == "f32" else np.uint64)
    if isinstance(value, float):
        raise TypeError(f"A parameter of type {kind} got the float {value}.")
    low = struct.pack("<Q", value & (2**64 - 1))
    return np.frombuffer(low, np.uint64).reshape(1, 1)


def _places(local: dict[str, int]) -> tuple[dict[str, int], int]:
    """Where each name lies in a thread's local memory, and how large that is."""
    places, end = {}, 0
    for name, size in local.items():
        places[name] = end
        end += -(-size // 16) * 16
    return places, end
