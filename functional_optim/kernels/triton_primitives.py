"""Triton for the operations of a graph: types, primitives, and the kernels that add up partial
results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from functional_optim.kernels.counters import noise_lines
from functional_optim.kernels.cpp import HALF, SHORT, STORED, Cpp, check_no_float8
from functional_optim.kernels.node import Unsuitable

TYPES = {
    **{x: f"tl.{str(x).removeprefix('torch.')}" for x in STORED},
    torch.bool: "tl.int1",
    torch.float8_e4m3fn: "tl.uint8",
    torch.float8_e5m2: "tl.uint8",
}
"""The Triton type of each dtype. Of floats of 8 bits kernels see the bits."""


class KernelText(NamedTuple):
    """A kernel. types: of its arguments, in Triton's words. warps: of a program."""

    name: str
    text: str
    types: dict[str, str]
    warps: int


class Triton(Cpp):
    """A printer: the primitives as Triton."""

    def div(self, x: str, y: str) -> str:
        """Correctly rounded, which Triton's own `/` is in float64 alone."""
        return f"({x} / {y})" if self.dtype is torch.float64 else f"tl.div_rn({x}, {y})"

    def neg(self, x: str) -> str:
        """Triton's own minus is 0 - x, which makes 0 of 0, and not -0."""
        return f"({x} * -1.0)" if self.dtype.is_floating_point else f"(-{x})"

    def not_(self, x: str) -> str:
        return f"({x} == 0)" if self.dtype is torch.bool else f"(~{x})"

    def abs(self, x: str) -> str:
        return f"tl.abs({x})"

    def sqrt(self, x: str) -> str:
        return f"tl.sqrt({x})" if self.dtype is torch.float64 else f"tl.sqrt_rn({x})"

    def fma(self, x: str, y: str, z: str) -> str:
        return f"tl.fma({x}, {y}, {z})"

    def _larger(self, x: str, y: str, sign: str) -> str:
        return f"tl.where(({x} {sign} {y}) | ({x} != {x}), {x}, {y})"

    def select(self, c: str, x: str, y: str) -> str:
        return f"tl.where({c}, {x}, {y})"

    def call(self, name: str, *x: str) -> str:
        own = name in ("floor", "ceil")
        return f"{'tl' if own else 'libdevice'}.{name}({', '.join(x)})"

    def power(self, x: str, e: float) -> str:
        """x to a power that is no whole number."""
        if e == 1 / 3:  # that of -inf is inf, as ATen's power has it
            root, high = self.abs(self.call("cbrt", x)), self.const(math.inf)
            least = self.const(-math.inf)
            return f"tl.where(({x} >= 0) | ({x} == {least}), {root}, {high} - {high})"
        return self.call("pow", x, self.const(e))

    def hidden(self, x: str) -> str:
        return x

    def noise(self, key: str, low: str, high: str, place: str) -> str:
        """A normal number, see `kernels/counters.py`."""
        if self.dtype is not torch.float32:
            raise Unsuitable(f"noise in {self.dtype}")
        self.lines.extend(noise_lines(key, low, high, place))
        return self.let("noise")

    def let(self, x: str) -> str:
        name = f"s{next(self.names)}"
        self.lines.append(f"{name} = {x}")
        return name

    once = let

    @staticmethod
    def cast(x: str, old: torch.dtype, new: torch.dtype) -> str:
        if old is new:
            return x
        check_no_float8(new)
        if new is torch.bool:
            return f"({x} != 0)"
        if old is torch.float64 and new in HALF:  # as the CPU rounds, by way of float32
            x = f"{x}.to(tl.float32)"
        if old.is_floating_point and new in SHORT:
            x = f"{x}.to(tl.int32)"
        return f"{x}.to({type_of(new)})"

    @staticmethod
    def constant(x: Any, dtype: torch.dtype) -> str:
        if not dtype.is_floating_point:
            return f"tl.full((), {int(x)}, {type_of(dtype)})"
        value = float(torch.tensor(float(x), dtype=dtype, device="cpu"))
        text = repr(value) if math.isfinite(value) else f"float('{value}')"
        if text == "-0.0":  # of which `full` makes 0
            return f"(tl.full((), 0.0, {type_of(dtype)}) * -1.0)"
        return f"tl.full((), {text}, {type_of(dtype)})"

    @staticmethod
    def bits(x: str, old: torch.dtype, new: torch.dtype) -> str:
        return f"{x}.to({type_of(new)}, bitcast=True)"


