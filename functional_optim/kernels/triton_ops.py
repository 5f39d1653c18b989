"""How each operation of a graph is written in Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from functional_optim.kernels.building import Unsuitable

TYPES = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.bool: "tl.int1",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.float8_e4m3fn: "tl.uint8",
    torch.float8_e5m2: "tl.uint8",
}
"""The Triton type of each dtype. Of floats of 8 bits kernels see the bits."""

aten = torch.ops.aten

SAME = {aten.clone.default, aten.alias.default, aten.detach.default}
"""Operations that change nothing."""

CHOICES = {aten.where.self}
"""Operations whose first operand is a condition."""

NAN = "propagate_nan=tl.PropagateNan.ALL"

COMPARISONS = {
    getattr(getattr(aten, name), kind): f"{{}} {sign} {{}}"
    for name, sign in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items()
    for kind in ("Scalar", "Tensor")
}
COMPARISONS |= {
    aten.isnan.default: "{0} != {0}",
    aten.isinf.default: "tl.abs({}) == float('inf')",
}
"""Operations on numbers, in the numbers' dtype, whose results are true or false."""

ELEMENTWISE: dict[Any, str] = {
    **COMPARISONS,
    aten.add.Tensor: "{} + {}",
    aten.sub.Tensor: "{} - {}",
    aten.mul.Tensor: "{} * {}",
    aten.abs.default: "tl.abs({})",
    aten.maximum.default: f"tl.maximum({{}}, {{}}, {NAN})",
    aten.minimum.default: f"tl.minimum({{}}, {{}}, {NAN})",
    aten.clamp_min.default: f"tl.maximum({{}}, {{}}, {NAN})",
    aten.clamp_min.Tensor: f"tl.maximum({{}}, {{}}, {NAN})",
    aten.clamp_max.default: f"tl.minimum({{}}, {{}}, {NAN})",
    aten.clamp_max.Tensor: f"tl.minimum({{}}, {{}}, {NAN})",
    aten.where.self: "tl.where({}, {}, {})",
    **{
        getattr(getattr(aten, name), kind): f"{{}} {sign} {{}}"
        for name, sign in {
            "bitwise_and": "&",
            "bitwise_or": "|",
            "bitwise_xor": "^",
            "__lshift__": "<<",
            "__rshift__": ">>",
        }.items()
        for kind in ("Scalar", "Tensor")
    },
    aten.logical_and.default: "{} & {}",
    aten.logical_or.default: "{} | {}",
    aten.logical_xor.default: "{} ^ {}",
    aten.logical_not.default: "{} == 0",
    aten.floor.default: "tl.floor({})",
    aten.ceil.default: "tl.ceil({})",
    **{
        getattr(aten, name).default: f"libdevice.{call}({{}})"
        for name, call in {
            "exp": "exp",
            "exp2": "exp2",
            "expm1": "expm1",
            "log": "log",
            "log2": "log2",
            "log1p": "log1p",
            "sin": "sin",
            "cos": "cos",
            "tan": "tan",
            "sinh": "sinh",
            "cosh": "cosh",
            "tanh": "tanh",
            "asinh": "asinh",
            "acosh": "acosh",
            "atanh": "atanh",
            "atan": "atan",
            "erf": "erf",
            "erfc": "erfc",
            "round": "rint",
            "trunc": "trunc",
        }.items()
    },
    aten.atan2.default: "libdevice.atan2({}, {})",
    aten.hypot.default: "libdevice.hypot({}, {})",
    aten.copysign.Tensor: "libdevice.copysign({}, {})",
    aten.pow.Tensor_Tensor: "libdevice.pow({}, {})",
}
"""Operations that are written alike in every dtype."""


def _quotient(a: str, b: str, dtype: torch.dtype) -> str:
    """Correctly rounded, which Triton's own `/` is in float64 alone."""
    return f"{a} / {b}" if dtype is torch.float64 else f"tl.div_rn({a}, {b})"


def _negative(a: str, dtype: torch.dtype) -> str:
    """Triton's own minus is 0 - x, which makes 0 of 0, and not -0."""
    return f"{a} * -1.0" if dtype.is_floating_point else f"-{a}"


def _root(a: str, dtype: torch.dtype) -> str:
    return f"tl.sqrt({a})" if dtype is torch.float64 else f"tl.sqrt_rn({a})"


def _one(dtype: torch.dtype) -> str:
    return f"tl.full((), 1.0, {TYPES[dtype]})"


def _sign(a: str, dtype: torch.dtype) -> str:
    zero = f"tl.full((), 0.0, {TYPES[dtype]})"
    return f"tl.where({a} > 0, {_one(dtype)}, {zero}) - tl.where({a} < 0, {_one(dtype)}, {zero})"


def _power(a: str, b: str, dtype: torch.dtype) -> str:
    """The squares and roots among powers, as torch computes them."""
    exponent = b.removeprefix("tl.full((), ").split(",")[0]
    plain: dict[str, str] = {
        "2.0": f"{a} * {a}",
        "3.0": f"{a} * {a} * {a}",
        "1.0": a,
        "0.5": _root(a, dtype),
        "-1.0": _quotient(_one(dtype), a, dtype),
    }
    return plain.get(exponent, f"libdevice.pow({a}, {b})")


def _sigmoid(a: str, dtype: torch.dtype) -> str:
    return _quotient(_one(dtype), f"({_one(dtype)} + libdevice.exp(-{a}))", dtype)


def _not(a: str, dtype: torch.dtype) -> str:
    return f"{a} == 0" if dtype is torch.bool else f"~{a}"


BY_DTYPE: dict[Any, Callable[..., str]] = {
    aten.neg.default: _negative,
    aten.bitwise_not.default: _not,
    aten.div.Tensor: _quotient,
    aten.sqrt.default: _root,
    aten.rsqrt.default: lambda a, dtype: _quotient(_one(dtype), _root(a, dtype), dtype),
    aten.reciprocal.default: lambda a, dtype: _quotient(_one(dtype), a, dtype),
    aten.sign.default: _sign,
    aten.sigmoid.default: _sigmoid,
    aten.pow.Tensor_Scalar: _power,
}
"""Operations whose text depends on the dtype in which they are done."""


def written(target: Any, operands: Sequence[str], dtype: torch.dtype) -> str:
    """An operation on operands of a dtype.

    Raises:
        Unsuitable: if it is not known.
    """
    if target in BY_DTYPE:
        return BY_DTYPE[target](*operands, dtype=dtype)
    if target not in ELEMENTWISE:
        raise Unsuitable(f"a rule with {target}")
    return ELEMENTWISE[target].format(*operands)
