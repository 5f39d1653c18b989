"""Instructions that reach memory or other threads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np

from gpu.arithmetic import source, symbol_source
from gpu.conversions import registers_of
from gpu.fronts import LOCAL, Front
from gpu.kinds import KINDS, UNSIGNED, Kind, resize
from gpu.memory import DTYPES
from gpu.parsing import Instruction

Array = np.ndarray
Action = Callable[[Front], None]
Address = Callable[[Front], Array]

SPACES = ("param", "global", "shared", "local", "const")
ADDRESS = re.compile(r"\[\s*([%$\w@.]+)\s*(?:\+\s*(-?\w+))?\s*\]")


class Divergence(RuntimeError):
    """Threads of one block went different ways where that is not allowed."""


def address(text: str) -> Address:
    """What stands between brackets: a register or a name, and an offset."""
    found = ADDRESS.fullmatch(text)
    if found is None:
        raise ValueError(f"This address is not understood: {text}")
    read = symbol_source(found[1], 64)
    offset = np.uint64(int(found[2] or "0", 0) & (2**64 - 1))
    return lambda front: resize(read(front), 64) + offset


def _layout(instruction: Instruction) -> tuple[str, Kind, int]:
    """The memory's name, the type of an element, and the number of elements."""
    space = next((part for part in instruction.parts if part in SPACES), "generic")
    count = next((int(part[1]) for part in instruction.parts if part in ("v2", "v4")), 1)
    return space, KINDS[instruction.parts[-1]], count


