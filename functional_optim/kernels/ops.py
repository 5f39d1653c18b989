"""The operations that kernels know: of what kind each is, and how it is written of its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from functional_optim.kernels.node import Node, Unsuitable
from functional_optim.kernels.points import FUNCTIONS, POINT

Kind = Literal[
    "input", "number", "const", "row", "iota", "inside", "point", "view", "fill", "reduce"
]


def _default(names: str) -> set[str]:
    """The names of operations that have one overload."""
    return {f"{name}.default" for name in names.split()}


SAME = _default("clone detach alias lift_fresh contiguous")
"""Operations on elements that change nothing."""

VIEW = {
    *_default("view _unsafe_view reshape expand unsqueeze squeeze permute t view_as"),
    *("squeeze.dim", "squeeze.dims", "transpose.int", "flatten.using_ints"),
}
"""Operations after which the same elements have other dimensions."""

FILL = _default(
    "full full_like zeros zeros_like ones ones_like new_full new_zeros new_ones scalar_tensor"
)
"""Operations that make a tensor of one number."""

REDUCE = {
    **{"sum.default": "sum", "sum.dim_IntList": "sum", "mean.default": "mean", "mean.dim": "mean"},
    **{"amax.default": "max", "amin.default": "min", "max.default": "max", "min.default": "min"},
    **{f"{x}.{y}": x for x in ("any", "all") for y in ("default", "dim", "dims")},
}
"""Operations that make one value of several elements."""

COMBINED = {"mean": "sum", "any": "max", "all": "min"}
"""How parts of a reduction are put together, where that is not what it does."""

CAST = "_to_copy.default"

BITS = "view.dtype"

NOISE = "functional_optim.noise_at.default"
"""`core.randomness.noise_at`, of a key, two words of a step count, and the places of elements."""

FILLING = "fill_value"
"""What torch calls it where a rule passes it."""

FILLED = "value"
"""Stands for the number that fills a tensor, among the arguments of an operation."""


def kind(op: str) -> Kind | None:
    """What an operation does; None for one that no kernel has."""
    if op in ("input", "number", "const", "row", "iota", "inside"):
        return op
    if op in POINT or op in SAME or op in (CAST, BITS, NOISE):
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


def is_shardable(node: Node, *, flat: bool) -> bool:
    """Whether torch computes an operation right with DTensors, however they are divided. flat: the
    rule is element-wise."""
    name, what = node.op.partition(".")[0], kind(node.op)
    if node.within and not flat:
        return False
    if what == "reduce":
        return REDUCE[node.op] in ("sum", "mean")
    if what == "view":
        return name in ("expand", "permute", "t", "transpose", "unsqueeze")
    if what == "fill":
        return name.endswith("_like") or name == "scalar_tensor"
    return what not in ("iota", None)


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
    return 60 if name in CALLS or node.op == NOISE else 1


CALLS = {*FUNCTIONS, "atan2", "hypot", "sigmoid", "pow"}
"""Operations that are functions of a mathematical library."""


def computed_in(node: Node) -> torch.dtype:
    """The dtype in which an operation is done: half types as float32."""
    if node.op in COMPARISONS or node.op in LOGICAL:
        given = [_example(x) for x in node.args]
        return opmath(torch.result_type(*given) if len(given) > 1 else given[0].dtype)
    return opmath(node.dtype)


def _example(x: Any) -> Any:
    """An operand as torch needs it to tell of which dtype a result is."""
    if isinstance(x, (bool, int, float)):
        return x
    return torch.empty((0,) * len(x.shape), dtype=x.dtype, device="meta")


def _is_truncated(node: Node) -> bool:
    """Whether an integer follows from a float."""
    seen, waiting = set[Node](), [node]
    while waiting:
        x = waiting.pop()
        if x in seen or x.dtype.is_floating_point or x.dtype is torch.bool:
            continue
        seen.add(x)
        if x.op == CAST and x.args[0].dtype.is_floating_point:
            return True
        waiting += x.operands()
    return False


def _rounded(x: Any, node: Node) -> Any:
    """A Python number as ATen reads it in an operation."""
    wide = _widest(node.operands())
    if wide is None or not isinstance(x, float):
        return x
    read = number_dtype(node.op, wide)
    return x if read == opmath(wide) else torch.tensor(x, dtype=read, device="cpu").item()


def _widest(operands: Iterable[Any], *, shaped: bool = False) -> torch.dtype | None:
    """The widest floating dtype of tensors with dimensions; if there is none, and it need not be
    `shaped`, of those without."""
    floating = [x for x in operands if x.dtype.is_floating_point]
    with_dims = [x for x in floating if len(x.shape)]
    known = [x.dtype for x in with_dims or ([] if shaped else floating)]
    return max(known, key=lambda dtype: dtype.itemsize, default=None)


def opmath(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ATen computes."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


WIDE_NUMBERS = ("mul", "div", "addcmul", "addcdiv", "lerp", "floor_divide")
"""Operations whose Python number ATen does not round to the half type of the other operand."""


NEAR = ("mul", "div", "floor_divide")
"""Operations that do not round a second operand without dimensions, either."""


def number_dtype(op: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype to which ATen rounds a Python number that is combined with a tensor."""
    return opmath(dtype) if op.partition(".")[0] in WIDE_NUMBERS else dtype


