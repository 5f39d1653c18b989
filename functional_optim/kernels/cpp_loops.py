"""The functions of a library in C++: the loops of a prelude, or of a pass over some rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from functional_optim.kernels import ops
from functional_optim.kernels.cpp import HALF, SHORT, STORED, VALUE, Cpp, load, stored
from functional_optim.kernels.cuts import Nest
from functional_optim.kernels.node import Node

if TYPE_CHECKING:
    from functional_optim.kernels.print_cpp import Source

NOISE_PIECE = 512
"""Elements whose noise is made at once: few, so that the memory of the loops is fetched
meanwhile."""


class Kept:
    """A value in memory.

    dtype, kind: in which it is kept, and its C++ type. how: by what it is reduced, if it is.
    combined: how parts of that become one: sum, max or min. place, parts: in the table of places;
    None for one on the stack. local: whether it belongs to a row.
    """

    def __init__(self, node: Node, how: str, *, local: bool) -> None:
        self.node = node
        self.how = how
        self.combined = ops.COMBINED.get(how, how)
        self.dtype = _accumulator(ops.opmath(node.dtype), how)
        self.kind = STORED[self.dtype]
        self.local = local
        self.axes = node.axes[1:] if local else node.axes
        self.place: int | None = None
        self.parts: int | None = None


def _accumulator(dtype: torch.dtype, how: str) -> torch.dtype:
    """The dtype in which a value is kept."""
    if how in ("sum", "mean") and dtype.is_floating_point:
        return torch.float64
    if how in ("sum", "mean"):  # sums of int32 run over as ATen's
        return torch.int32 if dtype is torch.int32 else torch.int64
    if how in ("any", "all") or (how and dtype in (torch.bool, *SHORT)):
        return torch.int32
    return torch.uint8 if dtype is torch.bool else dtype


class Loops:
    """The lines of a nest: `first` before all loops, `before` and `after` the innermost one, and
    those inside of each loop, by its axis; under -1 what no loop repeats."""

    def __init__(self, nest: Nest, axes: Sequence[int]) -> None:
        self.nest = nest
        self.axes = axes
        self.first: list[str] = []
        self.before: list[str] = []
        self.after: list[str] = []
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
        self.by_rows = False
        self.scalars: list[str] = []
        self.before: list[str] = []
        self.row: tuple[list[str], list[str]] = ([], [])
        self.lines: list[str] = []
        self.names: dict[Node, str] = {}
        self.pointers: dict[str, str] = {}
        self.noise: list[str] = []

    def text(self, name: str, arguments: str) -> str:
        """The function."""
        sizes = []
        for i, size in enumerate(self.graph.sizes if not self.source.blocks else ()):
            own = (
                f"enum {{ n{i} = {-size} }};" if size < 0 else f"const int64_t n{i} = t.size[{i}];"
            )
            sizes.append(own)
        lines = [*sizes, *self.pointers.values(), *self.scalars, *self.before, *self.lines]
        if self.noise:
            lines = [*lines[: -len(self.lines)], *self._in_pieces()]
        body = "\n    ".join(lines)
        return f"static APART void {name}({arguments})\n{{\n    {body}\n}}\n"

    def write(self, nests: Sequence[Nest]) -> None:
        """Loops, one after the other; row by row in a pass over several axes.

        Those over one number of each row, at the beginning and at the end of a pass, stand apart: a
        loop over rows becomes vectors.
        """
        for node in [x for nest in nests for x in nest.reduced]:
            if self.plan.ends(node) and not self.source.blocks:
                self._begun(node)
        if not (self.chunked and self.source.axes > 1):
            self._write(nests)
            return
        inner = [i for i, x in enumerate(nests) if x.axes != (0,) or self.graph.block]
        first, last = (inner[0], inner[-1] + 1) if inner else (len(nests), len(nests))
        self._write(nests[:first])
        if inner:
            self._write_rows(nests[first:last])
        self._write(nests[last:])

    def _write(self, nests: Sequence[Nest]) -> None:
        for nest in nests:
            known = len(self.scalars)
            lines = self._loops(nest)
            if not self.chunked:  # what follows from loops before these stands between both
                self.lines += self.scalars[known:]
                del self.scalars[known:]
            self.lines += lines

    def _write_rows(self, nests: Sequence[Nest]) -> None:
        self.by_rows = True
        lines = [line for nest in nests for line in self._loops(nest)]
        self.by_rows = False
        body = _deeper([*self.row[0], *lines, *self.row[1]])
        if self.graph.block:
            body = self._for_whole_blocks(body)
        self.lines += ["for (int64_t i0 = start; i0 < start + length; ++i0) {", *body, "}"]

    def _for_whole_blocks(self, body: list[str]) -> list[str]:
        """What is done for each block, once more for the last one, which may be incomplete: to ask
        of each element whether it is there would cost all others."""
        block = self.graph.block
        return [
            f"    const int64_t left = t.size[{self.source.sizes - 1}] - i0 * {block};",
            f"    if (left >= {block}) {{",
            f"        enum {{ rest = {block} }};",
            *_deeper(body),
            "    } else {",
            "        const int rest = (int)left;",
            *_deeper(body),
            "    }",
        ]

    def _in_pieces(self) -> list[str]:
        """The loops over pieces whose noise fits on the stack. To make that of each element in
        the loops would make the words of each counter twice."""
        return [
            "const int64_t stop = start + length;",
            f"for (int64_t at = start; at < stop; at += {NOISE_PIECE}) {{",
            f"    const int64_t left = stop - at, most = {NOISE_PIECE}, start = at;",
            "    const int64_t length = left < most ? left : most;",
            *_deeper(self.noise),
            *_deeper(self.lines),
            "}",
        ]

    def _noise(self, node: Node) -> str:
        """Noise in blocks, of which each is made at once."""
        key, low, high = [self.scalar(x) for x in list(node.operands())[:3]]
        name, kind = f"z{node.index}", VALUE[node.dtype]
        self.scalars.append(f"const Keys {name}k = noise_keys({key}, {low}, {high});")
        self.noise.append(f"alignas(64) {kind} {name}[{NOISE_PIECE}];")
        self.noise.append(f"noise({name}, {name}k, start, length);")
        return f"{name}[i0 - start]"

    def _begun(self, node: Node) -> None:
        """The part of a reduction that a chunk adds to, and its first value."""
        kept = self.source.kept[node]
        length = " * ".join(["(int64_t)1", *[f"n{i}" for i in node.axes]])
        name = self._memory(f"a{node.index}", kept.kind, f"t.scratch + t.at[{kept.parts}]")
        self.before.append(
            f"{kept.kind}* __restrict__ const b{node.index} = {name} + k * ({length});"
        )
        self.before.append(
            f"for (int64_t j = 0; j < {length}; ++j) b{node.index}[j] = {identity(kept)};"
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
        if node.op == ops.NOISE and self.source.blocks:
            return self._noise(node)
        for x in node.operands():
            name(x)
        return ops.expression(Cpp(lines, self.source.counter, self.scalars), node, name)

    computed: frozenset[Node] = frozenset()
    """The kept values that the loops at hand compute themselves."""

    def _place_in_tensor(self, node: Node) -> str:
        kind = VALUE[node.dtype]
        if not self.graph.block or 0 not in node.axes:
            return f"({kind}){self._index(node.axes)}"
        self._row(f"const {kind} at_{kind} = ({kind})(i0 * {self.graph.block});")
        return f"(at_{kind} + ({kind}){self._index(node.axes[1:])})"

    def _kept(self, node: Node) -> str:
        """A value that was kept."""
        kept = self.source.kept[node]
        text = self._home(node)
        if kept.how == "mean":
            gone = [i for i in next(node.operands()).axes if i not in node.axes]
            rows = f"t.size[{self.source.sizes + 2}]"
            count = " * ".join([f"(int64_t){f'n{i}' if i else rows}" for i in gone])
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
        self._pointer(i)
        if self._is_widened(node):
            return self._widened(node)
        if not self._may_end(node):
            return f"p{i}[{self._index(node.axes)}]"
        self._block(i)
        return f"q{i}[{self._index(node.axes[1:])}]"

    def _may_end(self, node: Node) -> bool:
        """Whether the last block of an input may be incomplete, as it has the tensor's shape."""
        flat = len(node.dims) == 1 and node.axes == self.plan.every
        return bool(self.graph.block and self.by_rows and flat)

    def _is_widened(self, node: Node) -> bool:
        """Whether an input is a block of bytes, which loops see as 32 bits wide: if a loop has
        bytes, too, g++ makes it of so many elements at once that its values fit no registers."""
        bytes_of = node.op == "input" and STORED[node.dtype] in ("int8_t", "uint8_t")
        return bool(self.graph.block and self.by_rows and bytes_of and self._width(node))

    def _width(self, node: Node) -> int:
        """How many elements a row of a value has, if that is a constant; else 0."""
        return self.source.fixed(node.axes[1:]) if node.axes[:1] == (0,) else 0

    def _widened(self, node: Node) -> str:
        """An element of a block of bytes, in 32 bits."""
        i, count = node.args[0], self._width(node)
        name, at = f"w{i}", f"p{i} + i0 * {count}"
        line = f"alignas(64) int32_t {name}[{count}];"
        if line not in self.before:
            if self._may_end(node):
                self._block(i)
                at = f"q{i}"
            self.before.append(line)
            self._row(f"widen({name}, {at}, {count});")
            if i in self.source.written:
                self.row[1].insert(0, f"narrow({at}, {name}, {count});")
        return f"{name}[{self._index(node.axes[1:])}]"

    def _pointer(self, i: int) -> str:
        """Have a pointer to an input; the type of its elements."""
        kind = STORED[self.graph.inputs[i].dtype]
        own = kind if i in self.source.written else f"const {kind}"
        at = "t.grad" if i == 0 else f"t.row[{i - 1}]"
        self.pointers.setdefault(f"p{i}", f"{own}* __restrict__ const p{i} = ({own}*){at};")
        return kind

    def _block(self, i: int) -> None:
        """A pointer to a block of a tensor; the last one is copied where it may be a whole one."""
        kind = self._pointer(i)
        block, own = self.graph.block, f"p{i} + i0 * {self.graph.block}"
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
                kind = "int32_t" if self._is_widened(node) else VALUE[node.dtype]
                level.append(f"const {kind} v{node.index} = {text};")
                loops.names[node] = f"v{node.index}"
            return loops.names[node]

        stored_as = {i: self._before_cast(i, value) for i, value in nest.stores}
        for node in [*nest.kept, *[next(x.operands()) for x in nest.reduced], *stored_as.values()]:
            name(node)
        for node in nest.reduced:
            self._reduce(node, loops)
        for node in [x for x in nest.kept if x not in self.plan.mirrors]:
            line = f"{self._home(node)} = ({self.source.kept[node].kind}){loops.names[node]};"
            loops.inside[max(node.axes)].append(line)
        for i, value in stored_as.items():
            target = self.graph.inputs[i]
            text = loops.names[value]
            if not self._is_widened(target):
                text = stored(Cpp.cast(text, value.dtype, target.dtype), target.dtype)
            line = f"{self._element(target)} = {text};"
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
                body = [*loops.before, pragma, *body, *loops.after]
            lines = body
        outer = [x for depth in (-1, *nest.axes) if depth not in axes for x in loops.inside[depth]]
        return ["{", *_deeper([*loops.first, *outer, *lines]), "}"]

    def _before_cast(self, i: int, value: Node) -> Node:
        """The whole number of 32 bits of which a new value of widened bytes has the last ones; the
        new value itself where it is none."""
        found = value
        while self._is_widened(self.graph.inputs[i]) and found.dtype is not torch.int32:
            narrow = found.op in (ops.CAST, ops.BITS) and found not in self.plan.kept
            if not narrow or next(found.operands()).dtype.is_floating_point:
                return value
            found = next(found.operands())
        return found

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
        if x.dtype is torch.bool and kept.kind != "uint8_t":
            value = f"({loops.names[x]} ? ({kept.kind})1 : ({kept.kind})0)"
        if kept.how in ("any", "all"):
            value = f"({kept.kind})({loops.names[x]} != 0)"
        ends = self.plan.ends(node)
        if ends and self.graph.block:  # of the last block what there is
            value = f"({self._index(x.axes[1:])} < rest ? {value} : {identity(kept)})"
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
            line = f"{target} = {identity(kept)};"
            for i in reversed([i for i in node.axes if i in axes]):
                line = f"for (int64_t i{i} = 0; i{i} < n{i}; ++i{i}) {line}"
            loops.first.append(line)
        if inner not in gone:
            loops.inside[inner].append(f"{target} = {_put(kept, target, value)};")
            return
        local = f"r{node.index}"
        nan = kept.how in ("max", "min") and kept.dtype.is_floating_point
        loops.inside[inner].append(f"{local} = {_put(kept, local, value, nan=nan)};")
        sign = "+" if kept.combined == "sum" else kept.combined
        loops.clauses.append(f" reduction({sign}:{local})")
        loops.before.append(f"{kept.kind} {local} = {identity(kept)};")
        end = local
        if nan:
            loops.inside[inner].append(f"{local}n |= ({loops.names[x]} != {loops.names[x]});")
            loops.clauses.append(f" reduction(|:{local}n)")
            loops.before.append(f"int32_t {local}n = 0;")
            end = f'({local}n ? ({kept.kind})__builtin_nan("") : {local})'
        loops.after.append(f"{target} = {end if alone else _put(kept, target, end)};")


def identity(kept: Kept) -> str:
    """What a reduction of no elements is."""
    if kept.how in ("sum", "mean", "any"):
        return "0"
    if kept.how == "all":
        return "1"
    if kept.dtype.is_floating_point:
        return f"{'-' if kept.how == 'max' else ''}__builtin_inf()"
    bits = 63 if kept.kind == "int64_t" else 31
    low = f"(-(({kept.kind})1 << {bits - 1}) * 2)"
    return low if kept.how == "max" else f"(-({low} + 1))"


def _put(kept: Kept, a: str, b: str, *, nan: bool = False) -> str:
    """Two parts of a reduction together. nan: those are counted apart."""
    if kept.combined == "sum":
        return f"{a} + {b}"
    sign = ">" if kept.combined == "max" else "<"
    plain = f"({a} {sign} {b} ? {a} : {b})"
    seen = kept.dtype.is_floating_point and not nan
    return f"({a} != {a} ? {a} : {plain})" if seen else plain


def _deeper(lines: Sequence[str]) -> list[str]:
    return [line if line.startswith("#") else f"    {line}" for line in lines]
