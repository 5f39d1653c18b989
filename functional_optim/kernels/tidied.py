"""A graph of tensors in blocks, with each value once: what C++ keeps in memory, it keeps once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from functional_optim.kernels import ops
from functional_optim.kernels.graph import Graph
from functional_optim.kernels.node import Node


def tidied(graph: Graph) -> Graph:
    """The same without views and copies that change no element, and without repetitions.

    The graph itself stays as it is.
    """
    made = Graph()
    found: dict[Node, Node] = {}
    alike: dict[str, Node] = {}

    def copied(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(copied, x))
        if not isinstance(x, Node):
            return x
        while _is_alias(x):  # another name for its operand
            x = next(x.operands())
        if x not in found:
            kwargs = {key: copied(y) for key, y in x.kwargs.items()}
            own = replace(x, args=copied(x.args), kwargs=kwargs)
            key = repr((own.op, own.args, kwargs, own.dtype, own.dims, own.axes, own.host))
            if key not in alike:
                alike[key] = made.add(own)
            found[x] = alike[key]
        return found[x]

    made.inputs = list(map(copied, graph.inputs))
    for node in graph.nodes:
        copied(node)
    made.stores = [(i, copied(x)) for i, x in graph.stores]
    made.results = list(map(copied, graph.results))
    made.sizes, made.parts, made.places = graph.sizes, graph.parts, graph.places
    made.block, made.reads_sizes = graph.block, graph.reads_sizes
    return made.pruned()


def _is_alias(node: Node) -> bool:
    if ops.kind(node.op) != "view" and node.op not in ops.SAME and node.op != ops.CAST:
        return False
    x = next(node.operands())
    return x.dtype is node.dtype and x.axes == node.axes and not x.host
