"""Operations on elements, as they are made of the primitives of a printer.

A printer writes C++ or Triton. Its primitives are infix (`add sub mul div lt le gt ge eq ne bitand
bitor bitxor shl shr`), functions (`neg not_ abs sqrt fma select floor call const`), `let`, which
gives a text a name, and `once`, which does so before all loops. `b.dtype` is the dtype in which an
operation is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from functional_optim.kernels.node import Node, Unsuitable

Writer = Callable[..., str]

POINT: dict[str, Writer] = {}
"""How operations on elements are written: `writer(b, node, *operands, **named)`."""


def _op(*names: str) -> Callable[[Writer], Writer]:
    def keep(writer: Writer) -> Writer:
        POINT.update(dict.fromkeys(names, writer))
        return writer

    return keep


@_op("add.Tensor", "add.Scalar")
def _add(b: Any, n: Node, x: str, y: str, alpha: str | None = None) -> str:
    return b.add(x, y) if alpha is None else _fused(b, y, alpha, x)


@_op("sub.Tensor", "sub.Scalar")
def _sub(b: Any, n: Node, x: str, y: str, alpha: str | None = None) -> str:
    return b.sub(x, y) if alpha is None else _fused(b, y, b.neg(alpha), x)


def _fused(b: Any, x: str, y: str, z: str) -> str:
    """x * y + z, rounded once, as ATen does it for floats."""
    return b.fma(x, y, z) if b.dtype.is_floating_point else b.add(b.mul(x, y), z)


@_op("rsub.Tensor", "rsub.Scalar")
def _rsub(b: Any, n: Node, x: str, y: str, alpha: str | None = None) -> str:
    return _sub(b, n, y, x, alpha)


@_op("mul.Tensor", "mul.Scalar")
def _mul(b: Any, n: Node, x: str, y: str) -> str:
    return b.bitand(x, y) if b.dtype is torch.bool else b.mul(x, y)


@_op("sign.default", "sgn.default")
def _sign(b: Any, n: Node, x: str) -> str:
    zero, one = b.const(0.0), b.const(1.0)
    return b.sub(b.select(b.gt(x, zero), one, zero), b.select(b.lt(x, zero), one, zero))


@_op("clamp.default", "clamp.Tensor")
def _clamp(
    b: Any,
    n: Node,
    x: str,
    lo: str | None = None,
    hi: str | None = None,
    min: str | None = None,
    max: str | None = None,
) -> str:
    lo, hi = lo or min, hi or max
    if lo is not None:
        x = b.let(_at_least(b, n, x, lo))
    return x if hi is None else _at_most(b, n, x, hi)


@_op("clamp_min.default", "clamp_min.Tensor")
def _at_least(b: Any, n: Node, x: str, lo: str) -> str:
    return b.select(b.gt(lo, x), lo, x) if _is_zero(b, lo) else b.maximum(x, lo)


@_op("clamp_max.default", "clamp_max.Tensor")
def _at_most(b: Any, n: Node, x: str, hi: str) -> str:
    return b.select(b.lt(hi, x), hi, x) if _is_zero(b, hi) else b.minimum(x, hi)


def _is_zero(b: Any, bound: str) -> bool:
    """Whether a bound is the number 0, at which ATen keeps the sign of a zero."""
    return bound in (b.const(0.0), b.const(-0.0))


@_op("lerp.Tensor", "lerp.Scalar")
def _lerp(b: Any, n: Node, x: str, y: str, w: str) -> str:
    """From the nearer end, and fused, as ATen's vectors do it."""
    weight = n.args[2]
    let = b.let if isinstance(weight, Node) and weight.axes else b.once
    near = let(b.lt(b.abs(w), b.const(0.5)))
    w = let(b.select(near, w, b.sub(w, b.const(1.0))))
    return b.fma(w, b.sub(y, x), b.select(near, x, y))


@_op("addcmul.default")
def _addcmul(b: Any, n: Node, x: str, y: str, z: str, value: str | None = None) -> str:
    return _fused(b, y if value is None else b.mul(value, y), z, x)


@_op("addcdiv.default")
def _addcdiv(b: Any, n: Node, x: str, y: str, z: str, value: str | None = None) -> str:
    return b.add(x, b.div(y if value is None else b.mul(value, y), z))


def _plain(name: str) -> Writer:
    def write(b: Any, n: Node, *given: str) -> str:
        return getattr(b, name)(*given)

    return write


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    POINT[f"{_name}.Scalar"] = POINT[f"{_name}.Tensor"] = _plain(_name)


def _logical(name: str) -> Writer:
    def write(b: Any, n: Node, x: str, y: str) -> str:
        return getattr(b, name)(b.ne(x, b.const(0)), b.ne(y, b.const(0)))

    return write


POINT["logical_and.default"] = _logical("bitand")
POINT["logical_or.default"] = _logical("bitor")
POINT["logical_xor.default"] = _logical("ne")


def _shift(primitive: str) -> Writer:
    def write(b: Any, n: Node, x: str, y: str) -> str:
        bits = 8 * n.dtype.itemsize
        if n.args[1] in range(bits):
            return getattr(b, primitive)(x, y)
        # C++ leaves the others open
        inside = b.let(b.bitand(b.ge(y, b.const(0)), b.lt(y, b.const(bits))))
        if primitive == "shr" and n.dtype.is_signed:
            return b.shr(x, b.select(inside, y, b.const(bits - 1)))
        return b.select(
            inside, getattr(b, primitive)(x, b.select(inside, y, b.const(0))), b.const(0)
        )

    return write


