"""A graph as C++: loops over the elements of many tensors, with no header of torch.

A library has one function. It takes an array of integers, most of them addresses (see `launches`),
and steps all tensors in one call. Sums are taken in float64 and rounded once; those of the chunks
of a tensor are added in the order of the chunks, so they do not depend on the number of threads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from functional_optim.kernels import ops
from functional_optim.kernels.cpp import (
    BLOCKS,
    HALF,
    HEAD,
    MATH,
    PHASES,
    STORED,
    VALUE,
    Cpp,
    load,
    stored,
)
from functional_optim.kernels.cuts import Nest, Plan
from functional_optim.kernels.graph import Graph, Node, Unsuitable

SYMBOL = "SYMBOL"
"""Stands for the name of a library's function, which has the digest of the text in it."""

BLOCK = 1 << 12
"""Elements of a chunk of a tensor that is seen as 1-D."""

WHOLE, PARTS, LOCAL = range(3)
"""Scratch memory for a value, for what each chunk leaves of it, and for what a row leaves of it."""

PIECE = 1 << 16
"""The most elements of a row's values that lie on the stack."""


class Kept:
    """A value in memory.

    kind: its C++ type. how: by what it is reduced, if it is. place, parts: in the table of places;
    None for one on the stack. local: whether it belongs to a row.
    """

    def __init__(self, node: Node, how: str, *, local: bool) -> None:
        self.node = node
        self.how = how
        self.kind = _accumulator(node, how)
        self.local = local
        self.axes = node.axes[1:] if local else node.axes
        self.place: int | None = None
        self.parts: int | None = None


