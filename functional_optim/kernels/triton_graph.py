"""From a graph of tensor operations to lines of Triton, node by node."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from functional_optim.kernels.building import Unsuitable
from functional_optim.kernels.tracing import Trace
from functional_optim.kernels.triton_ops import CHOICES, COMPARISONS, SAME, TYPES, written

aten, prims = torch.ops.aten, torch.ops.prims

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes in which torch does not compute."""


class GraphWriter:
    """The lines of a graph of some tensors and a vector of numbers.

    Tensors are x0, x1 …, numbers n0, n1 …. read: the indices of the tensors that a line reads.
    returned: the nodes that the graph returns.
    """

    def __init__(self, traced: Trace, dtypes: Sequence[torch.dtype]) -> None:
        self.nodes = list(traced.graph.graph.nodes)
        inputs = [node for node in self.nodes if node.op == "placeholder"]
        *tensors, self.vector = inputs[-len(dtypes) - 1 :]  # a size may stand before them
        self.tensors: dict[Any, int] = {node: i for i, node in enumerate(tensors)}
        self.dtypes = dtypes
        self.lines: list[str] = []
        self.names: dict[Any, str] = {node: f"x{i}" for node, i in self.tensors.items()}
        self.read: set[int] = set()
        self.returned: list[Any] = []

    def write(self) -> None:
        """Write what all nodes do.

        Raises:
            Unsuitable: if no line of Triton is known for one.
        """
        for node in self.nodes:
            if node.op == "output":
                self.returned = list(node.args[0])
            elif node.op == "call_function" and not self._is_number(node):
                self.take(node)

    def take(self, node: Any) -> None:
        """Write what a node does."""
        self._add(node, self._expression(node))

    def _is_number(self, node: Any) -> bool:
        """Whether a node takes a number out of their vector."""
        if node.target is aten.unbind.int and node.args[0] is self.vector:
            return True
        unbound = node.target is operator.getitem and node.args[0].target is aten.unbind.int
        if unbound:
            self.names[node] = f"n{node.args[1]}"
        return unbound

    def _expression(self, node: Any) -> str:
        target, out = node.target, dtype_of(node)
        if target in SAME:
            self._note(node.args[0])
            return self.names[node.args[0]]
        if target is prims.convert_element_type.default:
            self._note(node.args[0])
            return self._cast(node.args[0], out)
        if target is aten.view.dtype:
            self._note(node.args[0])
            return f"{self.names[node.args[0]]}.to({_type(out)}, bitcast=True)"
        if target in (aten.scalar_tensor.default, aten.full.default, aten.full_like.default):
            return _constant(node.args[-1] if len(node.args) > 1 else node.args[0], out)
        compute = self._computed_in(node, out)
        operands = [self._operand(x, compute) for x in node.args]
        if target in CHOICES:  # whose first operand says which
            operands[0] = self.names[node.args[0]]
        alpha = node.kwargs.get("alpha", 1)
        if alpha != 1:
            operands[1] = f"({operands[1]} * {_constant(alpha, compute)})"
        text = written(target, operands, compute)
        return f"({text}).to({_type(out)})" if out in NARROW else text

    def _computed_in(self, node: Any, out: torch.dtype) -> torch.dtype:
        """The dtype in which an operation is done."""
        if node.target in COMPARISONS or node.target in CHOICES:
            kinds = [dtype_of(x) for x in node.args[-2:] if isinstance(x, torch.fx.Node)]
            return opmath(max(kinds, key=_rank))
        return opmath(out)

    def _operand(self, x: Any, dtype: torch.dtype) -> str:
        if not isinstance(x, torch.fx.Node):
            return _constant(x, dtype)
        self._note(x)
        return self._cast(x, dtype)

    def _cast(self, node: Any, dtype: torch.dtype) -> str:
        name = self.names[node]
        return name if dtype_of(node) is dtype else f"{name}.to({_type(dtype)})"

    def _note(self, node: Any) -> None:
        """Note what a line reads."""
        if node not in self.names:
            raise Unsuitable(f"a rule that reads {node}")
        if node in self.tensors and self.names[node].startswith("x"):
            self.read.add(self.tensors[node])

    def _add(self, node: Any, text: str) -> None:
        self.names[node] = self._name()
        self.lines.append(f"{self.names[node]} = {text}")

    def _name(self) -> str:
        return f"t{len(self.lines)}"


def dtype_of(node: Any) -> torch.dtype:
    return node.meta["val"].dtype


def opmath(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch computes."""
    return torch.float32 if dtype in NARROW else dtype


def _type(dtype: torch.dtype) -> str:
    if dtype not in TYPES:
        raise Unsuitable(f"a rule with {dtype}")
    return TYPES[dtype]


def _rank(dtype: torch.dtype) -> tuple[bool, int]:
    return dtype.is_floating_point, dtype.itemsize


def _constant(x: Any, dtype: torch.dtype) -> str:
    if not isinstance(x, (bool, int, float)):
        raise Unsuitable(f"a rule that reads {x!r}")
    if not dtype.is_floating_point:
        return f"tl.full((), {int(x)}, {_type(dtype)})"
    number = f"float({str(float(x))!r})" if x != x or abs(x) == float("inf") else repr(float(x))
    return f"tl.full((), {number}, {_type(dtype)})"