for _writer, *_names in (
    (_plain("bitand"), "bitwise_and", "__and__"),
    (_plain("bitor"), "bitwise_or", "__or__"),
    (_plain("bitxor"), "bitwise_xor", "__xor__"),
    (_shift("shl"), "bitwise_left_shift", "__lshift__"),
    (_shift("shr"), "bitwise_right_shift", "__rshift__"),
):
    for _name in _names:
        for _kind in ("Scalar", "Tensor", "Tensor_Scalar"):
            POINT[f"{_name}.{_kind}"] = _writer


FUNCTIONS = (
    *("exp", "log", "sin", "cos", "tanh", "log1p", "expm1", "erf", "tan", "atan", "exp2", "log2"),
    *("sinh", "cosh", "asinh", "acosh", "atanh", "asin", "acos", "erfc", "lgamma"),
)
"""Functions of one number that a mathematical library has."""

for _name in FUNCTIONS:
    POINT[f"{_name}.default"] = lambda b, n, x, _name=_name: b.call(_name, x)
for _name, _call in (("floor", "floor"), ("ceil", "ceil"), ("trunc", "trunc"), ("round", "rint")):
    POINT[f"{_name}.default"] = lambda b, n, x, _call=_call: (
        b.call(_call, x) if b.dtype.is_floating_point else x
    )
for _name, _call in (("atan2", "default"), ("hypot", "default"), ("copysign", "Tensor")):
    POINT[f"{_name}.{_call}"] = lambda b, n, x, y, _name=_name: b.call(_name, x, y)


POWERS: dict[float, Callable[[Any, str, str], str]] = {
    1: lambda b, x, square: x,
    2: lambda b, x, square: square,
    3: lambda b, x, square: b.mul(square, x),
    0.5: lambda b, x, square: b.sqrt(x),
    -0.5: lambda b, x, square: b.div(b.const(1.0), b.sqrt(x)),
    -1: lambda b, x, square: b.div(b.const(1.0), x),
    -2: lambda b, x, square: b.div(b.const(1.0), square),
}
"""The squares and roots among powers, as ATen computes them."""


def _power_of(b: Any, n: Node, x: str, e: float) -> str:
    """A power of `POWERS`."""
    square = b.mul(x, x)
    if n.dtype is torch.bfloat16:  # ATen's vectors round it
        square = b.cast(b.cast(square, b.dtype, n.dtype), n.dtype, b.dtype)
    return POWERS[e](b, x, square)


@_op("pow.Tensor_Scalar")
def _power(b: Any, n: Node, x: str, e: str) -> str:
    known = n.args[1]
    if not b.dtype.is_floating_point and known not in (1, 2, 3):
        raise Unsuitable("a power of integers", n.rule)
    if known in (1, 2, 3) or (known in POWERS and n.dtype is not torch.float16):
        return _power_of(b, n, x, known)
    if isinstance(known, (int, float)) and math.isfinite(known):
        if n.dtype is torch.float32 and known == 1 / 3:
            return b.power(x, known)  # a cube root
        exponent = float(torch.tensor(known, dtype=n.dtype, device="cpu"))  # as ATen rounds it
        if math.isfinite(exponent) and not exponent.is_integer():
            return b.power(x, exponent)
        e = b.const(exponent)
    return b.call("pow", x, e)


@_op("pow.Tensor_Tensor", "pow.Scalar")
def _any_power(b: Any, n: Node, x: str, e: str) -> str:
    """A number of the step is a Python float where a rule runs eagerly: ATen sees what it is."""
    if not b.dtype.is_floating_point:
        raise Unsuitable("a power of integers", n.rule)
    found = b.call("pow", x, e)
    if n.op == "pow.Scalar" or not n.args[1].host:
        return found
    for value in POWERS:
        found = b.select(b.eq(e, b.const(value)), _power_of(b, n, x, value), found)
    return found


POINT |= {
    "div.Tensor": lambda b, n, x, y: b.div(x, y),
    "div.Scalar": lambda b, n, x, y: b.div(x, y),
    "reciprocal.default": lambda b, n, x: b.div(b.const(1.0), x),
    "sqrt.default": lambda b, n, x: b.sqrt(x),
    "rsqrt.default": lambda b, n, x: b.div(b.const(1.0), b.sqrt(x)),
    "neg.default": lambda b, n, x: b.neg(x),
    "abs.default": lambda b, n, x: b.abs(x),
    "square.default": lambda b, n, x: b.mul(x, x),
    "relu.default": lambda b, n, x: b.select(b.lt(x, b.const(0.0)), b.const(0.0), x),
    "maximum.default": lambda b, n, x, y: b.maximum(x, y),
    "minimum.default": lambda b, n, x, y: b.minimum(x, y),
    "where.self": lambda b, n, c, x, y: b.select(c, x, y),
    "masked_fill.Scalar": lambda b, n, x, c, y: b.select(c, y, x),
    "masked_fill.Tensor": lambda b, n, x, c, y: b.select(c, y, x),
    "isnan.default": lambda b, n, x: b.ne(x, x),
    "isinf.default": lambda b, n, x: (
        b.eq(b.abs(x), b.const(math.inf)) if b.dtype.is_floating_point else b.ne(x, x)
    ),
    "isfinite.default": lambda b, n, x: (
        b.lt(b.abs(x), b.const(math.inf)) if b.dtype.is_floating_point else b.eq(x, x)
    ),
    "logical_not.default": lambda b, n, x: b.eq(x, b.const(0)),
    "bitwise_not.default": lambda b, n, x: b.not_(x),
    "sigmoid.default": lambda b, n, x: b.div(
        b.const(1.0), b.add(b.const(1.0), b.call("exp", b.neg(x)))
    ),
}