def load(instruction: Instruction) -> Action:
    space, kind, count = _layout(instruction)
    targets = registers_of(instruction.operands[0])
    if space == "param":
        return _load_parameter(targets[0], instruction.operands[1].strip("[] "), kind)
    where = address(instruction.operands[1])
    fetch = FETCHES[space]
    element = UNSIGNED[kind.bits]

    def act(front: Front) -> None:
        raw = fetch(front, where(front), kind.bits // 8 * count)
        pieces = np.ascontiguousarray(raw).view(element).reshape(*raw.shape, count)
        for place, target in enumerate(targets):
            front.write(target, np.ascontiguousarray(pieces[..., place]), kind.signed)

    return act


def _load_parameter(target: str, name: str, kind: Kind) -> Action:
    def act(front: Front) -> None:
        given = front.launch.parameters.get(name)
        front.write(target, resize(front.read(name) if given is None else given, kind.bits))

    return act


def store(instruction: Instruction) -> Action:
    space, kind, count = _layout(instruction)
    given = registers_of(instruction.operands[1])
    reads = [source(text, kind.bits) for text in given]
    if space == "param":
        name = instruction.operands[0].strip("[] ")
        return lambda front: front.write(name, resize(reads[0](front), kind.bits))
    where = address(instruction.operands[0])
    put = PUTS[space]

    def act(front: Front) -> None:
        parts = np.broadcast_arrays(*[resize(read(front), kind.bits) for read in reads])
        values = parts[0]
        if count > 1:
            values = np.stack(parts, axis=-1).view(DTYPES[kind.bits // 8 * count])[..., 0]
        put(front, where(front), values)

    return act


def _fetch_global(front: Front, addresses: Array, size: int) -> Array:
    active, (addresses,) = _spread(front, addresses)
    return front.launch.memory.load(addresses, active, front.block, size)


def _put_global(front: Front, addresses: Array, values: Array) -> None:
    active, (addresses, values) = _spread(front, addresses, values)
    front.launch.memory.store(addresses, active, front.block, values)


def _spread(front: Front, *arrays: Array) -> tuple[Array | None, list[Array]]:
    """All of one shape, with a row for each row of the front."""
    row = np.broadcast_to(np.True_, (front.shape[0], 1))
    active = front.active
    masks = [] if active is None else [active]
    full = np.broadcast_arrays(row, *masks, *arrays)
    return (None if active is None else full[1]), list(full[1 + len(masks) :])


def _window(front: Front, addresses: Array, size: int, memory: Array, name: str) -> Array:
    """Indices of elements of `size` bytes, checked, of memory [owners, bytes]."""
    wrong = addresses + np.uint64(size) > memory.shape[1]
    misaligned = (addresses & np.uint64(size - 1)) != 0
    if front.active is not None:
        wrong, misaligned = wrong & front.active, misaligned & front.active
    for bad, what in ((misaligned, "is misaligned"), (wrong, f"is outside of {name} memory")):
        if bad.any():
            at = int(np.broadcast_to(addresses, bad.shape)[bad][0])
            raise MemoryError(f"{size} bytes at {at:#x} of {name} memory: this {what}.")
    if front.active is not None:
        addresses = np.where(front.active, addresses, np.uint64(0))
    return (addresses // np.uint64(size)).astype(np.int64)


def _owner_and_memory(front: Front, name: str) -> tuple[Array, Array]:
    if name == "local":
        return front.lane, front.launch.local
    return front.block.astype(np.int64) - front.launch.blocks.start, front.launch.shared


def _fetch_private(name: str) -> Callable[[Front, Array, int], Array]:
    def fetch(front: Front, addresses: Array, size: int) -> Array:
        owner, memory = _owner_and_memory(front, name)
        index = _window(front, _short(addresses), size, memory, name)
        return memory.view(DTYPES[size])[owner, index]

    return fetch


def _put_private(name: str) -> Callable[[Front, Array, Array], None]:
    def put(front: Front, addresses: Array, values: Array) -> None:
        owner, memory = _owner_and_memory(front, name)
        index = _window(front, _short(addresses), values.itemsize, memory, name)
        of = memory.view(DTYPES[values.itemsize])
        if front.active is None:
            of[owner, index] = values
            return
        active, owner, index, values = np.broadcast_arrays(front.active, owner, index, values)
        of[owner[active], index[active]] = values[active]

    return put


def _short(addresses: Array) -> Array:
    """Addresses of shared and local memory have 32 bits, below the mark of local memory."""
    return addresses & np.uint64(0xFFFFFFFF)


def _fetch_generic(front: Front, addresses: Array, size: int) -> Array:
    return FETCHES["local" if _is_local(addresses) else "global"](front, addresses, size)


def _put_generic(front: Front, addresses: Array, values: Array) -> None:
    PUTS["local" if _is_local(addresses) else "global"](front, addresses, values)


def _is_local(addresses: Array) -> bool:
    return bool((addresses >= LOCAL).all())


FETCHES: dict[str, Callable[[Front, Array, int], Array]] = {
    "global": _fetch_global,
    "const": _fetch_global,
    "shared": _fetch_private("shared"),
    "local": _fetch_private("local"),
    "generic": _fetch_generic,
}
PUTS: dict[str, Callable[[Front, Array, Array], None]] = {
    "global": _put_global,
    "shared": _put_private("shared"),
    "local": _put_private("local"),
    "generic": _put_generic,
}


def barrier(instruction: Instruction) -> Action:
    def act(front: Front) -> None:
        if not front.whole or (front.active is not None and front.active.any(axis=1).any()):
            raise Divergence(f"Some threads of a block do not reach {instruction.name}.")

    return act


def shuffle(instruction: Instruction) -> Action:
    """Values of other threads of the same 32, as PTX's manual defines the four ways."""
    way = next(part for part in instruction.parts if part in ("bfly", "up", "down", "idx"))
    targets = instruction.operands[0].split("|")
    value, by, limits = (source(text, 32) for text in instruction.operands[1:4])

    def act(front: Front) -> None:
        if not front.whole:
            raise Divergence(f"Some threads of a block do not reach {instruction.name}.")
        raw = np.broadcast_to(value(front), front.shape)
        lane = front.thread.astype(np.int64) & 31
        other, inside = _partner(way, lane, by(front), limits(front))
        place = np.where(inside, other, lane) + (front.thread.astype(np.int64) & ~31)
        place = np.broadcast_to(place, front.shape)
        front.write(targets[0], np.take_along_axis(raw, place, axis=1))
        if len(targets) > 1:
            front.write(targets[1], inside)

    return act


def _partner(way: str, lane: Array, by: Array, limits: Array) -> tuple[Array, Array]:
    by = by.astype(np.int64) & 31
    segment, clamp = (limits.astype(np.int64) >> 8) & 31, limits.astype(np.int64) & 31
    first = lane & segment
    last = first | (clamp & ~segment)
    if way == "up":
        return lane - by, lane - by >= last
    other = {"down": lane + by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[way]
    return other, other <= last


REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def reduce_warp(instruction: Instruction) -> Action:
    """One number of all 32 threads, which each of them gets."""
    target, value, members = instruction.operands
    ufunc, kind = REDUCTIONS[instruction.parts[-2]], KINDS[instruction.parts[-1]]
    read, mask = source(value, 32), source(members, 32)

    def act(front: Front) -> None:
        if not front.whole:
            raise Divergence(f"Some threads of a block do not reach {instruction.name}.")
        if (mask(front) != np.uint32(0xFFFFFFFF)).any():
            raise NotImplementedError(f"{instruction.name} of some threads is not simulated.")
        given = kind.decode(np.ascontiguousarray(np.broadcast_to(read(front), front.shape)))
        warps = ufunc.reduce(given.reshape(len(given), -1, 32), axis=2, dtype=given.dtype)
        front.write(target, kind.encode(np.repeat(warps, 32, axis=1)))

    return act


def load_matrix(instruction: Instruction) -> Action:
    places = _matrix_places(instruction, instruction.operands[1])
    targets = registers_of(instruction.operands[0])

    def act(front: Front) -> None:
        for target, where in zip(targets, places(front, len(targets)), strict=True):
            front.write(target, FETCHES["shared"](front, where, 4))

    return act


def store_matrix(instruction: Instruction) -> Action:
    places = _matrix_places(instruction, instruction.operands[0])
    reads = [source(text, 32) for text in registers_of(instruction.operands[1])]

    def act(front: Front) -> None:
        for read, where in zip(reads, places(front, len(reads)), strict=True):
            PUTS["shared"](front, where, np.broadcast_to(read(front), where.shape))

    return act


def _matrix_places(instruction: Instruction, text: str) -> Callable[[Front, int], Iterator[Array]]:
    """Where each thread's two elements of each 8 x 8 matrix of 16-bit elements lie.

    Each thread gives the address of one row, 8 threads those of a matrix; thread t has the elements
    2 (t % 4) and the next one of row t // 4.
    """
    if "trans" in instruction.parts or instruction.parts[-1] != "b16":
        raise NotImplementedError(f"{instruction.name} is not simulated.")
    where = address(text)

    def places(front: Front, count: int) -> Iterator[Array]:
        if not front.whole:
            raise Divergence(f"Some threads of a block do not reach {instruction.name}.")
        rows = np.broadcast_to(where(front), front.shape)
        thread = np.arange(front.shape[1])
        for matrix in range(count):
            given = (thread & ~31) + 8 * matrix + (thread & 31) // 4
            start = rows[:, given]
            if (start & np.uint64(15)).any():
                raise MemoryError(f"A row of 16 bytes of {instruction.name} is misaligned.")
            yield start + (thread % 4 * 4).astype(np.uint64)

    return places


def nothing(instruction: Instruction) -> Action:
    return lambda front: None


ACTIONS: dict[str, Callable[[Instruction], Action]] = {
    "ld": load,
    "st": store,
    "bar": barrier,
    "barrier": barrier,
    "shfl": shuffle,
    "redux": reduce_warp,
    "ldmatrix": load_matrix,
    "stmatrix": store_matrix,
    "membar": nothing,
    "fence": nothing,
}
