"""Operations after which the same elements are at other indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from functional_optim.kernels import ops
from functional_optim.kernels.lane_loops import Index, plus
from functional_optim.kernels.node import Node, Unsuitable

Found = tuple[Node, Index, str]
"""The operand, the index of an element in it, and whether it exists: "true", "false" or a
condition; otherwise the element is 0."""
View = Callable[[Index], Found]


def source_of(node: Node) -> View | None:
    """Where the elements of a view come from; None for other operations."""
    name = node.op.partition(".")[0]
    if node.op in ops.SAME:
        return lambda i: (node.args[0], i, "true")
    if name in READERS:
        return lambda i: READERS[name](node, i)
    if node.op in ops.VIEW or node.op == "_reshape_alias.default":
        return lambda i: (node.args[0], reshaped(node.shape, node.args[0].shape, i), "true")
    return None


def reshaped(shape: Sequence[int], source: Sequence[int], index: Index) -> Index:
    """The index of an element before a change of shape that keeps the order of elements."""
    here = [(s, i) for s, i in zip(shape, index, strict=True) if s > 1]
    there = [s for s in source if s > 1]
    if [s for s, _ in here] == there:
        own = iter([i for _, i in here])
        return tuple([next(own) if s > 1 else 0 for s in source])
    flat: Any = 0
    for s, i in zip(shape, index, strict=True):
        flat = plus(times(flat, s), i)
    found: list[Any] = []
    step = math.prod(source)
    for s in source:
        step //= max(s, 1)
        if isinstance(flat, int):
            found.append(flat // step % s)
        else:
            found.append(f"(({flat}) / {step} % {s})" if s > 1 else 0)
    return tuple(found)


def times(a: Any, n: int) -> Any:
    return a * n if isinstance(a, int) else f"({a} * {n})"


def both(*conditions: str) -> str:
    if "false" in conditions:
        return "false"
    return " && ".join([x for x in conditions if x != "true"]) or "true"


def equal(a: Any, b: Any) -> str:
    if isinstance(a, int) and isinstance(b, int):
        return "true" if a == b else "false"
    return "true" if a == b else f"{a} == {b}"


def within(i: Any, start: int, stop: int) -> str:
    if isinstance(i, int):
        return "true" if start <= i < stop else "false"
    return f"({i} >= {start} && {i} < {stop})"


def _permuted(node: Node, index: Index) -> Found:
    x = node.args[0]
    order = ops.permutation(node, len(x.shape))
    assert order is not None
    found: list[Any] = [0] * len(order)
    for k, own in enumerate(order):
        found[own] = index[k]
    return x, tuple(found), "true"


def _expanded(node: Node, index: Index) -> Found:
    x = node.args[0]
    own = index[len(index) - len(x.shape) :]
    return x, tuple([0 if s == 1 else i for s, i in zip(x.shape, own, strict=True)]), "true"


def _selected(node: Node, index: Index) -> Found:
    x, dim, at = node.args[:3]
    dim %= len(x.shape)
    return x, (*index[:dim], at % x.shape[dim], *index[dim:]), "true"


def _unbound(node: Node, index: Index) -> Found:
    x = node.args[0]
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(x.shape)
    return x, (*index[:dim], _which(node), *index[dim:]), "true"


def _which(node: Node) -> int:
    """Which of several results a node is."""
    return int(node.op.partition("[")[2][:-1])


def _sliced(node: Node, index: Index) -> Found:
    x, dim, start, step = _slice(node.args, node.args[0].shape)
    return x, (*index[:dim], plus(times(index[dim], step), start), *index[dim + 1 :]), "true"


def _slice(args: tuple[Any, ...], shape: Sequence[int]) -> tuple[Any, int, int, int]:
    """The operand, the dimension, its first index and the step, of a tensor of a shape."""
    x, *rest = args
    dim, start, end, step = [*rest, *[None] * 4][:4]
    dim = (dim or 0) % len(shape)
    first, _, every = slice(start, end, step).indices(shape[dim])
    return x, dim, first, every


def _split(node: Node, index: Index) -> Found:
    x, sizes = node.args[:2]
    dim = (node.args[2] if len(node.args) > 2 else 0) % len(x.shape)
    which = _which(node)
    start = sizes * which if isinstance(sizes, int) else sum(sizes[:which])
    return x, (*index[:dim], plus(index[dim], start), *index[dim + 1 :]), "true"


def _selected_backward(node: Node, index: Index) -> Found:
    x, sizes, dim, at = node.args[:4]
    dim %= len(sizes)
    return x, (*index[:dim], *index[dim + 1 :]), equal(index[dim], at % sizes[dim])


def _sliced_backward(node: Node, index: Index) -> Found:
    x, dim, start, step = _slice((node.args[0], *node.args[2:]), node.shape)
    count, i = x.shape[dim], index[dim]
    inside = within(i, start, start + (count - 1) * step + 1)
    if isinstance(i, int):
        if (i - start) % step:
            inside = "false"
        own: Any = (i - start) // step
    else:
        if step > 1:
            inside = both(inside, f"({i} - {start}) % {step} == 0")
        own = f"(({i} - {start}) / {step})" if step > 1 else f"({i} - {start})"
    return x, (*index[:dim], own, *index[dim + 1 :]), inside


def _padded(node: Node, index: Index) -> Found:
    x, widths = node.args[:2]
    if len(node.args) > 2 and node.args[2] != 0:
        raise Unsuitable("padding with another number than 0")
    found, conditions = list(index), []
    for k in range(len(widths) // 2):
        dim = len(index) - 1 - k
        before = widths[2 * k]
        conditions.append(within(index[dim], before, before + x.shape[dim]))
        found[dim] = plus(index[dim], -before) if before else index[dim]
    return x, tuple(found), both(*conditions)


def _diagonal(node: Node, index: Index) -> Found:
    x = node.args[0]
    offset, a, b = ([*node.args[1:], *[None] * 3])[:3]
    offset = node.kwargs.get("offset", offset) or 0
    a = node.kwargs.get("dim1", 0 if a is None else a) % len(x.shape)
    b = node.kwargs.get("dim2", 1 if b is None else b) % len(x.shape)
    found: list[Any] = []
    rest = iter(index[:-1])
    for k in range(len(x.shape)):
        if k == a:
            found.append(plus(index[-1], max(-offset, 0)))
        elif k == b:
            found.append(plus(index[-1], max(offset, 0)))
        else:
            found.append(next(rest))
    return x, tuple(found), "true"


def _diagonal_matrix(node: Node, index: Index) -> Found:
    x = node.args[0]
    given = [node.kwargs.get("offset", 0), node.kwargs.get("dim1", -2), node.kwargs.get("dim2", -1)]
    if [*node.args[1:], *given[len(node.args) - 1 :]] != [0, -2, -1]:
        raise Unsuitable("a diagonal that is not the main one")
    return x, (*index[:-2], index[-1]), equal(index[-2], index[-1])


def _flipped(node: Node, index: Index) -> Found:
    x, dims = node.args[:2]
    found = list(index)
    for dim in dims:
        size, i = x.shape[dim], index[dim]
        found[dim] = size - 1 - i if isinstance(i, int) else f"({size - 1} - {i})"
    return x, tuple(found), "true"


READERS: dict[str, Callable[[Node, Index], Found]] = {
    "permute": _permuted,
    "transpose": _permuted,
    "t": _permuted,
    "expand": _expanded,
    "select": _selected,
    "unbind": _unbound,
    "slice": _sliced,
    "split": _split,
    "split_with_sizes": _split,
    "select_backward": _selected_backward,
    "slice_backward": _sliced_backward,
    "constant_pad_nd": _padded,
    "diagonal": _diagonal,
    "diag_embed": _diagonal_matrix,
    "flip": _flipped,
}
