"""The operations that kernels know: of what kind each is, and how it is made of primitives.

A printer writes C++ or Triton. Its primitives are infix (`add sub mul div lt le gt ge eq ne bitand
bitor bitxor shl shr`), functions (`neg not_ abs sqrt fma select floor call const`), and `let`,
which gives a text a name. `b.dtype` is the dtype in which an operation is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from functional_optim.kernels.graph import Node

Kind = Literal[
    "input", "number", "const", "row", "iota", "inside", "point", "view", "fill", "reduce"
]

Writer = Callable[..., str]

POINT: dict[str, Writer] = {}
"""How operations on elements are written: `writer(b, node, *operands, **named)`."""

SAME = {
    "clone.default",
    "detach.default",
    "alias.default",
    "lift_fresh.default",
    "contiguous.default",
}
"""Operations on elements that change nothing."""

VIEW = {
    "view.default",
    "_unsafe_view.default",
    "reshape.default",
    "expand.default",
    "unsqueeze.default",
    "squeeze.default",
    "squeeze.dim",
    "squeeze.dims",
    "permute.default",
    "transpose.int",
    "t.default",
    "view_as.default",
    "flatten.using_ints",
}
"""Operations after which the same elements have other dimensions."""

FILL = {
    "full.default",
    "full_like.default",
    "zeros.default",
    "zeros_like.default",
    "ones.default",
    "ones_like.default",
    "new_full.default",
    "new_zeros.default",
    "new_ones.default",
    "scalar_tensor.default",
}
"""Operations that make a tensor of one number."""

REDUCE = {
    "sum.default": "sum",
    "sum.dim_IntList": "sum",
    "mean.default": "mean",
    "mean.dim": "mean",
    "amax.default": "max",
    "amin.default": "min",
    "max.default": "max",
    "min.default": "min",
    "any.default": "any",
    "any.dim": "any",
    "any.dims": "any",
    "all.default": "all",
    "all.dim": "all",
    "all.dims": "all",
}
"""Operations that make one value of several elements."""

CAST = "_to_copy.default"

BITS = "view.dtype"

FILLED = "value"
"""Stands for the number that fills a tensor, among the arguments of an operation."""


def kind(op: str) -> Kind | None:
    """What an operation does; None for one that no kernel has."""
    if op in ("input", "number", "const", "row", "iota", "inside"):
        return op
    if op in POINT or op in SAME or op in (CAST, BITS):
        return "point"
    if op in VIEW:
        return "view"
    if op in FILL:
        return "fill"
    return "reduce" if op in REDUCE else None


def filled(op: str, args: tuple[Any, ...]) -> Any:
    """The number with which an operation fills a tensor."""
    if op.startswith(("zeros", "new_zeros")):
        return 0
    if op.startswith(("ones", "new_ones")):
        return 1
    return args[filled_at(op)]


def filled_at(op: str) -> int:
    """Which argument of an operation is the number with which it fills a tensor."""
    return {"scalar_tensor.default": 0, "new_full.default": 2}.get(op, 1)


def reduced_dims(node: Node) -> set[int]:
    """The dimensions of its operand over which a reduction goes."""
    count = len(next(node.operands()).shape)
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if given is None or given == ():
        return set(range(count))
    each = (given,) if isinstance(given, int) else given
    return {x % count for x in each} if count else set()


def keeps_dims(node: Node) -> bool:
    """Whether a reduction leaves dimensions of size 1."""
    given = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    return bool(given)


def permutation(node: Node, count: int) -> list[int] | None:
    """The order of dimensions that a view has changed; None if it has not."""
    order = list(range(count))
    if node.op == "permute.default":
        return [i % count for i in node.args[1]]
    if node.op == "transpose.int":
        a, b = (i % count for i in node.args[1:3])
        order[a], order[b] = b, a
        return order
    return order[::-1] if node.op == "t.default" else None


def squeezed(node: Node) -> list[int]:
    """The dimensions that a squeeze takes away if they are of size 1."""
    count = len(next(node.operands()).shape)
    if node.op == "squeeze.default":
        return list(range(count))
    given = node.args[1]
    return [i % count for i in ((given,) if isinstance(given, int) else given)]


def cost(node: Node) -> int:
    """About what an operation costs, in sums of two elements."""
    name = node.op.partition(".")[0]
    if name in ("div", "reciprocal", "sqrt", "addcdiv"):
        return 9
    if name == "rsqrt" or (name == "pow" and node.args[1] in (0.5, -0.5, -1, -2)):
        return 18
    return 60 if name in CALLS else 1


CALLS = {
    *("exp", "log", "sin", "cos", "tanh", "log1p", "expm1", "erf", "tan", "atan", "exp2", "log2"),
    *(
        "sinh",
        "cosh",
        "asinh",
        "acosh",
        "atanh",
        "asin",
        "acos",
        "erfc",
        "lgamma",
        "atan2",
        "hypot",
    ),
    *("sigmoid", "pow"),
}
"""Operations that are functions of a mathematical library."""


def computed_in(node: Node) -> torch.dtype:
    """The dtype in which an operation is done: half types as float32."""
    if node.op in COMPARISONS or node.op in LOGICAL:
        given = list(node.operands())
        sized = [x for x in given if x.shape] or given
        most = max([x.dtype for x in sized], key=lambda d: (d.is_floating_point, d.itemsize))
        constant = any(type(x) is float for x in node.args)
        if constant and not most.is_floating_point:
            most = torch.get_default_dtype()
        return opmath(most)
    return opmath(node.dtype)


def opmath(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ATen computes."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _op(*names: str) -> Callable[[Writer], Writer]:
    def keep(writer: Writer) -> Writer:
        POINT.update(dict.fromkeys(names, writer))
        return writer

    return keep


@_op("add.Tensor", "add.Scalar")
def _add(b: Any, n: Node, x: str, y: str, alpha: str | None = None) -> str:
    return b.add(x, y) if alpha is None else b.fma(y, alpha, x)


@_op("sub.Tensor", "sub.Scalar")
def _sub(b: Any, n: Node, x: str, y: str, alpha: str | None = None) -> str:
    return b.sub(x, y) if alpha is None else b.fma(y, b.neg(alpha), x)


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
        x = b.let(b.maximum(x, lo))
    return x if hi is None else b.minimum(x, hi)


@_op("lerp.Tensor", "lerp.Scalar")
def _lerp(b: Any, n: Node, x: str, y: str, w: str) -> str:
    """From the nearer end, and fused, as ATen's vectors do it."""
    d = b.sub(y, x)
    near = b.let(b.lt(b.abs(w), b.const(0.5)))
    return b.fma(b.select(near, w, b.sub(w, b.const(1.0))), d, b.select(near, x, y))


