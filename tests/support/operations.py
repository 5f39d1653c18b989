"""Every operation that kernels have, numbers to try it on, and how far results are apart."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import functional_optim as fo

INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ATEN = {
    **dict.fromkeys(("sqrt", "pow_half", "exp", "log", "pow_number", "pow_tensor", "pow_base"), 1),
    **dict.fromkeys(("pow_4", "exp2", "log2", "log1p", "expm1", "sin", "cos", "tan", "atan"), 1),
    **dict.fromkeys(("sinh", "cosh", "asin", "acos", "asinh", "acosh", "erf", "hypot", "atan2"), 1),
    **{"tanh": 2, "atanh": 2, "erfc": 3, "sigmoid": 4, "lgamma": 4},
}
"""By how many units in the last place, at most, kernels differ from ATen's functions, which are
those of MKL and SLEEF; all other operations have the same bits. docs/training_loops.md has the
same list."""


def numbers(count: int, dtype: torch.dtype, seed: int, *, wild: bool) -> Tensor:
    """Random numbers of all sizes. wild: with infinities, NaN, zeros, and numbers of any bits."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    x = (normal[:, 0] * 10 ** (2 * normal[:, 1])).to(dtype)
    if not wild:
        return x
    words = torch.randint(-(1 << 31), 1 << 31, (2 * count,), generator=generator).to(torch.int32)
    x[::3] = words.view(dtype)[: len(x[::3])]
    limits = torch.finfo(dtype)
    odd = [0.0, math.inf, math.nan, limits.tiny, limits.smallest_normal / 8, limits.max, 1.0, 0.5]
    every = torch.tensor([*odd, *[-y for y in odd]], dtype=torch.float64).to(dtype)
    x[1::7] = every[torch.randint(len(every), (len(x[1::7]),), generator=generator)]
    return x


def apart(x: Tensor, y: Tensor) -> Tensor:
    """How many units in the last place numbers differ by; zeros of both signs by one."""
    if not x.is_floating_point():
        return (x != y).long()
    kind = INTS[x.element_size()]
    places = [
        torch.where(i < 0, torch.iinfo(kind).min - i.long() - 1, i.long())
        for i in (x.view(kind), y.view(kind))
    ]
    found = (places[0] - places[1]).abs()
    return torch.where(x.isnan() & y.isnan(), 0, found)


def bits(x: Tensor) -> Tensor:
    return x.view(INTS[x.dtype.itemsize])


