"""Conversions between types, comparisons, and moves between registers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpu import rounding
from gpu.arithmetic import kinds_of, source, symbol_source
from gpu.fronts import LOCAL, Front
from gpu.kinds import UNSIGNED, Kind, resize
from gpu.parsing import Instruction

Array = np.ndarray
Action = Callable[[Front], None]

TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def convert(instruction: Instruction) -> Action:
    if len(kinds_of(instruction)) != 2:
        raise NotImplementedError(f"A type of {instruction.name} is not simulated.")
    to, of = kinds_of(instruction)
    if to.name in ("f16x2", "bf16x2"):
        return _convert_pair(instruction, to, of)
    value = source(instruction.operands[1], of.bits)
    change = conversion(instruction, to, of)
    target = instruction.operands[0]
    return lambda front: front.write(target, change(value(front)), to.signed)


def _convert_pair(instruction: Instruction, to: Kind, of: Kind) -> Action:
    """The first operand becomes the upper half."""
    if of.name != "f32" or "rn" not in instruction.parts:
        raise NotImplementedError(f"{instruction.name} is not simulated.")
    target = instruction.operands[0]
    high, low = (source(text, 32) for text in instruction.operands[1:3])

    def act(front: Front) -> None:
        both = np.broadcast_arrays(low(front), high(front))
        front.write(target, to.encode(np.stack([of.decode(raw) for raw in both])))

    return act


def conversion(instruction: Instruction, to: Kind, of: Kind) -> Callable[[Array], Array]:
    """From bits of one type to bits of another."""
    parts = instruction.parts
    if to.floating and of.floating:
        change = _float_to_float(parts, to, of)
    elif to.floating:
        change = _integer_to_float(parts, to, of)
    elif of.floating:
        change = _float_to_integer(parts, to)
    elif "sat" in parts:
        raise NotImplementedError(f"{instruction.name} is not simulated.")
    else:
        return lambda raw: resize(resize(raw, of.bits), to.bits, of.signed)
    flush_in = "ftz" in parts and of.name == "f32"
    flush_out = "ftz" in parts and to.name == "f32"

    def whole(raw: Array) -> Array:
        x = of.decode(raw)
        x = change(rounding.flush(x) if flush_in else x)
        return to.encode(rounding.flush(x) if flush_out else x)

    return whole


def _float_to_float(parts: tuple[str, ...], to: Kind, of: Kind) -> Callable[[Array], Array]:
    rounds = next((TO_INTEGER[part] for part in parts if part in TO_INTEGER), None)
    mode = next((part for part in parts if part in ("rz", "rm", "rp")), "rn")
    if mode != "rn" and (to.name, of.name) != ("f32", "f64"):
        raise NotImplementedError(f"{'.'.join(parts)} is not simulated.")
    saturates = "sat" in parts

    def change(x: Array) -> Array:
        if rounds:
            x = rounds(x)
        if to.name == "f32" and of.name == "f64":
            x = rounding.to_float32(x, 0.0, mode)
        elif to.name == "f32":
            x = x.astype(np.float32)
        elif to.name == "f64":
            x = x.astype(np.float64)
        return np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0, 1)) if saturates else x

    return change


def _integer_to_float(parts: tuple[str, ...], to: Kind, of: Kind) -> Callable[[Array], Array]:
    if "rn" not in parts:
        raise NotImplementedError(f"{'.'.join(parts)} is not simulated.")
    if to.half and of.bits == 64:
        return rounding.odd_integers
    dtype = np.float32 if to.name == "f32" else np.float64
    return lambda x: x.astype(dtype)


def _float_to_integer(parts: tuple[str, ...], to: Kind) -> Callable[[Array], Array]:
    """What is too large becomes the largest integer; NaN becomes 0, or 2^63 where that is wide."""
    rounds = next(TO_INTEGER[part] for part in parts if part in TO_INTEGER)
    unsigned = UNSIGNED[to.bits]
    dtype = np.dtype(f"{'i' if to.signed else 'u'}{to.bits // 8}")
    limits = np.iinfo(dtype)
    wide = to.bits == 64 or "f64" in parts
    missing = np.array(1 << (to.bits - 1) if wide else 0, unsigned).view(dtype)

    def change(x: Array) -> Array:
        whole = rounds(x.astype(np.float64))
        low, high = whole <= float(limits.min), whole >= float(limits.max)
        inside = np.where(low | high | np.isnan(whole), 0, whole).astype(dtype)
        result = np.where(low, dtype.type(limits.min), inside)
        result = np.where(high, dtype.type(limits.max), result)
        return np.where(np.isnan(whole), missing, result).view(unsigned)

    return change


COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
COMBINATIONS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(name: str, floating: bool) -> Callable[[Array, Array], Array]:
    if name == "num":
        return lambda x, y: ~(np.isnan(x) | np.isnan(y))
    if name == "nan":
        return lambda x, y: np.isnan(x) | np.isnan(y)
    if name in COMPARISONS:
        plain = COMPARISONS[name]
        if name == "ne" and floating:  # unlike numpy's, false where one is NaN
            return lambda x, y: (x != y) & ~(np.isnan(x) | np.isnan(y))
        return plain
    ordered = COMPARISONS[name.removesuffix("u")]
    return lambda x, y: ordered(x, y) | np.isnan(x) | np.isnan(y)


def set_predicate(instruction: Instruction) -> Action:
    """One predicate, or two: of both halves of a pair, or the second is the opposite of the first;
    each joined with a third."""
    kind = kinds_of(instruction)[-1]
    compare = comparison(instruction.parts[1], kind.floating)
    join = next((COMBINATIONS[p] for p in instruction.parts[2:] if p in COMBINATIONS), None)
    left, right = (source(text, kind.bits) for text in instruction.operands[1:3])
    targets = instruction.operands[0].split("|")
    third = instruction.operands[3] if join else ""
    negated, third = third.startswith("!"), third.lstrip("!")
    flushes = "ftz" in instruction.parts and kind.name == "f32"

    def act(front: Front) -> None:
        x, y = kind.decode(left(front)), kind.decode(right(front))
        found = compare(rounding.flush(x), rounding.flush(y)) if flushes else compare(x, y)
        results = list(found) if kind.name.endswith("x2") else [found, ~found]
        if join:
            other = front.read(third)
            results = [join(one, ~other if negated else other) for one in results]
        for target, result in zip(targets, results, strict=False):
            front.write(target, result)

    return act


def registers_of(text: str) -> list[str]:
    return [name.strip() for name in text.strip("{} ").split(",")]


def move(instruction: Instruction) -> Action:
    kind = kinds_of(instruction)[-1]
    target, text = instruction.operands
    if target.startswith("{"):
        return _unpack(registers_of(target), source(text, kind.bits), kind.bits)
    if text.startswith("{"):
        given = registers_of(text)
        width = kind.bits // len(given)
        return _pack(target, [source(one, width) for one in given], kind.bits)
    read = source(text, 1) if kind.name == "pred" else symbol_source(text, kind.bits)
    return lambda front: front.write(target, read(front))


def _unpack(targets: list[str], read: Callable[[Front], Array], bits: int) -> Action:
    width = bits // len(targets)

    def act(front: Front) -> None:
        raw = read(front)
        for place, target in enumerate(targets):
            if target != "_":
                front.write(target, resize(raw >> raw.dtype.type(width * place), width))

    return act


def _pack(target: str, sources: list[Callable[[Front], Array]], bits: int) -> Action:
    width, dtype = bits // len(sources), UNSIGNED[bits]

    def act(front: Front) -> None:
        parts = [resize(read(front), width).astype(dtype) for read in sources]
        whole = parts[0]
        for place, part in enumerate(parts[1:], start=1):
            whole = whole | (part << dtype(width * place))
        front.write(target, whole)

    return act


def to_window(instruction: Instruction) -> Action:
    """cvta: addresses of local memory are marked; all others are the same in both windows."""
    target = instruction.operands[0]
    read = symbol_source(instruction.operands[1], 64)
    if "local" not in instruction.parts:
        return lambda front: front.write(target, read(front))
    change = np.subtract if "to" in instruction.parts else np.add
    return lambda front: front.write(target, change(read(front), np.uint64(LOCAL)))


def test_property(instruction: Instruction) -> Action:
    kind = kinds_of(instruction)[-1]
    target = instruction.operands[0]
    read = source(instruction.operands[1], kind.bits)
    formula = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
    }[instruction.parts[1]]
    return lambda front: front.write(target, formula(kind.decode(read(front))))


ACTIONS: dict[str, Callable[[Instruction], Action]] = {
    "cvt": convert,
    "cvta": to_window,
    "setp": set_predicate,
    "mov": move,
    "testp": test_property,
}