@_op("addcmul.default")
def _addcmul(b: Any, n: Node, x: str, y: str, z: str, value: str | None = None) -> str:
    return b.fma(y if value is None else b.mul(value, y), z, x)


@_op("addcdiv.default")
def _addcdiv(b: Any, n: Node, x: str, y: str, z: str, value: str | None = None) -> str:
    return b.add(x, b.div(y if value is None else b.mul(value, y), z))


def _plain(name: str) -> Writer:
    def write(b: Any, n: Node, *given: str) -> str:
        return getattr(b, name)(*given)

    return write


COMPARISONS = {
    f"{name}.{kind}"
    for name in ("lt", "le", "gt", "ge", "eq", "ne")
    for kind in ("Scalar", "Tensor")
} | {"isnan.default", "isinf.default", "isfinite.default", "signbit.default"}
"""Operations whose results are true or false, done in the dtype of their operands."""

LOGICAL = {f"logical_{name}.default" for name in ("and", "or", "xor", "not")}

for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    POINT[f"{_name}.Scalar"] = POINT[f"{_name}.Tensor"] = _plain(_name)


def _logical(name: str) -> Writer:
    def write(b: Any, n: Node, x: str, y: str) -> str:
        return getattr(b, name)(b.ne(x, b.const(0)), b.ne(y, b.const(0)))

    return write


POINT["logical_and.default"] = _logical("bitand")
POINT["logical_or.default"] = _logical("bitor")
POINT["logical_xor.default"] = _logical("ne")


for _name, _primitive in {
    "bitwise_and": "bitand",
    "bitwise_or": "bitor",
    "bitwise_xor": "bitxor",
    "__and__": "bitand",
    "__or__": "bitor",
    "__xor__": "bitxor",
    "__lshift__": "shl",
    "__rshift__": "shr",
    "bitwise_left_shift": "shl",
    "bitwise_right_shift": "shr",
}.items():
    for _kind in ("Scalar", "Tensor", "Tensor_Scalar"):
        POINT[f"{_name}.{_kind}"] = _plain(_primitive)


for _name in ("exp", "log", "sin", "cos", "tanh", "log1p", "expm1", "erf", "tan", "atan"):
    POINT[f"{_name}.default"] = lambda b, n, x, _name=_name: b.call(_name, x)
for _name, _call in {
    "exp2": "exp2",
    "log2": "log2",
    "sinh": "sinh",
    "cosh": "cosh",
    "asinh": "asinh",
    "acosh": "acosh",
    "atanh": "atanh",
    "asin": "asin",
    "acos": "acos",
    "erfc": "erfc",
    "floor": "floor",
    "ceil": "ceil",
    "trunc": "trunc",
    "round": "rint",
    "lgamma": "lgamma",
}.items():
    POINT[f"{_name}.default"] = lambda b, n, x, _call=_call: b.call(_call, x)
for _name, _call in (("atan2", "default"), ("hypot", "default"), ("copysign", "Tensor")):
    POINT[f"{_name}.{_call}"] = lambda b, n, x, y, _name=_name: b.call(_name, x, y)


