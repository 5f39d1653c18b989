"""Instructions that compute: each becomes a function from a front to bits for the destination."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np

from gpu import rounding
from gpu.fronts import Front
from gpu.kinds import KINDS, SIGNED, UNSIGNED, Kind, resize
from gpu.parsing import Instruction

Array = np.ndarray
Source = Callable[[Front], Array]
Pure = Callable[[Front], Array]

MODES = ("rn", "rz", "rm", "rp")


def literal(text: str) -> int | None:
    """The bits of a constant; None for a register."""
    if found := re.fullmatch(r"0[fd]([0-9a-fA-F]{8,16})", text):
        return int(found[1], 16)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    return None


def source(text: str, bits: int) -> Source:
    """Reads a register, or a constant as wide as `bits`; 1 stands for a predicate."""
    if (number := literal(text)) is not None:
        dtype = UNSIGNED.get(bits, np.bool_)
        constant = np.full((1, 1), number & (2**bits - 1), dtype)
        return lambda front: constant
    return lambda front: front.read(text)


def symbol_source(text: str, bits: int) -> Source:
    """As `source`, or the address of a table or of shared memory."""
    if text.startswith("%") or literal(text) is not None or text.startswith(("param", "retval")):
        return source(text, bits)
    dtype = UNSIGNED[bits]

    def read(front: Front) -> Array:
        if text in front.launch.symbols:
            return np.full((1, 1), front.launch.symbols[text], np.uint64).astype(dtype)
        return front.read(text)

    return read


def kinds_of(instruction: Instruction) -> list[Kind]:
    return [KINDS[part] for part in instruction.parts[1:] if part in KINDS]


def mode_of(instruction: Instruction) -> str:
    return next((part for part in instruction.parts if part in MODES), "rn")


def sources(instruction: Instruction, kind: Kind) -> list[Source]:
    return [source(text, kind.bits) for text in instruction.operands[1:]]


def elementwise(instruction: Instruction, formula: Callable[..., Array]) -> Pure:
    """All operands and the result are of the instruction's one type."""
    kind = kinds_of(instruction)[-1]
    given = sources(instruction, kind)
    decode, encode = kind.decode, kind.encode
    if "ftz" in instruction.parts and kind.name == "f32":
        formula = _flushed(formula)
    if "sat" in instruction.parts:
        formula = _saturated(formula)
    return lambda front: encode(formula(*[decode(one(front)) for one in given]))


