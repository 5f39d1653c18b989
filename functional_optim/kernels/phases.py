"""A rule that sums over rows, columns or whole tensors, cut into kernels that see a few rows each.

A tensor is gone through in chunks: some of the indices of its first dimension that is not of size
1. What an operation reads decides when it can run. A sum along other dimensions is complete in a
chunk. A sum along the first one is complete after all chunks, so a new phase begins there. Each
phase is a prelude, once a tensor, and a pass over the chunks. Tensors of the parameter's shape are
computed again wherever they are read. Smaller ones are kept: sums, and what is broadcast.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.node import map_arg

from functional_optim.kernels.building import CTYPES, Unsuitable
from functional_optim.kernels.tracing import Trace, record

aten = torch.ops.aten

COMBINED = {
    aten.sum.default: "sum",
    aten.sum.dim_IntList: "sum",
    aten.amax.default: "max",
    aten.amin.default: "min",
}
"""Reductions, and how the results of two parts of a tensor are combined."""

RESHAPING = {
    aten.expand.default,
    aten.full.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.view.default,
}
"""Operations whose integers are shapes or dimensions."""

ENTRYWISE = {
    aten._to_copy.default,
    aten.alias.default,
    aten.detach.default,
    aten.full_like.default,
    aten.scalar_tensor.default,
}
"""Operations entry by entry that do not bear torch's tag for them."""

HINTS = (17, 11, 7, 3)
"""Sizes of the dimensions while kernels are traced; all different, and few enough entries in all
for Inductor to sum plainly, as it shall for every size."""

ROWS = 13
"""Rows of a chunk while kernels are traced."""


class When(NamedTuple):
    """When a value is computed: values are ordered by it. chunked: in the pass over the chunks."""

    phase: int
    chunked: bool
    step: int


class Kept(NamedTuple):
    """A value that a kernel leaves to later ones.

    axes: the dimensions that it has, as indices of sizes. combined: how the parts that the chunks
    leave are put together; None where they lie side by side, or there is one.
    """

    axes: tuple[int, ...]
    dtype: torch.dtype
    combined: str | None


class ChunkKernel(NamedTuple):
    """One kernel, as a graph over a chunk.

    reads: what its tensors are: ("given", i) for the gradient, the parameter or a slot, ("kept", i)
    for a value. layouts: their shapes, as indices of the rows of a chunk and the sizes, and dtypes.
    writes: which values its results are.
    """

    when: When
    traced: Trace
    reads: list[tuple[str, int]]
    layouts: list[tuple[tuple[int | None, ...], torch.dtype]]
    writes: list[int]


class Phases(NamedTuple):
    """A rule as kernels.

    results: which values it returns. moves: which given tensors become which values at the end.
    """

    parts: list[ChunkKernel]
    kept: list[Kept]
    results: list[int]
    moves: list[tuple[int, int]]