def type_of(dtype: torch.dtype) -> str:
    """The Triton type of a dtype."""
    if dtype not in TYPES:
        raise Unsuitable(f"a value in {dtype}")
    return TYPES[dtype]


def pointer(address: str, kind: str, *, aligned: bool) -> str:
    """The pointer that is stored at an address.

    The hint is on the pointer: on the integer that it is made of, it would be lost.
    """
    text = f"tl.load({address}).to(tl.pointer_type({kind}))"
    return f"tl.multiple_of({text}, 16)" if aligned else text


def identity(how: str) -> str:
    """What changes nothing in a sum, a maximum or a minimum."""
    return {"sum": "0.0", "max": "float('-inf')", "min": "float('inf')"}[how]


def put(how: str, a: str, b: str) -> str:
    """Two parts of a reduction together."""
    return f"({a} + {b})" if how == "sum" else f"{how}_of({a}, {b})"


def folded(how: str, x: str, axis: int | None, *, integer: bool = False) -> str:
    """The reduction of a block over an axis, or of all of it. An axis stays, of size 1."""
    end = f"axis={axis}, keep_dims={axis is not None}"
    if how == "sum" or integer:
        return f"tl.{how}({x}, {end})"
    return f"tl.reduce({x}, {end}, combine_fn={how}_of)"


def indented(lines: Sequence[str]) -> list[str]:
    """Lines of a block."""
    return [f"    {line}" for line in lines]


HEAD = """import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def max_of(a, b):
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def min_of(a, b):
    return tl.where((a < b) | (a != a), a, b)

"""

JOIN = """
@triton.jit
def {how}_kernel(chunks, entries, base):
    at = tl.load(chunks + tl.program_id(0).to(tl.int64))
    entry = entries + (at >> 32) * 4
    source = tl.load(entry).to(tl.pointer_type(tl.float64))
    target = (tl.load(entry + 1) + base).to(tl.pointer_type(tl.float64))
    count = tl.load(entry + 2)
    length = tl.load(entry + 3)
    j = (at & 0xFFFFFFFF) * {across} + tl.arange(0, {across})
    total = tl.full([{deep}, {across}], {identity}, tl.float64)
    for first in range(0, count, {deep}):
        k = first + tl.arange(0, {deep})
        mask = (k < count)[:, None] & (j < length)[None, :]
        own = tl.load(source + k[:, None] * length + j[None, :], mask=mask, other={identity})
        total = {put}
    tl.store(target + j[None, :], {folded}, mask=(j < length)[None, :])
"""

WIDE, DEEP = (8, 128), (1024, 1)
"""How many parts, and of how many elements each, a program of `JOIN` takes at once: for reductions
that keep axes, and for those that leave one element."""


def join_text(how: str, tile: tuple[int, int]) -> KernelText:
    """The kernel that puts together what programs have left of a tensor, in an order that depends
    on sizes alone. An entry of its table has source, target, and the size of both axes."""
    text = JOIN.format(
        how=how,
        deep=tile[0],
        across=tile[1],
        identity=identity(how),
        put=put(how, "total", "own"),
        folded=folded(how, "total", 0),
    )
    types = {"chunks": "*i64", "entries": "*i64", "base": "i64"}
    return KernelText(f"{how}_kernel", HEAD + text, types, 4)