def number_beside(op: str, others: Sequence[Any]) -> torch.dtype:
    """The dtype of a number of the step among the operands of an operation, where the others are
    tensors. One of no dimensions has all to say about the result's."""
    shaped = _widest(others, shaped=True)
    if shaped is not None:
        return number_dtype(op, shaped)
    return _widest(others) or torch.get_default_dtype()


COMPARISONS = {
    f"{name}.{kind}"
    for name in ("lt", "le", "gt", "ge", "eq", "ne")
    for kind in ("Scalar", "Tensor")
} | {"isnan.default", "isinf.default", "isfinite.default", "signbit.default"}
"""Operations whose results are true or false, done in the dtype of their operands."""

LOGICAL = {f"logical_{name}.default" for name in ("and", "or", "xor", "not")}

CHOICES = {"where.self": 0, "masked_fill.Scalar": 1, "masked_fill.Tensor": 1}
"""Operations with a condition, and which operand that is."""

NAMED = ("alpha", "value", "min", "max")
"""The operands that operations get by name."""


def expression(b: Any, node: Node, name: Callable[[Node], str]) -> str:
    """What a node is, of operands whose names `name` tells.

    b: a printer, which also has `cast(x, old, new)`, `constant(x, dtype)`, `bits(x, old, new)` and
        `hidden(x)`, an integer of which the compiler does not see that it was a float.

    Raises:
        Unsuitable: if no printer knows the operation.
    """
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
        back = op == CAST and node.dtype.is_floating_point and _is_truncated(first)
        x = b.hidden(name(first)) if back else name(first)
        return b.cast(x, first.dtype, node.dtype)
    if op == BITS:
        assert isinstance(first, Node)
        return b.bits(name(first), first.dtype, node.dtype)
    if op == NOISE:
        b.dtype = node.dtype
        return b.noise(*map(name, node.operands()))
    if op not in POINT:
        raise Unsuitable(f"the operation {op}", node.rule)
    b.dtype = computed_in(node)
    condition, widest = CHOICES.get(op), _widest(node.operands(), shaped=True)

    def operand(x: Any, place: Any) -> str | None:
        if x is None:
            return None
        if not isinstance(x, Node):
            return b.constant(_rounded(x, node), b.dtype)
        if place == condition:
            return name(x)
        text, old = name(x), x.dtype
        if not (x.shape or x.host) and old.is_floating_point and widest is not None:
            near = place == 1 and op.partition(".")[0] in NEAR
            dtype = opmath(widest) if near else widest
            text, old = b.cast(text, old, dtype), dtype
        if b.dtype.is_floating_point and _is_truncated(x):
            text = b.hidden(text)
        return b.cast(text, old, b.dtype)

    given = [operand(x, i) for i, x in enumerate(node.args)]
    named = {key: operand(x, key) for key, x in node.kwargs.items() if key in NAMED}
    text = POINT[op](b, node, *given, **named)
    made = torch.bool if op in COMPARISONS or op in LOGICAL else b.dtype
    return text if made is node.dtype else b.cast(text, made, node.dtype)
