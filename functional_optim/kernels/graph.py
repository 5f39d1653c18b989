"""A rule's operations as a graph, and the dimensions of each value in it.

A graph is recorded on tensors of a few elements (`record.py`). What holds for every size is the
list of dimensions that each value has: `laid_out` follows these from operation to operation, and
refuses what it cannot follow. Neighbouring dimensions that no operation tells apart become one, so
an element-wise rule has a single dimension whatever the shape of its tensors, and the mean of each
row needs two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from functional_optim.kernels import ops
from functional_optim.kernels.node import Node, Unsuitable, indexed, reached


class Graph:
    """What a rule does to one tensor.

    inputs: the gradient, the parameter, and the slots. stores: which inputs get which new values.
    results: what it measures. sizes: of the axes, as recorded; a negative one is a constant.
    places: the constants that depend on the shape. parts: once axes are `merged`, of which
    dimensions each consists. block: of tensors that are seen as 1-D and in blocks, the elements of
    a block, and the first axis counts the blocks; else 0.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.inputs: list[Node] = []
        self.stores: list[tuple[int, Node]] = []
        self.results: list[Node] = []
        self.sizes: tuple[int, ...] = ()
        self.places: list[Place] = []
        self.parts: tuple[tuple[int, ...], ...] = ()
        self.block = 0
        self.reads_sizes = False
        """Whether a rule has asked for the size of a tensor."""

    def add(self, node: Node) -> Node:
        """Append a node."""
        node.index = len(self.nodes)
        self.nodes.append(node)
        return node

    def pruned(self) -> Graph:
        """The same without what neither a store nor a result depends on."""
        live = reached([*self.results, *[value for _, value in self.stores]])
        self.nodes = [x for x in self.nodes if x in live or x.op == "input"]
        for i, node in enumerate(self.nodes):
            node.index = i
        return self

    def opaque(self) -> Node | None:
        """The first operation that no kernel is written for; None if there is none."""
        return next((x for x in self.nodes if ops.kind(x.op) is None), None)

    def sizes_of(self, shape: Sequence[int]) -> list[int]:
        """The sizes of the axes for a parameter of a shape, once they are `merged`; for one in
        blocks, behind these how many elements it has."""
        if self.block:
            count = math.prod(shape)
            return [max(1, -(-count // self.block)), *map(abs, self.sizes[1:]), count]
        return [math.prod([shape[i] for i in own]) for own in self.parts]

    def by_element(self) -> bool:
        """Whether each element is a tensor's own, but for sums that are results; once axes are
        `merged`."""
        sums = [x for x in self.nodes if ops.kind(x.op) == "reduce"]
        read = {y for x in self.nodes for y in x.operands()}
        plain = all(ops.REDUCE[x.op] == "sum" and x not in read for x in sums)
        plain = plain and all(x in sums for x in self.results)
        return plain and len(self.sizes) == 1 and not (self.reads_sizes or self.reads_places)

    @property
    def reads_places(self) -> bool:
        """Whether a value depends on where an element is in its tensor."""
        return any(x.op == "iota" for x in self.nodes)


def same(a: Graph, b: Graph) -> bool:
    """Whether two recordings of other sizes are one graph, but for constants of operations on
    elements, see `differing`: each value has the same axes in both."""
    return _alike(a, b) and all(
        x.dims == y.dims and _plain_of(x) == _plain_of(y)
        for x, y in zip(a.nodes, b.nodes, strict=True)
    )


def same_flat(a: Graph, b: Graph) -> bool:
    """The same for recordings with other numbers of dimensions, whose axes are `merged` into one:
    each value is one number in both, or in none."""
    return _alike(a, b) and all(
        bool(x.axes) == bool(y.axes) for x, y in zip(a.nodes, b.nodes, strict=True)
    )


def fits(graph: Graph, real: Graph, sizes: Sequence[int]) -> bool:
    """Whether a graph says what was recorded for tensors of one shape, but for constants.

    graph: before its axes are merged. real: as recorded. sizes: of the axes for this shape.
    """
    if not _alike(graph, real):
        return False
    for x, y in zip(graph.nodes, real.nodes, strict=True):
        expected = x.shape_at(sizes)
        number = math.prod(y.shape) == 1 == math.prod(expected)
        if not number and (y.shape != expected or _plain_of(x) != _plain_of(y)):
            return False
        if not number and ops.permutation(x, len(x.shape)) != ops.permutation(y, len(x.shape)):
            return False
    return True


def _alike(a: Graph, b: Graph) -> bool:
    """Whether two recordings have the same operations on the same operands."""
    return (
        len(a.nodes) == len(b.nodes)
        and all(
            x.op == y.op
            and x.dtype is y.dtype
            and x.kwargs.keys() == y.kwargs.keys()
            and [z.index for z in x.operands()] == [z.index for z in y.operands()]
            for x, y in zip(a.nodes, b.nodes, strict=True)
        )
        and [(i, x.index) for i, x in a.stores] == [(i, x.index) for i, x in b.stores]
        and [x.index for x in a.results] == [x.index for x in b.results]
    )


def _plain_of(node: Node) -> Any:
    """The arguments of an operation besides tensors, except for its axes and `constants`."""
    kind = ops.kind(node.op)
    if kind == "point":
        return [x is None for x in node.args]
    if kind in ("view", "fill", "iota", "inside", "const"):
        return None
    return indexed(node.args), indexed(node.kwargs)


Place = tuple[int, int | str]
"""A constant of a graph: the index of its node, and which argument it is."""


def differing(a: Graph, b: Graph) -> list[Place]:
    """The constants in which two recordings of one graph differ."""
    return [place for place, x in constants(a).items() if not _equal(x, constants(b)[place])]


def constants(graph: Graph) -> dict[Place, Any]:
    """All constants of operations on elements, by their places."""
    found: dict[Place, Any] = {}
    for node in graph.nodes:
        kind = ops.kind(node.op)
        if kind == "point" or node.op == "const":
            given = [*enumerate(node.args), *node.kwargs.items()]
        elif kind == "fill":
            given = [(ops.FILLED, ops.filled(node.op, node.args))]
        else:
            continue
        for where, x in given:
            if isinstance(x, (bool, int, float)):
                found[node.index, where] = x
    return found


def values_at(graph: Graph, places: Sequence[Place]) -> tuple[float, ...]:
    """Some constants of a graph.

    Raises:
        Unsuitable: for an int of an operation on integers that is no float.
    """
    found = constants(graph)
    for i, where in places:
        x, node = found[i, where], graph.nodes[i]
        if isinstance(x, int) and float(x) != x and not node.dtype.is_floating_point:
            raise Unsuitable("a large int that depends on the shape", node.rule)
    return tuple([float(found[place]) for place in places])


def with_rows(graph: Graph, places: Sequence[Place]) -> Graph:
    """The graph with constants that depend on the shape instead of some."""
    made: dict[Node, dict[int | str, Node]] = {}
    for k, (i, where) in enumerate(places):
        row = Node("row", (k,), {}, torch.float64, (), host=True)
        made.setdefault(graph.nodes[i], {})[where] = row
    nodes: list[Node] = []
    for node in graph.nodes:
        own = made.get(node, {})
        nodes += [*own.values(), node]
        if node.op == "const" and own:
            node.op, node.args = "clone.default", (own[0],)
            continue
        if ops.FILLED in own:
            where = ops.filled_at(node.op)
            node.args = (*node.args[:where], own[ops.FILLED], *node.args[where + 1 :])
            continue
        node.args = tuple([own.get(i, x) for i, x in enumerate(node.args)])
        node.kwargs = {key: own.get(key, x) for key, x in node.kwargs.items()}
    graph.nodes = nodes
    for i, node in enumerate(nodes):
        node.index = i
    graph.places = [*places]
    return graph


def _equal(x: Any, y: Any) -> bool:
    if x != y:
        return x != x and y != y
    zeros = x == 0 and isinstance(x, (int, float)) and isinstance(y, (int, float))
    return not zeros or math.copysign(1, x) == math.copysign(1, y)


def laid_out(graph: Graph, sizes: Sequence[int]) -> Graph:
    """The graph with the axes of each value.

    Args:
        graph: as recorded.
        sizes: of the axes, as recorded; negative for one whose size is a constant.

    Raises:
        Unsuitable: if the order of elements in a value cannot be followed.
    """
    graph.sizes = tuple(sizes)
    for node in graph.nodes:
        node.dims = _dims(graph, node)
        node.axes = tuple([axis for own in node.dims for axis in own])
        if len(set(node.axes)) < len(node.axes):
            raise Unsuitable("one dimension twice in a value", node.rule)
        if node.op == "input" and [*node.axes] != sorted(node.axes):  # kernels read it in order
            raise Unsuitable("a slot with dimensions in another order than the parameter's")
    for i, value in graph.stores:
        if value.axes != graph.inputs[i].axes and not set(value.axes) < set(graph.inputs[i].axes):
            raise Unsuitable(f"a new value of shape {value.shape}", value.rule)
    return graph


def _dims(graph: Graph, node: Node) -> tuple[tuple[int, ...], ...]:
    kind = ops.kind(node.op)
    if kind in ("number", "const", "row") or not node.shape:
        return ()
    if kind == "input":
        return axes_of(node.shape, graph.sizes)
    if kind in ("iota", "inside"):
        return (_run_of(graph.sizes, node.shape[0]),)
    if kind == "fill":
        like = next(node.operands(), None)
        if like is not None and like.shape == node.shape:
            return like.dims
        return axes_of(node.shape, graph.sizes)
    first = next(node.operands())
    if kind == "reduce":
        gone = ops.reduced_dims(node)
        kept = ops.keeps_dims(node)
        return tuple(
            [() if i in gone else own for i, own in enumerate(first.dims) if kept or i not in gone]
        )
    if kind == "view":
        return _viewed(graph, node, first)
    if kind == "point":
        return _broadcast(node)
    raise Unsuitable(f"the operation {node.op}", node.rule)


def _viewed(graph: Graph, node: Node, x: Node) -> tuple[tuple[int, ...], ...]:
    order = ops.permutation(node, len(x.dims))
    if order is not None:
        return tuple([x.dims[i] for i in order])
    if node.op.startswith("expand"):
        return _expanded(graph, node, x)
    if node.op.startswith("squeeze") and any(
        size > 1 for size in [x.shape[i] for i in ops.squeezed(node)]
    ):
        raise Unsuitable("squeeze of a dimension that may have any size", node.rule)
    left = [axis for own in x.dims for axis in own]
    found: list[tuple[int, ...]] = []
    for size in node.shape:
        own: list[int] = []
        while math.prod([abs(graph.sizes[i]) for i in own]) < size:
            if not left:
                raise Unsuitable(f"a view as {node.shape}", node.rule)
            own.append(left.pop(0))
        if math.prod([abs(graph.sizes[i]) for i in own]) != size:
            raise Unsuitable(f"a view as {node.shape}", node.rule)
        found.append(tuple(own))
    return tuple(found)


def _expanded(graph: Graph, node: Node, x: Node) -> tuple[tuple[int, ...], ...]:
    """Dimensions of size 1 that have become larger are those of a value that is repeated."""
    new = len(node.shape) - len(x.dims)
    found = []
    for i, size in enumerate(node.shape):
        own = x.dims[i - new] if i >= new else ()
        found.append(own if own or size == 1 else _run_of(graph.sizes, size))
    return tuple(found)


def axes_of(shape: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For each dimension of a recorded tensor the axes that it consists of."""
    return tuple([() if size == 1 else _run_of(sizes, size) for size in shape])


def _run_of(sizes: Sequence[int], size: int) -> tuple[int, ...]:
    """The neighbouring axes of so many elements: sizes are chosen so that there is one answer."""
    for start in range(len(sizes)):
        for stop in range(start + 1, len(sizes) + 1):
            if abs(math.prod(sizes[start:stop])) == size:
                return tuple(range(start, stop))
    raise Unsuitable(f"a tensor with a dimension of {size}")


def _broadcast(node: Node) -> tuple[tuple[int, ...], ...]:
    found: list[tuple[int, ...]] = [()] * len(node.shape)
    for x in node.operands():
        for i, own in enumerate(reversed(x.dims)):
            if own and found[-1 - i] not in ((), own):
                raise Unsuitable("elements in two orders in one operation", node.rule)
            if own:
                found[-1 - i] = own
    return tuple(found)


def merged(graph: Graph) -> Graph:
    """The graph with as few axes as its operations tell apart; values list them in order."""
    count = len(graph.sizes)
    together = [
        graph.sizes[i] > 0 and graph.sizes[i + 1] > 0 and all(_beside(x, i) for x in graph.nodes)
        for i in range(count - 1)
    ]
    new, sizes = [0] * count, list(graph.sizes[:1])
    for i in range(1, count):
        if together[i - 1]:
            new[i] = new[i - 1]
            sizes[-1] *= graph.sizes[i]
        else:
            new[i] = len(sizes)
            sizes.append(graph.sizes[i])
    for node in graph.nodes:
        node.axes = tuple(sorted({new[i] for i in node.axes}))
        like = ops.kind(node.op) == "fill" and node.op != "scalar_tensor.default"
        if like and isinstance(node.args[0], Node):  # which no loop has to read
            node.args = (None, *node.args[1:])
    ends = range(len(sizes))
    graph.parts = tuple([tuple([i for i in range(count) if new[i] == k]) for k in ends])
    graph.sizes = tuple(sizes)
    return graph


def _beside(node: Node, i: int) -> bool:
    """Whether a value has two neighbouring axes in this order, or neither of them."""
    axes = node.axes
    if i not in axes and i + 1 not in axes:
        return True
    return i in axes and axes[axes.index(i) + 1 :][:1] == (i + 1,)