class Source:
    """The text of a library, and how it is to be called.

    blocks: whether a call goes over blocks of tensors that are seen as 1-D, else over tensors.
    sizes: how many sizes a tensor has. layout: for each value in scratch memory the bytes of an
    element, the axes as bits, and whether it is `WHOLE`, `PARTS` or `LOCAL`. outputs: how many sums
    a call returns.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
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
        self.functions: list[str] = []
        self.counter = iter(range(1 << 30))
        self.blocks = self.axes == 1 and self._is_plain()
        for node in self.plan.kept:
            if node not in self.plan.mirrors:
                self._place(node)
        steps = self._steps()
        functions = "\n".join(self.functions)
        math_used = MATH if "_of(" in functions else ""
        self.text = HEAD + math_used + functions + self._driver(steps)

    def _is_plain(self) -> bool:
        """Whether all chunks are computed by themselves, but for sums that are results."""
        reduced = set(filter(self.plan.reduces, self.plan.kept))
        sums = all(ops.REDUCE[x.op] == "sum" for x in reduced)
        both = reduced and self.graph.stores
        return sums and reduced == {*self.graph.results} == {*self.plan.kept} and not both

    def _place(self, node: Node) -> None:
        how = ops.REDUCE[node.op] if self.plan.reduces(node) else ""
        kept = self.kept[node] = Kept(node, how, local=node in self.plan.local)
        size = {"double": 8, "int64_t": 8, "float": 4, "int32_t": 4, "int16_t": 2}.get(kept.kind, 1)
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
        lines: list[str] = []
        for k in range(self.plan.phases):
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
                for node in [x for nest in rows for x in nest.reduced]:
                    if self.plan.ends(node):
                        lines.append(self._combination(node))
        if self.outputs and not self.blocks:
            function = Function(self, chunked=False)
            for i, node in enumerate(self.graph.results):
                function.lines.append(f"found[{i}] = (double){function.scalar(node)};")
            self.functions.append(function.text("results", "const Tensor& t, double* found"))
            lines.append("results(t, found);")
        return "\n        ".join(lines)

    def _combination(self, node: Node) -> str:
        kept = self.kept[node]
        how = {"max": "Max", "any": "Max", "min": "Min", "all": "Min"}.get(kept.how, "Sum")
        total = f"({kept.kind}*)(t.scratch + t.at[{kept.place}])"
        parts = f"(const {kept.kind}*)(t.scratch + t.at[{kept.parts}])"
        length = " * ".join(["(int64_t)1", *[f"t.size[{i}]" for i in node.axes]])
        return f"combine<{how}>({total}, {parts}, t.size[{self.sizes} + 1], {length});"

    def _function(self, name: str, nests: Sequence[Nest], *, chunked: bool) -> None:
        function = Function(self, chunked=chunked)
        function.write(nests)
        arguments = "const Tensor& t"
        if chunked:
            last = "double* __restrict__ found" if self.blocks else "const int64_t k, char* local"
            arguments += f", const int64_t start, const int64_t length, {last}"
        self.functions.append(function.text(name, arguments))

    def _driver(self, steps: str) -> str:
        width = len(self.graph.inputs) - 1 + len(self.graph.places)
        if self.blocks:
            return BLOCKS.format(symbol=SYMBOL, width=width, outputs=self.outputs)
        return PHASES.format(
            symbol=SYMBOL,
            sizes=self.sizes,
            places=self.sizes + 2,
            columns=self.sizes + 2 + len(self.layout),
            width=width,
            outputs=self.outputs,
            steps=steps,
        )


@functools.lru_cache(maxsize=1024)
def source_of(graph: Graph) -> Source:
    """The library of a graph.

    Raises:
        Unsuitable: for a dtype that C++ has not.
    """
    return Source(graph)


def _accumulator(node: Node, how: str) -> str:
    """The C++ type in which a value is kept."""
    if how in ("sum", "mean"):
        return "double" if node.dtype.is_floating_point else "int64_t"
    if how in ("any", "all"):
        return "int32_t"
    kind = VALUE[node.dtype]
    if not how:
        return "uint8_t" if kind == "bool" else kind
    small = ("bool", "int16_t", "int8_t", "uint8_t")
    return "int32_t" if kind in small else kind


def _mask(axes: Sequence[int]) -> int:
    return sum(1 << axis for axis in axes)


class Loops:
    """The lines of a nest: `first` before all loops, `before` and `behind` the innermost one, and
    those inside of each loop, by its axis; under -1 what no loop repeats."""

    def __init__(self, nest: Nest, axes: Sequence[int]) -> None:
        self.nest = nest
        self.axes = axes
        self.first: list[str] = []
        self.before: list[str] = []
        self.behind: list[str] = []
        self.clauses: list[str] = []
        self.inside: dict[int, list[str]] = {-1: [], **{axis: [] for axis in nest.axes}}
        self.names: dict[Node, str] = {}


class Function:
    """The lines of a prelude, or of a pass over some rows.

    scalars: what is the same for all elements. row: what is done for each row before its loops, and
    after them. lines: the loops.
    """

    def __init__(self, source: Source, *, chunked: bool) -> None:
        self.source = source
        self.graph = source.graph
        self.plan = source.plan
        self.chunked = chunked
        self.by_rows = chunked and source.axes > 1
        self.scalars: list[str] = []
        self.before: list[str] = []
        self.row: tuple[list[str], list[str]] = ([], [])
        self.lines: list[str] = []
        self.names: dict[Node, str] = {}
        self.pointers: dict[str, str] = {}

    def text(self, name: str, arguments: str) -> str:
        """The function."""
        sizes = []
        for i, size in enumerate(self.graph.sizes if not self.source.blocks else ()):
            own = (
                f"enum {{ n{i} = {-size} }};" if size < 0 else f"const int64_t n{i} = t.size[{i}];"
            )
            sizes.append(own)
        lines = [*sizes, *self.pointers.values(), *self.scalars, *self.before, *self.lines]
        body = "\n    ".join(lines)
        return f"static __attribute__((noinline)) void {name}({arguments})\n{{\n    {body}\n}}\n"

    def write(self, nests: Sequence[Nest]) -> None:
        """Loops, one after the other; row by row in a pass over several axes."""
        for node in [x for nest in nests for x in nest.reduced]:
            if self.plan.ends(node) and not self.source.blocks:
                self._begun(node)
        lines: list[str] = []
        for nest in nests:
            lines += self._loops(nest)
        if not self.by_rows:
            self.lines += lines
            return
        body = [*self.row[0], *lines, *self.row[1]]
        self.lines += ["for (int64_t i0 = start; i0 < start + length; ++i0) {", *_deeper(body), "}"]

    def _begun(self, node: Node) -> None:
        """The part of a reduction that a chunk adds to, and its first value."""
        kept = self.source.kept[node]
        length = " * ".join(["(int64_t)1", *[f"n{i}" for i in node.axes]])
        name = self._memory(f"a{node.index}", kept.kind, f"t.scratch + t.at[{kept.parts}]")
        self.before.append(
            f"{kept.kind}* __restrict__ const b{node.index} = {name} + k * ({length});"
        )
        self.before.append(
            f"for (int64_t j = 0; j < {length}; ++j) b{node.index}[j] = {_identity(kept)};"
        )

    def scalar(self, node: Node) -> str:
        """The name of a value without axes."""
        if node not in self.names:
            lines: list[str] = []
            text = self._value(node, lines, self.scalar)
            self.scalars += lines
            self.scalars.append(f"const {VALUE[node.dtype]} v{node.index} = {text};")
            self.names[node] = f"v{node.index}"
        return self.names[node]

    def _value(self, node: Node, lines: list[str], name: Any) -> str:
        """The text of a value where its loops are. name: of its operands."""
        if node.op == "input":
            return load(self._element(node), node.dtype)
        if node.op == "number":
            return f"t.numbers[{node.args[0]}]"
        if node.op == "row":
            return f"as<double>(t.row[{len(self.graph.inputs) - 1 + node.args[0]}])"
        if node.op == "iota":
            return self._place_in_tensor(node)
        if node.op == "inside":
            return f"({self._index(node.axes[1:])} < rest)"
        if node in self.plan.kept and node not in self.computed:
            mirror = self.plan.mirrors.get(node)
            if mirror is not None:
                return load(self._element(self.graph.inputs[mirror]), node.dtype)
            return self._kept(node)
        for x in node.operands():
            name(x)
        return ops.expression(Cpp(lines, self.source.counter), node, name)

    computed: frozenset[Node] = frozenset()
    """The kept values that the loops at hand compute themselves."""

    def _place_in_tensor(self, node: Node) -> str:
        kind = VALUE[node.dtype]
        if not self.graph.block or 0 not in node.axes:
            return f"({kind}){self._index(node.axes)}"
        self._row(f"const {kind} at = ({kind})(i0 * {self.graph.block});")
        return f"(at + ({kind}){self._index(node.axes[1:])})"

    def _kept(self, node: Node) -> str:
        """A value that was kept."""
        kept = self.source.kept[node]
        text = self._home(node)
        if kept.how == "mean":
            gone = [i for i in next(node.operands()).axes if i not in node.axes]
            count = " * ".join([f"(int64_t)n{i}" for i in gone])
            if self.graph.block and 0 in gone:
                count = f"t.size[{self.source.sizes - 1}]"
            text = f"({text} / (double)({count}))"
        if node.dtype in HALF:
            return f"to_{HALF[node.dtype]}((float){text})"
        if node.dtype is torch.bool:
            return f"({text} != 0)"
        return f"({VALUE[node.dtype]}){text}"

    def _home(self, node: Node) -> str:
        """Where a value is kept, of the element at hand."""
        kept = self.source.kept[node]
        name = f"k{node.index}"
        if not kept.local:
            self._memory(name, kept.kind, f"t.scratch + t.at[{kept.place}]")
            return f"{name}[{self._index(kept.axes)}]"
        if not kept.axes:
            self._row(f"{kept.kind} {name};")
            return name
        count = self.source.fixed(kept.axes)
        if count:
            line = f"alignas(64) {kept.kind} {name}[{count}];"
            self.before += [] if line in self.before else [line]
        else:
            self._memory(name, kept.kind, f"local + t.at[{kept.place}]")
        return f"{name}[{self._index(kept.axes)}]"

    def _memory(self, name: str, kind: str, address: str) -> str:
        self.pointers[name] = f"{kind}* __restrict__ const {name} = ({kind}*)({address});"
        return name

    def _row(self, line: str) -> None:
        if line not in self.row[0]:
            self.row[0].append(line)

    def _element(self, node: Node) -> str:
        """An element of a tensor, in memory."""
        i = node.args[0]
        kind = STORED[node.dtype]
        const = "" if i in self.source.written else "const "
        at = "t.grad" if i == 0 else f"t.row[{i - 1}]"
        self.pointers[f"p{i}"] = f"{const}{kind}* __restrict__ const p{i} = ({kind}*){at};"
        flat = len(node.dims) == 1 and node.axes == self.plan.every  # else it has whole blocks
        if not (self.graph.block and self.by_rows and flat):
            return f"p{i}[{self._index(node.axes)}]"
        self._block(i, kind)
        return f"q{i}[{self._index(node.axes[1:])}]"

    def _block(self, i: int, kind: str) -> None:
        """A pointer to a block of a tensor; the last one is copied where it may be a whole one."""
        block, own = self.graph.block, f"p{i} + i0 * {self.graph.block}"
        at = f"t.size[{self.source.sizes - 1}] - i0 * {block}"
        self._row(f"const int64_t rest = {at} < {block} ? {at} : {block};")
        spare = f"alignas(64) {kind} spare{i}[{block}];"
        if spare in self.before:
            return
        self.before.append(spare)
        self._row(f"{kind}* __restrict__ q{i} = ({kind}*)({own});")
        fill = (
            f"memset(spare{i}, 0, sizeof(spare{i})); memcpy(spare{i}, q{i}, rest * sizeof({kind}));"
        )
        self._row(f"if (rest < {block}) {{ {fill} q{i} = spare{i}; }}")
        if i in self.source.written:
            back = f"if (rest < {block}) memcpy({own}, spare{i}, rest * sizeof({kind}));"
            self.row[1].append(back)

    def _loops(self, nest: Nest) -> list[str]:
        """The lines of one nest."""
        axes = nest.axes[1:] if self.by_rows else nest.axes
        loops = Loops(nest, axes)
        self.computed = frozenset(nest.kept)

        def name(node: Node) -> str:
            if node not in loops.names:
                if not node.axes:
                    loops.names[node] = self.scalar(node)
                    return loops.names[node]
                level = loops.inside[max(node.axes)]
                own: list[str] = []
                text = self._value(node, own, name)
                level += own
                level.append(f"const {VALUE[node.dtype]} v{node.index} = {text};")
                loops.names[node] = f"v{node.index}"
            return loops.names[node]

        for node in nest.goals():
            name(node)
        for node in nest.reduced:
            self._reduce(node, loops)
        for node in [x for x in nest.kept if x not in self.plan.mirrors]:
            line = f"{self._home(node)} = ({self.source.kept[node].kind}){loops.names[node]};"
            loops.inside[max(node.axes)].append(line)
        for i, value in nest.stores:
            target = self.graph.inputs[i]
            text = Cpp.cast(loops.names[value], value.dtype, target.dtype)
            line = f"{self._element(target)} = {stored(text, target.dtype)};"
            loops.inside[max(target.axes, default=-1)].append(line)
        self.computed = frozenset()
        lines: list[str] = []
        for depth in reversed(axes):
            own = [*loops.inside[depth], *lines]
            first, count = "0", f"n{depth}"
            if depth == 0 and self.chunked:
                first, count = "start", "start + length"
            kind = "int" if self.graph.sizes[depth] < 0 else "int64_t"
            head = f"for ({kind} i{depth} = {first}; i{depth} < {count}; ++i{depth}) {{"
            body = [head, *_deeper(own), "}"]
            if depth == axes[-1]:
                pragma = f"#pragma omp simd{''.join(loops.clauses)}"
                body = [*loops.before, pragma, *body, *loops.behind]
            lines = body
        outer = [x for depth in (-1, *nest.axes) if depth not in axes for x in loops.inside[depth]]
        return ["{", *_deeper([*loops.first, *outer, *lines]), "}"]

    def _index(self, axes: Sequence[int]) -> str:
        text = "0"
        for k, axis in enumerate(axes):
            text = f"i{axis}" if k == 0 else f"({text}) * n{axis} + i{axis}"
        return f"({text})" if len(axes) > 1 else text

    def _reduce(self, node: Node, loops: Loops) -> None:
        """Lines that add a value to a reduction."""
        kept, axes = self.source.kept[node], loops.axes
        x = next(node.operands())
        value = f"({kept.kind}){loops.names[x]}"
        if kept.how in ("any", "all"):
            value = f"({kept.kind})({loops.names[x]} != 0)"
        ends = self.plan.ends(node)
        if ends and self.graph.block:  # of the last block what there is
            self._block(1, STORED[self.graph.inputs[1].dtype])
            value = f"({self._index(x.axes[1:])} < rest ? {value} : {_identity(kept)})"
        if self.source.blocks:
            target = f"found[{self.graph.results.index(node)}]"
        elif ends:
            target = f"b{node.index}[{self._index(node.axes)}]"
        else:
            target = self._home(node)
        gone = [i for i in x.axes if i not in node.axes]
        if not axes:
            loops.inside[0].append(f"{target} = {_put(kept, target, value)};")
            return
        inner = axes[-1]
        alone = [i for i in axes if i in gone] == [inner] and not ends
        if not ends and not alone:
            line = f"{target} = {_identity(kept)};"
            for i in reversed([i for i in node.axes if i in axes]):
                line = f"for (int64_t i{i} = 0; i{i} < n{i}; ++i{i}) {line}"
            loops.first.append(line)
        if inner not in gone:
            loops.inside[inner].append(f"{target} = {_put(kept, target, value)};")
            return
        local = f"r{node.index}"
        floating = kept.kind in ("float", "double")
        nan = kept.how in ("max", "min") and floating
        loops.inside[inner].append(f"{local} = {_put(kept, local, value, nan=nan)};")
        sign = {"max": "max", "min": "min", "any": "max", "all": "min"}.get(kept.how, "+")
        loops.clauses.append(f" reduction({sign}:{local})")
        loops.before.append(f"{kept.kind} {local} = {_identity(kept)};")
        end = local
        if nan:
            loops.inside[inner].append(f"{local}n |= ({loops.names[x]} != {loops.names[x]});")
            loops.clauses.append(f" reduction(|:{local}n)")
            loops.before.append(f"int32_t {local}n = 0;")
            end = f'({local}n ? ({kept.kind})__builtin_nan("") : {local})'
        loops.behind.append(f"{target} = {end if alone else _put(kept, target, end)};")


def _identity(kept: Kept) -> str:
    if kept.how in ("sum", "mean", "any"):
        return "0"
    if kept.how == "all":
        return "1"
    if kept.kind in ("float", "double"):
        return f"{'-' if kept.how == 'max' else ''}__builtin_inf()"
    bits = 63 if kept.kind == "int64_t" else 31
    low = f"(-(({kept.kind})1 << {bits - 1}) * 2)"
    return low if kept.how == "max" else f"(-({low} + 1))"


def _put(kept: Kept, a: str, b: str, *, nan: bool = False) -> str:
    """Two parts of a reduction together. nan: those are counted apart."""
    if kept.how in ("sum", "mean"):
        return f"{a} + {b}"
    sign = ">" if kept.how in ("max", "any") else "<"
    floating = kept.kind in ("float", "double") and not nan
    return (
        f"({a} {sign} {b} || {a} != {a} ? {a} : {b})"
        if floating
        else f"({a} {sign} {b} ? {a} : {b})"
    )


def _deeper(lines: Sequence[str]) -> list[str]:
    return [line if line.startswith("#") else f"    {line}" for line in lines]