def _flushed(formula: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *x: rounding.flush(formula(*map(rounding.flush, x)))


def _saturated(formula: Callable[..., Array]) -> Callable[..., Array]:
    def clamped(*x: Array) -> Array:
        result = formula(*x)
        if result.dtype.kind != "f":
            raise NotImplementedError("Integers are not saturated here.")
        return np.where(np.isnan(result), result.dtype.type(0), np.clip(result, 0, 1))

    return clamped


def carrying(instruction: Instruction) -> Pure:
    """Sums, differences and multiply-adds of 32 bits that read or write the carry."""
    head, parts = instruction.head, instruction.parts
    given = [source(text, 32) for text in instruction.operands[1:]]
    reads = head in ("addc", "subc", "madc")
    writes = "cc" in parts
    half = np.uint64(32)

    def compute(front: Front) -> Array:
        values = [one(front).astype(np.uint64) for one in given]
        carry = front.read("%cc").astype(np.uint64) if reads else np.uint64(0)
        if head.startswith("sub"):
            total = values[0] - values[1] - carry
            out = total >> np.uint64(63)  # a borrow
        else:
            if head.startswith("mad"):
                product = values[0] * values[1]
                term = product >> half if "hi" in parts else product & np.uint64(0xFFFFFFFF)
                total = term + values[2] + carry
            else:
                total = values[0] + values[1] + carry
            out = total >> half
        if writes:
            front.write("%cc", out.astype(np.uint32))
        return total.astype(np.uint32)

    return compute


def add(instruction: Instruction) -> Pure:
    return _sum(instruction, rounding.add)


def subtract(instruction: Instruction) -> Pure:
    return _sum(instruction, lambda x, y, mode: rounding.add(x, -y, mode))


def _sum(instruction: Instruction, of_floats: Callable[[Array, Array, str], Array]) -> Pure:
    if "cc" in instruction.parts or instruction.head in ("addc", "subc"):
        return carrying(instruction)
    if not kinds_of(instruction)[-1].floating or kinds_of(instruction)[-1].half:
        plain = np.add if instruction.head == "add" else np.subtract
        return elementwise(instruction, plain)
    mode = mode_of(instruction)
    return elementwise(instruction, lambda x, y: of_floats(x, y, mode))


def high_product(x: Array, y: Array, bits: int) -> Array:
    """The upper half of an integer product."""
    if bits < 64:
        twice = (SIGNED if x.dtype.kind == "i" else UNSIGNED)[2 * bits]
        return ((x.astype(twice) * y.astype(twice)) >> twice(bits)).astype(x.dtype)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    a, b = x.view(np.uint64), y.view(np.uint64)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    middle = a_high * b_low + ((a_low * b_low) >> half)
    other = a_low * b_high + (middle & low)
    high = a_high * b_high + (middle >> half) + (other >> half)
    if x.dtype.kind == "i":
        high = high - np.where(x < 0, b, np.uint64(0)) - np.where(y < 0, a, np.uint64(0))
    return high.view(x.dtype)


def multiply(instruction: Instruction) -> Pure:
    kind = kinds_of(instruction)[-1]
    if "wide" in instruction.parts:
        return wide_product(instruction)
    if "hi" in instruction.parts:
        return elementwise(instruction, lambda x, y: high_product(x, y, kind.bits))
    if not kind.floating or kind.half:
        return elementwise(instruction, np.multiply)
    mode = mode_of(instruction)
    return elementwise(instruction, lambda x, y: rounding.multiply(x, y, mode))


def wide_product(instruction: Instruction) -> Pure:
    """A product of twice the width, with a third operand of that width added by `mad`."""
    kind = kinds_of(instruction)[-1]
    twice = (SIGNED if kind.signed else UNSIGNED)[2 * kind.bits]
    unsigned = UNSIGNED[2 * kind.bits]
    given = [source(text, kind.bits) for text in instruction.operands[1:3]]
    third = [source(text, 2 * kind.bits) for text in instruction.operands[3:]]

    def compute(front: Front) -> Array:
        x, y = (kind.decode(one(front)).astype(twice) for one in given)
        product = (x * y).view(unsigned)
        return product + third[0](front) if third else product

    return compute


def multiply_add(instruction: Instruction) -> Pure:
    kind = kinds_of(instruction)[-1]
    if "cc" in instruction.parts or instruction.head == "madc":
        return carrying(instruction)
    if kind.floating:
        return fused(instruction)
    if "wide" in instruction.parts:
        return wide_product(instruction)
    if "hi" in instruction.parts:
        return elementwise(instruction, lambda x, y, z: high_product(x, y, kind.bits) + z)
    return elementwise(instruction, lambda x, y, z: x * y + z)


def fused(instruction: Instruction) -> Pure:
    if kinds_of(instruction)[-1].half:
        return elementwise(instruction, rounding.fma_odd)
    mode = mode_of(instruction)
    return elementwise(instruction, lambda x, y, z: rounding.fma(x, y, z, mode))


def divide(instruction: Instruction) -> Pure:
    if kinds_of(instruction)[-1].floating:
        return elementwise(instruction, np.divide)
    return elementwise(instruction, _quotient)


def remainder(instruction: Instruction) -> Pure:
    return elementwise(instruction, lambda x, y: x - _quotient(x, y) * y)


def _quotient(x: Array, y: Array) -> Array:
    """Towards zero; numpy's goes down."""
    down = x // y
    return down + ((down < 0) & (down * y != x)).astype(x.dtype)


def larger(instruction: Instruction) -> Pure:
    return _choice(instruction, np.maximum, np.fmax, lambda x, y: np.where(np.signbit(x), y, x))


def smaller(instruction: Instruction) -> Pure:
    return _choice(instruction, np.minimum, np.fmin, lambda x, y: np.where(np.signbit(x), x, y))


Binary = Callable[[Array, Array], Array]


def _choice(instruction: Instruction, with_nan: Binary, without: Binary, of_zeros: Binary) -> Pure:
    """Without `.NaN`, a number wins over NaN. -0 counts as less than +0."""
    if not kinds_of(instruction)[-1].floating:
        return elementwise(instruction, with_nan)
    choose = with_nan if "NaN" in instruction.parts else without
    return elementwise(instruction, lambda x, y: np.where(x == y, of_zeros(x, y), choose(x, y)))


def in_double(formula: Callable[[Array], Array]) -> Callable[[Instruction], Pure]:
    """Of float32: in float64, and rounded. Of float64: a rough approximation (`.approx.ftz`) has
    the upper word only."""

    def handler(instruction: Instruction) -> Pure:
        kind = kinds_of(instruction)[-1]
        if kind.name == "f64" and "ftz" in instruction.parts:
            upper = np.uint64(0xFFFFFFFF00000000)
            return elementwise(
                instruction, lambda x: (formula(x).view(np.uint64) & upper).view(np.float64)
            )
        if kind.name == "f32":
            return elementwise(
                instruction, lambda x: formula(x.astype(np.float64)).astype(np.float32)
            )
        return elementwise(instruction, formula)

    return handler


def square_root(instruction: Instruction) -> Pure:
    return elementwise(instruction, np.sqrt)


def reciprocal(instruction: Instruction) -> Pure:
    if "approx" in instruction.parts:
        return in_double(lambda x: 1 / x)(instruction)
    return elementwise(instruction, lambda x: x.dtype.type(1) / x)


def negate(instruction: Instruction) -> Pure:
    return elementwise(instruction, np.negative)


def absolute(instruction: Instruction) -> Pure:
    return elementwise(instruction, np.abs)


def copy_sign(instruction: Instruction) -> Pure:
    """The first operand has the sign, the second the number."""
    return elementwise(instruction, lambda x, y: np.copysign(y, x))


def bitwise(formula: Callable[..., Array]) -> Callable[[Instruction], Pure]:
    return lambda instruction: elementwise(instruction, formula)


def shift(instruction: Instruction) -> Pure:
    """A count of the whole width or more leaves zeros, or copies of the sign."""
    kind = kinds_of(instruction)[-1]
    value = source(instruction.operands[1], kind.bits)
    count = source(instruction.operands[2], 32)
    move = np.left_shift if instruction.head == "shl" else np.right_shift

    def compute(front: Front) -> Array:
        x = kind.decode(value(front))
        by = np.minimum(count(front), np.uint32(kind.bits)).astype(x.dtype)
        return move(x, by).view(UNSIGNED[kind.bits])

    return compute


def funnel(instruction: Instruction) -> Pure:
    """Two registers as one of 64 bits, of which a shift takes 32."""
    low, high, count = (source(text, 32) for text in instruction.operands[1:])
    left, wrap = "l" in instruction.parts, "wrap" in instruction.parts

    def compute(front: Front) -> Array:
        both = (high(front).astype(np.uint64) << np.uint64(32)) | low(front)
        by = count(front).astype(np.uint64)
        by = by & np.uint64(31) if wrap else np.minimum(by, np.uint64(32))
        shifted = (both << by) >> np.uint64(32) if left else both >> by
        return shifted.astype(np.uint32)

    return compute


def permute(instruction: Instruction) -> Pure:
    """Four bytes chosen from eight; the top bit of a choice spreads the byte's sign."""
    if len(instruction.parts) > 2:
        raise NotImplementedError(f"The mode of {instruction.name} is not simulated.")
    low, high, chosen = (source(text, 32) for text in instruction.operands[1:])

    def compute(front: Front) -> Array:
        both = (high(front).astype(np.uint64) << np.uint64(32)) | low(front)
        which = chosen(front).astype(np.uint64)
        out = np.zeros(np.broadcast_shapes(both.shape, which.shape), np.uint64)
        for place in range(4):
            choice = (which >> np.uint64(4 * place)) & np.uint64(15)
            byte = (both >> ((choice & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
            sign = np.where(byte > 127, np.uint64(255), np.uint64(0))
            out |= np.where(choice > 7, sign, byte) << np.uint64(8 * place)
        return out.astype(np.uint32)

    return compute


def look_up(instruction: Instruction) -> Pure:
    """lop3: any function of three bits, given by its table of eight results."""
    table = literal(instruction.operands[4])
    assert table is not None
    given = [source(text, 32) for text in instruction.operands[1:4]]

    def compute(front: Front) -> Array:
        x, y, z = (one(front) for one in given)
        out = np.zeros(np.broadcast_shapes(x.shape, y.shape, z.shape), np.uint32)
        for case in range(8):
            if table >> case & 1:
                terms = (x if case & 4 else ~x), (y if case & 2 else ~y), (z if case & 1 else ~z)
                out |= terms[0] & terms[1] & terms[2]
        return out

    return compute


def extract_bits(instruction: Instruction) -> Pure:
    kind = kinds_of(instruction)[-1]
    value = source(instruction.operands[1], kind.bits)
    begin, length = (source(text, 32) for text in instruction.operands[2:])
    wide = np.int64 if kind.signed else np.uint64

    def compute(front: Front) -> Array:
        x = kind.decode(value(front)).astype(wide)
        start = np.minimum(begin(front) & np.uint32(255), np.uint32(63)).astype(wide)
        count = np.minimum(length(front) & np.uint32(255), np.uint32(kind.bits)).astype(wide)
        rest = np.maximum(wide(64) - count, wide(0))
        # up to the top and down again, which fills with the sign where there is one
        found = ((x >> start) << np.minimum(rest, wide(63))) >> np.minimum(rest, wide(63))
        return np.where(count == 0, wide(0), found).view(np.uint64).astype(UNSIGNED[kind.bits])

    return compute


def insert_bits(instruction: Instruction) -> Pure:
    kind = kinds_of(instruction)[-1]
    given = [source(text, kind.bits) for text in instruction.operands[1:3]]
    begin, length = (source(text, 32) for text in instruction.operands[3:])
    dtype = UNSIGNED[kind.bits]

    def compute(front: Front) -> Array:
        x, y = (one(front) for one in given)
        start = np.minimum(begin(front) & np.uint32(255), np.uint32(kind.bits)).astype(dtype)
        count = np.minimum(length(front) & np.uint32(255), np.uint32(kind.bits)).astype(dtype)
        ones = ~np.left_shift(~dtype(0), count)
        mask = np.left_shift(ones, start)
        return (y & ~mask) | (np.left_shift(x, start) & mask)

    return compute


def count_bits(instruction: Instruction) -> Pure:
    return _counted(instruction, lambda x: np.bitwise_count(x).astype(np.uint32))


def leading_zeros(instruction: Instruction) -> Pure:
    def count(x: Array) -> Array:
        left = np.full(x.shape, x.itemsize * 8, np.uint32)
        for bits in reversed([2**i for i in range(int(math.log2(x.itemsize * 8)))]):
            upper = x >> x.dtype.type(bits)
            more = upper != 0
            left, x = np.where(more, left - np.uint32(bits), left), np.where(more, upper, x)
        return left - (x != 0).astype(np.uint32)

    return _counted(instruction, count)


def _counted(instruction: Instruction, formula: Callable[[Array], Array]) -> Pure:
    kind = kinds_of(instruction)[-1]
    value = source(instruction.operands[1], kind.bits)
    return lambda front: formula(resize(value(front), kind.bits))


def reverse_bits(instruction: Instruction) -> Pure:
    def reverse(x: Array) -> Array:
        out = np.zeros_like(x)
        for bit in range(x.itemsize * 8):
            one = (x >> x.dtype.type(bit)) & x.dtype.type(1)
            out |= one << x.dtype.type(x.itemsize * 8 - 1 - bit)
        return out

    return elementwise(instruction, reverse)


def select(instruction: Instruction) -> Pure:
    kind = kinds_of(instruction)[-1]
    yes, no = (source(text, kind.bits) for text in instruction.operands[1:3])
    condition = source(instruction.operands[3], 1)
    bits = kind.bits
    return lambda front: np.where(
        condition(front), resize(yes(front), bits), resize(no(front), bits)
    )


PURE: dict[str, Callable[[Instruction], Pure]] = {
    "add": add,
    "addc": add,
    "sub": subtract,
    "subc": subtract,
    "mul": multiply,
    "mad": multiply_add,
    "madc": multiply_add,
    "fma": fused,
    "div": divide,
    "rem": remainder,
    "max": larger,
    "min": smaller,
    "neg": negate,
    "abs": absolute,
    "copysign": copy_sign,
    "sqrt": square_root,
    "rcp": reciprocal,
    "rsqrt": in_double(lambda x: 1 / np.sqrt(x)),
    "ex2": in_double(np.exp2),
    "lg2": in_double(np.log2),
    "sin": in_double(np.sin),
    "cos": in_double(np.cos),
    "tanh": in_double(np.tanh),
    "and": bitwise(np.bitwise_and),
    "or": bitwise(np.bitwise_or),
    "xor": bitwise(np.bitwise_xor),
    "not": bitwise(np.invert),
    "shl": shift,
    "shr": shift,
    "shf": funnel,
    "prmt": permute,
    "lop3": look_up,
    "bfe": extract_bits,
    "bfi": insert_bits,
    "popc": count_bits,
    "clz": leading_zeros,
    "brev": reverse_bits,
    "selp": select,
}