def empty(shape: Sequence[int | None], sizes: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """A tensor whose shape is given as indices of sizes."""
    return torch.empty([1 if i is None else sizes[i] for i in shape], dtype=dtype)


def mean(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """torch.mean as a sum, which can be put together from parts."""
    dims = range(x.dim()) if dim is None else dim
    total = x.sum(dim, keepdim=keepdim, dtype=dtype)
    return total / math.prod([x.shape[d] for d in dims])


def cut(traced: Trace, sizes: int) -> Phases:
    """The kernels of a graph.

    Args:
        traced: the rule for one tensor; its inputs are the sizes, the tensors and the numbers.
        sizes: how many sizes there are.

    Raises:
        Unsuitable: if it has an operation that cannot be cut, such as a product of matrices.
    """
    plan = _Plan(traced, sizes)
    keys = sorted({*[plan.when[node] for node in plan.kept], *plan.stores})
    return Phases(
        [plan.part(key) for key in keys],
        [plan.described(node) for node in plan.kept],
        [plan.kept.index(node) for node in plan.results],
        [(i, plan.kept.index(node)) for i, node in plan.moves],
    )


class _Plan:
    """When each node of a graph is computed, and which values are kept."""

    def __init__(self, traced: Trace, sizes: int) -> None:
        nodes = list(traced.graph.graph.nodes)
        given = [node for node in nodes if node.op == "placeholder"]
        self.tensors = given[sizes:-1]
        self.numbers = given[-1]
        self.given_dtypes = [x.dtype for x in traced.inputs[sizes:-1]]
        self.vector = (traced.inputs[-1].shape[0], traced.inputs[-1].dtype)
        self.symbols = [x.node.expr for x in traced.inputs[:sizes]]
        (output,) = [node for node in nodes if node.op == "output"]
        self.results = list(output.args[0])
        copies = [node for node in nodes if node.target is aten.copy_.default]
        self.copies = [(self.tensors.index(node.args[0]), node.args[1]) for node in copies]
        self.axes: dict[Any, tuple[int, ...]] = {}
        self.fixed: set[Any] = {self.numbers}
        """Nodes that depend on numbers alone."""
        for node in nodes:
            if node.op in ("placeholder", "call_function") and node not in copies:
                self._look_at(node)
        if any(not isinstance(node, torch.fx.Node) for _, node in self.copies):
            raise Unsuitable("a tensor that becomes a number")
        broadcast = [node for node in nodes if node in self.axes and self._is_broadcast(node)]
        sums = [node for node in nodes if self._reduced(node)]
        self.kept = list(dict.fromkeys([*sums, *broadcast, *self.results]))
        self.when: dict[Any, When] = {}
        self.known: dict[Any, When] = {}
        for node in nodes:
            if node in self.axes:
                self._schedule(node)
        used = self._used()
        self.kept = [node for node in self.kept if node in used]
        self.moves = [(i, node) for i, node in self.copies if self._is_moved(i, node)]
        self.stores = self._placed()

    def _look_at(self, node: Any) -> None:
        """Learn a node's shape, and refuse what cannot be cut.

        Raises:
            Unsuitable: if it is no operation that this file knows.
        """
        value = node.meta.get("val")
        if node is self.numbers or node.target is aten.unbind.int:
            self.fixed.add(node)
            return
        if not isinstance(value, Tensor):
            if not isinstance(value, (int, torch.SymInt)):
                raise Unsuitable(f"the operation {node.target}")
            return
        if node.op == "call_function" and not self._is_known(node):
            raise Unsuitable(f"the operation {node.target}")
        found = []
        for size in value.shape:
            expression = size.node.expr if isinstance(size, torch.SymInt) else size
            if expression in self.symbols:
                found.append(self.symbols.index(expression))
            elif expression != 1:
                raise Unsuitable(f"a tensor of shape {tuple(value.shape)}")
        if sorted(set(found)) != found:
            raise Unsuitable("a tensor whose dimensions are in another order")
        self.axes[node] = tuple(found)
        if node.op != "placeholder" and all(
            x in self.fixed or x not in self.axes for x in node.all_input_nodes
        ):
            self.fixed.add(node)

    def _is_known(self, node: Any) -> bool:
        if node.target is operator.getitem:
            return node.args[0] in self.fixed
        tags = getattr(node.target, "tags", ())
        known = node.target in COMBINED or node.target in RESHAPING or node.target in ENTRYWISE
        return known or torch.Tag.pointwise in tags

    def _reduced(self, node: Any) -> bool:
        """Whether a node is a sum over dimensions that are not of size 1."""
        return (
            node.target in COMBINED
            and node in self.axes
            and self.axes[node.args[0]] != self.axes[node]
        )

    def _is_broadcast(self, node: Any) -> bool:
        """Whether a node is worth keeping: computed once, and read by an operation on more."""
        if node.op == "placeholder" or node in self.fixed or self._reduced(node):
            return False
        if node.meta["val"].dtype not in CTYPES:
            return False
        mine = self.axes[node]
        return any(len(self.axes[user]) > len(mine) for user in node.users if user in self.axes)

    def _schedule(self, node: Any) -> None:
        """Say when a node is computed, and when it is known to those that read it."""
        chunked = 0 in self.axes[node]
        given = [x for x in node.all_input_nodes if x in self.axes and x not in self.fixed]
        if self._reduced(node):
            chunked = 0 in self.axes[node.args[0]]
        phase = max([self.known[x].phase for x in given], default=0)
        step = 0
        for x in given:
            if self.known[x][:2] == (phase, chunked):
                apart = x in self.kept and not self._reduced(x)
                apart = apart and self.axes[x] != (
                    self.axes[node.args[0]] if self._reduced(node) else self.axes[node]
                )
                step = max(step, self.known[x].step + apart)
        self.when[node] = self.known[node] = When(phase, chunked, step)
        if self._reduced(node):
            ends = chunked and 0 not in self.axes[node]
            self.known[node] = When(phase + 1, False, 0) if ends else When(phase, chunked, step + 1)

    def _used(self) -> set[Any]:
        """Nodes that the results depend on."""
        used: set[Any] = set()
        waiting = [*self.results, *[node for _, node in self.copies]]
        while waiting:
            node = waiting.pop()
            if node not in used:
                used.add(node)
                waiting += node.all_input_nodes
        return used

    def _is_moved(self, i: int, node: Any) -> bool:
        """Whether a tensor becomes a value that is kept anyway."""
        same = node in self.kept and node.meta["val"].dtype is self.given_dtypes[i]
        return same and self.axes[node] == self.axes[self.tensors[i]]

    def _placed(self) -> dict[When, list[tuple[int, Any]]]:
        """When each given tensor is overwritten: after all that reads it."""
        copies = [copy for copy in self.copies if copy not in self.moves]
        times = [self.when[node] for node in self.kept]
        times += [self.known[node] for _, node in copies]
        last = max([x.phase for x in times], default=0)
        inside = {i for i, _ in copies if 0 in self.axes[self.tensors[i]]}
        chunked = [x for x in times if x.chunked]
        phases = [x.phase for x in chunked]
        phases += [self.known[node].phase for i, node in copies if i in inside]
        most = max(phases, default=0)
        step = max([x.step for x in chunked if x.phase == most], default=0)
        found: dict[When, list[tuple[int, Any]]] = {}
        for i, node in copies:
            when = When(most, True, step) if i in inside else When(last + 1, False, 0)
            found.setdefault(when, []).append((i, node))
        return found

    def described(self, node: Any) -> Kept:
        """What is kept of a node."""
        dtype = node.meta["val"].dtype
        if dtype not in CTYPES:
            raise Unsuitable(f"a sum in {dtype}")
        ends = self._reduced(node) and self.when[node].chunked and 0 not in self.axes[node]
        return Kept(self.axes[node], dtype, COMBINED[node.target] if ends else None)

    def part(self, when: When) -> ChunkKernel:
        """The kernel of one time."""
        results = [node for node in self.kept if self.when[node] == when]
        stores = self.stores.get(when, [])
        reads: list[Any] = []
        seen: set[Any] = set()

        def look(node: Any) -> None:
            if node in seen or (node not in self.axes and node not in self.fixed):
                return
            seen.add(node)
            if node in self.tensors or (node in self.kept and self.when[node] < when):
                reads.append(node)
            else:
                for x in node.all_input_nodes:
                    look(x)

        for node in [*results, *[node for _, node in stores]]:
            look(node)
        for i, _ in stores:
            if self.tensors[i] not in reads:
                reads.append(self.tensors[i])
        body = self._body(reads, results, stores)
        layouts = [self._layout(node) for node in reads]

        def made(sizes: list[Any]) -> list[Tensor]:
            return [empty(shape, sizes, dtype) for shape, dtype in layouts]

        hints = (ROWS, *HINTS[: len(self.symbols)])
        traced = record(body, hints, made, self.vector, torch.device("cpu"))
        writes = [self.kept.index(node) for node in results]
        return ChunkKernel(when, traced, [self._named(x) for x in reads], layouts, writes)

    def _named(self, node: Any) -> tuple[str, int]:
        if node in self.tensors:
            return "given", self.tensors.index(node)
        return "kept", self.kept.index(node)

    def _layout(self, node: Any) -> tuple[tuple[int | None, ...], torch.dtype]:
        """The shape of a node's chunk, as indices of the sizes (rows, sizes ...), and its dtype."""
        value = node.meta["val"]
        shape: list[int | None] = []
        axes = iter(self.axes[node])
        for size in value.shape:
            if isinstance(size, torch.SymInt):
                axis = next(axes)
                shape.append(0 if axis == 0 else axis + 1)
            else:
                shape.append(None)
        return tuple(shape), value.dtype

    def _body(
        self, reads: list[Any], results: list[Any], stores: list[tuple[int, Any]]
    ) -> Callable[..., Any]:
        """What a kernel does: run the nodes behind its results on a chunk."""

        def body(sizes: list[Any], tensors: list[Tensor], numbers: Tensor) -> tuple[Tensor, ...]:
            rows, *whole = sizes
            values: dict[Any, Any] = dict(zip(reads, tensors, strict=True))
            values[self.numbers] = numbers

            def integer(value: Any, reshaping: bool) -> Any:
                if not isinstance(value, torch.SymInt):
                    return value
                known = dict(zip(self.symbols, whole, strict=True))
                if reshaping and self.symbols:
                    known[self.symbols[0]] = rows
                return _evaluated(value.node.expr, known)

            def value_of(node: Any) -> Any:
                if node not in values:
                    reshaping = node.target in RESHAPING

                    def given(x: Any) -> Any:
                        found = x.meta.get("val")
                        if isinstance(found, (int, torch.SymInt)):
                            return integer(found, reshaping)
                        return value_of(x)

                    args = map_arg(node.args, given)
                    kwargs = map_arg(node.kwargs, given)
                    values[node] = node.target(*args, **kwargs)
                return values[node]

            found = []
            for node in results:
                own = value_of(node)
                found.append(own if self._reduced(node) else own.clone())
            new = [(values[self.tensors[i]], value_of(node)) for i, node in stores]
            for tensor, value in new:
                tensor.copy_(value)
            return tuple(found)

        return body


def _evaluated(expression: Any, known: dict[Any, Any]) -> Any:
    """A product or sum of sizes, of other sizes.

    Raises:
        Unsuitable: if it is another function of them.
    """
    if expression in known:
        return known[expression]
    if expression.is_Integer:
        return int(expression)
    inner = [_evaluated(x, known) for x in expression.args]
    if expression.is_Mul:
        return math.prod(inner)
    if expression.is_Add:
        return sum(inner)
    if expression.is_Pow and isinstance(inner[1], int) and inner[1] > 0:
        return math.prod([inner[0]] * inner[1])
    raise Unsuitable(f"a size of {expression}")
