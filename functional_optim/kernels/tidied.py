"""A graph of tensors in blocks, with each value once: what C++ keeps in memory, it keeps once."""

from __future__ import annotations

from typing import Any

from functional_optim.kernels import ops
from functional_optim.kernels.graph import Graph
from functional_optim.kernels.node import Node


def tidied(graph: Graph) -> Graph:
    """The same without views and copies that change no element, and without repetitions.

    The graph itself stays as it is.
    """
    copies = _Copies()
    made = copies.made
    made.inputs = [copies.of(x) for x in graph.inputs]
    for node in graph.nodes:
        copies.of(node)
    made.stores = [(i, copies.of(x)) for i, x in graph.stores]
    made.results = [copies.of(x) for x in graph.results]
    made.sizes, made.parts, made.places = graph.sizes, graph.parts, graph.places
    made.block, made.reads_sizes = graph.block, graph.reads_sizes
    return made.pruned()


class _Copies:
    """Copies of nodes, each one once."""

    def __init__(self) -> None:
        self.made = Graph()
        self.found: dict[Node, Node] = {}
        self.alike: dict[str, Node] = {}

    def of(self, node: Node) -> Node:
        """The copy of a node."""
        node = _origin(node)
        if node not in self.found:
            self.found[node] = self._copy(node)
        return self.found[node]

    def _copy(self, node: Node) -> Node:
        args = tuple([self._given(x) for x in node.args])
        kwargs = {key: self._given(x) for key, x in node.kwargs.items()}
        made = Node(
            node.op,
            args,
            kwargs,
            node.dtype,
            node.shape,
            host=node.host,
            rule=node.rule,
            within=node.within,
        )
        made.dims, made.axes = node.dims, node.axes
        key = repr((made.op, args, kwargs, made.dtype, made.dims, made.axes, made.host))
        if key not in self.alike:
            self.alike[key] = self.made.add(made)
        return self.alike[key]

    def _given(self, x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(self._given, x))
        return self.of(x) if isinstance(x, Node) else x


def _origin(node: Node) -> Node:
    """What a node is another name for."""
    while _is_alias(node):
        node = next(node.operands())
    return node


def _is_alias(node: Node) -> bool:
    if ops.kind(node.op) != "view" and node.op not in ops.SAME and node.op != ops.CAST:
        return False
    x = next(node.operands())
    return x.dtype is node.dtype and x.axes == node.axes and not x.host