@_op("pow.Tensor_Scalar")
def _power(b: Any, n: Node, x: str, e: str) -> str:
    """The squares and roots among powers, as ATen computes them."""
    known = n.args[1]
    if isinstance(known, (int, float)):
        if known == 1:
            return x
        if known == 2:
            return b.mul(x, x)
        if known == 3:
            return b.mul(b.mul(x, x), x)
        if known == -1:
            return b.div(b.const(1.0), x)
        if known == -2:
            return b.div(b.const(1.0), b.mul(x, x))
        if known == 0.5:
            return b.sqrt(x)
        if known == -0.5:
            return b.div(b.const(1.0), b.sqrt(x))
        if not float(known).is_integer() and math.isfinite(known):
            return b.power(x, float(known))
    return b.call("pow", x, e)


def _one(b: Any) -> str:
    return b.const(1.0)


POINT |= {
    "div.Tensor": lambda b, n, x, y: b.div(x, y),
    "div.Scalar": lambda b, n, x, y: b.div(x, y),
    "reciprocal.default": lambda b, n, x: b.div(_one(b), x),
    "sqrt.default": lambda b, n, x: b.sqrt(x),
    "rsqrt.default": lambda b, n, x: b.div(_one(b), b.sqrt(x)),
    "neg.default": lambda b, n, x: b.neg(x),
    "abs.default": lambda b, n, x: b.abs(x),
    "square.default": lambda b, n, x: b.mul(x, x),
    "relu.default": lambda b, n, x: b.select(b.lt(x, b.const(0.0)), b.const(0.0), x),
    "maximum.default": lambda b, n, x, y: b.maximum(x, y),
    "minimum.default": lambda b, n, x, y: b.minimum(x, y),
    "clamp_min.default": lambda b, n, x, lo: b.maximum(x, lo),
    "clamp_min.Tensor": lambda b, n, x, lo: b.maximum(x, lo),
    "clamp_max.default": lambda b, n, x, hi: b.minimum(x, hi),
    "clamp_max.Tensor": lambda b, n, x, hi: b.minimum(x, hi),
    "where.self": lambda b, n, c, x, y: b.select(c, x, y),
    "masked_fill.Scalar": lambda b, n, x, c, y: b.select(c, y, x),
    "masked_fill.Tensor": lambda b, n, x, c, y: b.select(c, y, x),
    "isnan.default": lambda b, n, x: b.ne(x, x),
    "isinf.default": lambda b, n, x: b.eq(b.abs(x), b.const(math.inf)),
    "isfinite.default": lambda b, n, x: b.lt(b.abs(x), b.const(math.inf)),
    "logical_not.default": lambda b, n, x: b.eq(x, b.const(0)),
    "bitwise_not.default": lambda b, n, x: b.not_(x),
    "sigmoid.default": lambda b, n, x: b.div(_one(b), b.add(_one(b), b.call("exp", b.neg(x)))),
    "pow.Tensor_Tensor": lambda b, n, x, y: b.call("pow", x, y),
    "pow.Scalar": lambda b, n, x, y: b.call("pow", x, y),
}

CHOICES = {"where.self": 0, "masked_fill.Scalar": 1, "masked_fill.Tensor": 1}
"""Operations with a condition, and which operand that is."""

NAMED = ("alpha", "value", "min", "max")
"""The operands that operations get by name."""


def expression(b: Any, node: Node, name: Callable[[Node], str]) -> str:
    """What a node is, of operands whose names `name` tells.

    b: a printer, which also has `cast(x, old, new)`, `constant(x, dtype)` and `bits(x, old, new)`.

    Raises:
        Unsuitable: if no printer knows the operation.
    """
    from functional_optim.kernels.graph import Node, Unsuitable

    op, first = node.op, node.args[0] if node.args else None
    if op == "const":
        return b.constant(first, node.dtype)
    if kind(op) == "fill":
        value = filled(op, node.args)
        if isinstance(value, Node):
            return b.cast(name(value), value.dtype, node.dtype)
        return b.constant(value, node.dtype)
    if kind(op) in ("view", "reduce") or op in SAME or op == CAST:
        assert isinstance(first, Node)
        return b.cast(name(first), first.dtype, node.dtype)
    if op == BITS:
        assert isinstance(first, Node)
        return b.bits(name(first), first.dtype, node.dtype)
    if op not in POINT:
        raise Unsuitable(f"the operation {op}", node.rule)
    b.dtype = computed_in(node)
    condition = CHOICES.get(op)

    def operand(x: Any, place: Any) -> str | None:
        if x is None:
            return None
        if not isinstance(x, Node):
            return b.constant(x, b.dtype)
        return name(x) if place == condition else b.cast(name(x), x.dtype, b.dtype)

    given = [operand(x, i) for i, x in enumerate(node.args)]
    named = {key: operand(x, key) for key, x in node.kwargs.items() if key in NAMED}
    text = POINT[op](b, node, *given, **named)
    made = torch.bool if op in COMPARISONS or op in LOGICAL else b.dtype
    return text if made is node.dtype else b.cast(text, made, node.dtype)
