"""C++ for the operations of a graph: types and primitives, and the texts of other files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from functional_optim.kernels.node import Unsuitable

STORED = {
    **{torch.float32: "float", torch.float64: "double"},
    **dict.fromkeys((torch.bfloat16, torch.float16), "uint16_t"),
    **dict.fromkeys((torch.bool, torch.float8_e4m3fn, torch.float8_e5m2), "uint8_t"),
    **{getattr(torch, x): f"{x}_t" for x in ("int8", "uint8", "int16", "int32", "int64")},
}
"""The C++ type of an element in memory."""

VALUE = {**STORED, torch.bfloat16: "float", torch.float16: "float", torch.bool: "bool"}
"""That of a value: half types are floats that are rounded."""

NUMBER = re.compile(r"\((float|double)\)-?0x[0-9a-f.p+-]+")
"""A constant of floating point, as C++ has it; neither NaN nor infinite."""

SHORT = (torch.uint8, torch.int8, torch.int16)
"""Integers to which a larger number is cast modulo their range, as ATen does it."""

HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_no_float8(dtype: torch.dtype) -> None:
    """Raise Unsuitable for a cast into 8 bits, which `stored` makes of the float's bits."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise Unsuitable(f"a cast to {dtype}")


class Cpp:
    """A printer: primitives as C++, and the lines that give names to texts.

    outer: the lines before all loops; None: there are no loops.
    """

    def __init__(
        self, lines: list[str], names: Iterable[int], outer: list[str] | None = None
    ) -> None:
        self.lines = lines
        self.outer = lines if outer is None else outer
        self.names = iter(names)
        self.dtype = torch.float32

    sub, mul, div = (lambda self, x, y, _s=s: f"({x} {_s} {y})" for s in "-*/")
    lt, le, gt, ge, eq, ne = (
        lambda self, x, y, _s=s: f"({x} {_s} {y})" for s in ("<", "<=", ">", ">=", "==", "!=")
    )
    bitand, bitor, bitxor, shl, shr = (
        lambda self, x, y, _s=s: f"({x} {_s} {y})" for s in ("&", "|", "^", "<<", ">>")
    )

    def add(self, x: str, y: str) -> str:
        return f"({x} {'|' if self.dtype is torch.bool else '+'} {y})"

    def neg(self, x: str) -> str:
        return f"(-{x})"

    def not_(self, x: str) -> str:
        return f"(!{x})" if self.dtype is torch.bool else f"(~{x})"

    def abs(self, x: str) -> str:
        if self.dtype.is_floating_point:
            return f"__builtin_fabs{self._f()}({x})"
        return f"({x} < 0 ? -{x} : {x})"

    def sqrt(self, x: str) -> str:
        return f"__builtin_sqrt{self._f()}({x})"

    def fma(self, x: str, y: str, z: str) -> str:
        return f"__builtin_fma{self._f()}({x}, {y}, {z})"

    def maximum(self, x: str, y: str) -> str:
        """NaN of either; of two zeros the second one, as ATen's vectors have it."""
        return self._larger(x, y, ">")

    def minimum(self, x: str, y: str) -> str:
        return self._larger(x, y, "<")

    def _larger(self, x: str, y: str, sign: str) -> str:
        plain = f"({x} {sign} {y} ? {x} : {y})"
        if not self.dtype.is_floating_point:
            return plain
        if NUMBER.fullmatch(y):  # which is not NaN
            return f"({y} {sign}= {x} ? {y} : {x})"
        return f"({x} != {x} ? {x} : {self.let(plain)})"  # two choices, or g++ writes no vectors

    def select(self, c: str, x: str, y: str) -> str:
        return f"({c} ? {x} : {y})"

    def call(self, name: str, *x: str) -> str:
        if name in ("exp", "log") and self.dtype is not torch.float64:
            return f"{name}_of({x[0]})"
        return f"__builtin_{name}{self._f()}({', '.join(x)})"

    def power(self, x: str, e: float) -> str:
        """x to a power that is no whole number."""
        if self.dtype is torch.float64:
            return self.call("pow", x, self.const(e))
        if e == 1 / 3:
            return f"cbrt_of({x})"
        return f"pow_of({x}, {e.hex()})"

    def hidden(self, x: str) -> str:
        """An integer that was a float. Where it becomes a float again, g++ would remove the digits
        only, so that zeros keep their sign."""
        return f"({x} ^ {self.once('unseen_zero')})"

    def noise(self, key: str, low: str, high: str, place: str) -> str:
        """A normal number, see `kernels/noise.h`."""
        own = self.once(f"noise_keys({key}, {low}, {high})")
        return f"noise_at<{VALUE[self.dtype]}>({own}, {place})"

    def const(self, x: Any) -> str:
        return self.constant(x, self.dtype)

    def let(self, x: str) -> str:
        return self._named(x, self.lines)

    def once(self, x: str) -> str:
        """A name for what is the same for all elements: g++ leaves choices in loops."""
        return self._named(x, self.outer)

    def _named(self, x: str, lines: list[str]) -> str:
        name = f"s{next(self.names)}"
        lines.append(f"const auto {name} = {x};")
        return name

    def _f(self) -> str:
        return "" if self.dtype is torch.float64 else "f"

    @staticmethod
    def cast(x: str, old: torch.dtype, new: torch.dtype) -> str:
        """A value in another dtype."""
        if old is new or (old in HALF and new is torch.float32):
            return x
        check_no_float8(new)
        if new in HALF:
            return f"to_{HALF[new]}((float){x})"
        if new is torch.bool:
            return f"({x} != 0)"
        if old is torch.bool:  # a choice, of which g++ makes vectors
            return f"({x} ? ({VALUE[new]})1 : ({VALUE[new]})0)"
        if old.is_floating_point and new in SHORT:  # C++ leaves a larger number undefined
            x = f"(int32_t){x}"
        return f"({VALUE[new]}){x}"

    @staticmethod
    def constant(x: Any, dtype: torch.dtype) -> str:
        """A number in a dtype."""
        if dtype is torch.bool:
            return "true" if x else "false"
        if not dtype.is_floating_point:
            return f"({VALUE[dtype]}){int(x)}LL"
        value, kind = float(x), VALUE[dtype]
        if dtype is not torch.float64 and math.isfinite(value):
            value = float(torch.tensor(value, dtype=dtype, device="cpu"))
        if value != value:
            return f'({kind})__builtin_nan("")'
        if math.isinf(value):
            return f"({kind}){'-' if value < 0 else ''}__builtin_inf()"
        return f"({kind}){value.hex()}"

    @staticmethod
    def bits(x: str, old: torch.dtype, new: torch.dtype) -> str:
        """The bits of a value as a value of another dtype."""
        if STORED[old] == VALUE[new]:
            return x if VALUE[old] == VALUE[new] else stored(x, old)
        raw = stored(x, old)
        return f"from_{HALF[new]}({raw})" if new in HALF else f"as<{VALUE[new]}>({raw})"


def load(text: str, dtype: torch.dtype) -> str:
    """An element in memory as a value."""
    return f"from_{HALF[dtype]}({text})" if dtype in HALF else text


def stored(text: str, dtype: torch.dtype) -> str:
    """A value as an element in memory."""
    return f"{HALF[dtype]}_bits({text})" if dtype in HALF else text


def text_of(name: str) -> str:
    """A file of C++ next to this one."""
    return Path(__file__).with_name(name).read_text("utf-8")


HEAD, DRIVER = text_of("head.h"), text_of("driver.h")
"""What a library begins and ends with."""

MATH = text_of("functions.h")
"""Functions of floats."""