ORDER, PAIRS = ("lt", "le", "gt", "ge", "eq", "ne"), ("copysign", "hypot", "atan2")
OPERATIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "add": lambda x, y, c: x + y,
    "add_number": lambda x, y, c: x + c,
    "add_alpha": lambda x, y, c: torch.add(x, y, alpha=0.3),
    "sub": lambda x, y, c: x - y,
    "sub_alpha": lambda x, y, c: torch.sub(x, y, alpha=0.3),
    "rsub": lambda x, y, c: torch.rsub(x, y, alpha=0.7),
    "rsub_number": lambda x, y, c: c - x,
    "mul": lambda x, y, c: x * y,
    "mul_number": lambda x, y, c: c * x,
    "div": lambda x, y, c: x / y,
    "div_number": lambda x, y, c: x / c,
    "number_div": lambda x, y, c: c / x,
    "one_div": lambda x, y, c: 1 / x,
    "reciprocal": lambda x, y, c: x.reciprocal(),
    "sqrt": lambda x, y, c: x.abs().sqrt(),
    "rsqrt": lambda x, y, c: x.abs().rsqrt(),
    "neg": lambda x, y, c: -x,
    "abs": lambda x, y, c: x.abs(),
    "square": lambda x, y, c: x.square(),
    "sign": lambda x, y, c: x.sign(),
    "relu": lambda x, y, c: x.relu(),
    "maximum": lambda x, y, c: torch.maximum(x, y),
    "minimum": lambda x, y, c: torch.minimum(x, y),
    "clamp": lambda x, y, c: x.clamp(-0.5, 2.0),
    "clamp_tensor": lambda x, y, c: x.clamp(min=y),
    "clamp_min": lambda x, y, c: x.clamp_min(0.1),
    "clamp_max": lambda x, y, c: x.clamp_max(0.1),
    "clamp_zero": lambda x, y, c: x.clamp(0, 1),
    "clamp_max_zero": lambda x, y, c: x.clamp_max(-0.0),
    "lerp": lambda x, y, c: x.lerp(y, c),
    "lerp_far": lambda x, y, c: x.lerp(y, 0.9),
    "lerp_tensor": lambda x, y, c: x.lerp(y, y.abs().clamp(max=1.0)),
    "addcmul": lambda x, y, c: x.addcmul(y, y),
    "addcmul_value": lambda x, y, c: x.addcmul(x, y, value=0.3),
    "addcdiv": lambda x, y, c: x.addcdiv(y, x),
    "addcdiv_value": lambda x, y, c: x.addcdiv(x, y, value=0.3),
    "where": lambda x, y, c: torch.where(x > y, x, y),
    "where_number": lambda x, y, c: torch.where(x > y, x, 0.25),
    "masked_fill": lambda x, y, c: x.masked_fill(y > 0, 0.25),
    **{name: lambda x, y, c, name=name: getattr(torch, name)(x, y) for name in (*ORDER, *PAIRS)},
    **{f"{x}_number": lambda x, y, c, name=x: getattr(x, name)(0.5) for x in ORDER},
    **{
        name: lambda x, y, c, name=name: getattr(x, name)()
        for name in (
            *("isnan", "isinf", "isfinite", "floor", "ceil", "trunc", "round", "exp", "log"),
            *("sin", "cos", "tan", "tanh", "log1p", "expm1", "erf", "erfc", "atan", "exp2"),
            *("log2", "asinh", "acosh", "atanh", "asin", "acos", "sigmoid", "logical_not"),
        )
    },
    **{
        name: lambda x, y, c, name=name: getattr(torch, name)(x > 0, y > 0)
        for name in ("logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or")
    },
    "sinh": lambda x, y, c: x.clamp(-80, 80).sinh(),
    "cosh": lambda x, y, c: x.clamp(-80, 80).cosh(),
    "lgamma": lambda x, y, c: x.abs().clamp(3, 1e5).lgamma(),
    "bits_and": lambda x, y, c: bits(x) & bits(y),
    "bits_and_number": lambda x, y, c: bits(x) & 0x7FF,
    "bits_or": lambda x, y, c: bits(x) | bits(y),
    "bits_xor": lambda x, y, c: bits(x) ^ bits(y),
    "bits_not": lambda x, y, c: ~bits(x),
    "shifted_left": lambda x, y, c: bits(x) << 3,
    "shifted_right": lambda x, y, c: bits(x) >> 3,
    "truncated": lambda x, y, c: 1 / x.clamp(-9, 9).int().to(x.dtype),
    "pow_2": lambda x, y, c: x**2,
    "pow_3": lambda x, y, c: x**3,
    "pow_4": lambda x, y, c: x**4,
    "pow_minus_1": lambda x, y, c: x**-1,
    "pow_minus_2": lambda x, y, c: x**-2,
    "pow_half": lambda x, y, c: x**0.5,
    "pow_minus_half": lambda x, y, c: x**-0.5,
    "pow_number": lambda x, y, c: x**-0.25,
    "pow_tensor": lambda x, y, c: x.abs().pow(y.clamp(-2, 2)),
    "pow_base": lambda x, y, c: torch.pow(1.5, x),
}


def computed(names: Any, dtype: torch.dtype) -> Any:
    """A rule whose slots are the results of operations on its gradient and its parameter."""
    one = torch.ones(1, dtype=dtype)
    kinds = {name: OPERATIONS[name](one, one, 0.3).dtype for name in names}
    results: Any = NamedTuple("Results", [(name, Tensor) for name in names])

    def init(p: Tensor) -> Any:
        return results(*[torch.zeros_like(p, dtype=kind) for kind in kinds.values()])

    def update(u: Tensor, slots: Any, p: Tensor, c: Any) -> Any:
        return u, results(*[OPERATIONS[name](u, p, c) for name in names])

    return fo.leafwise(init, update, lambda t: (0.3,), name="operations")
