"""A graph as C++: loops over the elements of many tensors, with no header of torch.

A library has one function. It takes an array of integers, most of them addresses (see `launches`),
and steps all tensors in one call. Sums are taken in float64 and rounded once; those of the chunks
of a tensor are added in the order of the chunks, so they do not depend on the number of threads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from functional_optim.kernels import ops
from functional_optim.kernels.counters import NOISE
from functional_optim.kernels.cpp import DRIVER, HEAD, MATH, STORED, VALUE
from functional_optim.kernels.cpp_loops import Function, Kept, identity
from functional_optim.kernels.cuts import Nest, Plan
from functional_optim.kernels.graph import Graph
from functional_optim.kernels.node import Node, Unsuitable
from functional_optim.kernels.tidied import tidied

SYMBOL = "SYMBOL"
"""The name of a library's function."""

BLOCK = 1 << 12
"""Elements of a chunk of a tensor that is seen as 1-D."""

WHOLE, PARTS, LOCAL = range(3)
"""Scratch memory for a value, for what each chunk leaves of it, and for what a row leaves of it."""

PIECE = 1 << 16
"""The most elements of a row's values that lie on the stack."""


class Source:
    """The text of a library, and how it is to be called.

    blocks: whether a call goes over blocks of tensors that are seen as 1-D, else over tensors.
    sizes: how many sizes a tensor has. layout: for each value in scratch memory the bytes of an
    element, the axes as bits, and whether it is `WHOLE`, `PARTS` or `LOCAL`. outputs: how many sums
    a call returns.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph = tidied(graph) if graph.block else graph
        for node in graph.nodes:
            if (node.op == "input" and node.dtype not in STORED) or node.dtype not in VALUE:
                raise Unsuitable(f"a value in {node.dtype}", node.rule)
        self.plan = Plan(graph)
        self.axes = len(graph.sizes)
        self.sizes = self.axes + (graph.block > 0)
        self.outputs = len(graph.results)
        self.written = {i for i, _ in graph.stores}
        self.layout: list[tuple[int, int, int]] = []
        self.kept: dict[Node, Kept] = {}
        self.totals: list[list[Kept]] = []
        """For each phase, the values that are complete after it and read in a later phase."""
        self.functions: list[str] = []
        self.counter = iter(range(1 << 30))
        self.blocks = self.axes == 1 and self._is_plain()
        for node in self.plan.kept:
            if node not in self.plan.mirrors:
                self._place(node)
        try:
            steps = self._steps()
        except RecursionError as error:
            raise Unsuitable("more operations than fit a kernel") from error
        functions = "\n".join(self.functions)
        math_used = MATH if "_of(" in functions else ""
        noise_used = NOISE if "noise" in functions else ""
        self.text = HEAD + math_used + noise_used + functions + self._driver(steps)

    def _is_plain(self) -> bool:
        """Whether all chunks are independent, except for sums that are results."""
        reduced = set(filter(self.plan.reduces, self.plan.kept))
        sums = all(ops.REDUCE[x.op] == "sum" for x in reduced)
        stores = [self.graph.inputs[i] for i, _ in self.graph.stores]
        both = reduced and stores
        if not all(x.axes for x in stores):  # one number is written once, when all have read it
            return False
        return sums and reduced == {*self.graph.results} == {*self.plan.kept} and not both

    def _place(self, node: Node) -> None:
        how = ops.REDUCE[node.op] if self.plan.reduces(node) else ""
        kept = self.kept[node] = Kept(node, how, local=node in self.plan.local)
        size = kept.dtype.itemsize
        if not (kept.local and self.fixed(kept.axes)):
            kept.place = len(self.layout)
            self.layout.append((size, _mask(kept.axes), LOCAL if kept.local else WHOLE))
        if how and self.plan.ends(node):
            kept.parts = len(self.layout)
            self.layout.append((size, _mask(node.axes), PARTS))

    def fixed(self, axes: Sequence[int]) -> int:
        """The number of elements on some axes, if that is known and small; else 0."""
        sizes = [-self.graph.sizes[i] for i in axes]
        count = math.prod(sizes)
        return count if all(size > 0 for size in sizes) and count <= PIECE else 0

    def _steps(self) -> str:
        every: list[str] = []
        for k in range(self.plan.phases):
            lines: list[str] = []
            prelude, rows = self.plan.at(k, chunked=False), self.plan.at(k, chunked=True)
            if prelude:
                self._function(f"prelude{k}", prelude, chunked=False)
                lines.append(f"prelude{k}(t);")
            if rows:
                self._function(f"chunk{k}", rows, chunked=True)
                if not self.blocks:
                    size = f"t.size[{self.sizes}]"
                    last = f"(k + 1) * {size} < t.size[0] ? {size} : t.size[0] - k * {size}"
                    call = f"chunk{k}(t, k * {size}, {last}, k, local);"
                    lines.append(f"each([&](int64_t k, char* local) {{ {call} }});")
                ends = [x for nest in rows for x in nest.reduced if self.plan.ends(x)]
                lines += map(self._combination, ends)
                self.totals.append([self.kept[x] for x in ends])
            else:
                self.totals.append([])
            every.append(f"if (phase < 0 || phase == {k}) {{ {' '.join(lines)} }}")
        if self.outputs and not self.blocks:
            function = Function(self, chunked=False)
            for i, node in enumerate(self.graph.results):
                function.lines.append(f"found[{i}] = (double){function.scalar(node)};")
            self.functions.append(function.text("results", "const Tensor& t, double* found"))
            every.append("if (phase < 0) results(t, found);")
        return "\n    ".join(every)

    def _combination(self, node: Node) -> str:
        kept = self.kept[node]
        total = f"({kept.kind}*)(t.scratch + t.at[{kept.place}])"
        parts = f"(const {kept.kind}*)(t.scratch + t.at[{kept.parts}])"
        length = " * ".join(["(int64_t)1", *[f"t.size[{i}]" for i in node.axes]])
        how = kept.combined.title()
        none = f"({kept.kind}){identity(kept)}"
        return f"combine<{how}>({total}, {parts}, t.size[{self.sizes} + 1], {length}, {none});"

    def _function(self, name: str, nests: Sequence[Nest], *, chunked: bool) -> None:
        function = Function(self, chunked=chunked)
        function.write(nests)
        arguments = "const Tensor& t"
        if chunked:
            last = "double* __restrict__ found" if self.blocks else "const int64_t k, char* local"
            arguments += f", const int64_t start, const int64_t length, {last}"
        self.functions.append(function.text(name, arguments))

    def _driver(self, steps: str) -> str:
        numbers = {
            "SIZES": self.sizes,
            "PLACES": self.sizes + 3,
            "COLUMNS": self.sizes + 3 + len(self.layout),
            "WIDTH": len(self.graph.inputs) - 1 + len(self.graph.places),
            "OUTPUTS": self.outputs,
        }
        named = ", ".join([f"{name} = {number}" for name, number in numbers.items()])
        step = "" if self.blocks else STEP.format(steps=steps)
        return f"#define BLOCKS {self.blocks:d}\nenum {{ {named} }};\n{step}{DRIVER}"


STEP = """template <class Each>
static void step(const Tensor& t, double* found, const int64_t phase, const Each& each)
{{
    {steps}
}}
"""
"""Goes through all phases of a tensor, or one. each: calls a function with each chunk."""

source_of = functools.lru_cache(maxsize=1024)(Source)
"""The library of a graph, which may be Unsuitable: for a dtype that C++ has not."""


def _mask(axes: Sequence[int]) -> int:
    return sum(1 << axis for axis in axes)
