"""C++ for the nodes of a tape: a function from values of eight problems to other values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from functional_optim.kernels import ops
from functional_optim.kernels.lane_loops import (
    UNROLLED,
    Elsewhere,
    Index,
    LaneLoops,
    NoMemory,
    broadcast,
    flat,
    plus,
    size_of,
)
from functional_optim.kernels.lane_matrices import DECOMPOSITIONS
from functional_optim.kernels.lane_rooms import placed
from functional_optim.kernels.lane_views import source_of
from functional_optim.kernels.lanes import VECTOR, Lanes, check
from functional_optim.kernels.node import Node, Unsuitable, reached

MOST = 1 << 20
"""Bytes of scratch memory of a program: what its loops touch should fit a cache."""

GIVEN = ("input", "captured", "fixed")
JOINS = ("cat.default", "stack.default")
PRODUCTS = ("mm.default", "mv.default", "bmm.default", "dot.default")
BY_INDEX = ("gather.default", "scatter.value")

JOINED = {
    "sum": ("({} + {})", 0),
    "mean": ("({} + {})", 0),
    "max": ("larger({}, {})", -math.inf),
    "min": ("smaller({}, {})", math.inf),
    "any": ("({} | {})", False),
    "all": ("({} & {})", True),
}
"""How the terms of a reduction are put together, and from what on."""


class Program:
    """The text of a function.

    outputs: pairs of a node and the name of memory for it. place: how an element of an input is
    read, from the input's index and the element's place. lines: the text. scratch: bytes of memory
    that it needs.

    Values are computed in the order of the tape, except that those which fit into the open loops
    come first.
    """

    def __init__(
        self, outputs: Sequence[tuple[Node, str]], place: Callable[[int, Any], str]
    ) -> None:
        self.place = place
        self.lines: list[str] = []
        self.counter = iter(range(1 << 30))
        self.buffers: dict[Node, str] = {}
        self.factors: dict[Node, str] = {}
        self.solved: dict[Any, str] = {}
        self.rooms: list[int] = []
        self.open: LaneLoops | None = None
        self.kind: Any = None
        """Which values the open loops take."""
        live = reached([x for x, _ in outputs])
        self.uses: dict[Node, list[Node]] = {x: [] for x in live}
        for node in live:
            check(node.dtype)
            for x in set(node.operands()):
                self.uses[x].append(node)
        self.wanted = {x for x, _ in outputs}
        self._schedule([x for x in sorted(live, key=lambda x: x.index) if self._kept(x)])
        changed = [(x, where) for x, where in outputs if not self._stays(x, where)]
        for node, _ in changed:  # no input is read after this
            if node not in self.buffers and ops.kind(node.op) != "fill":
                self._store(node)
        for node, where in sorted(changed, key=lambda x: x[0].shape):
            self._in_loops(node, ("copy", node.shape), lambda n, w=where: self._copied(n, w))
        self._close()
        self.lines, self.scratch = placed(self.lines, self.rooms)
        if self.scratch > MOST:
            raise Unsuitable("values that do not fit a cache")

    def _stays(self, node: Node, where: str) -> bool:
        """Whether an output is the input in the same memory."""
        return node.op == "input" and self.place(node.args[0], 0) == f"{where}[0]"

    def _schedule(self, waiting: list[Node]) -> None:
        needs = {x: self._needs(x) for x in waiting}
        while waiting:
            pending = set(waiting) | {
                x for x, texts in (self.open.members if self.open else {}).items() if texts is None
            }
            ready = [x for x in waiting if not needs[x] & pending]
            fitting = [x for x in ready if self.open and self._kind(x) == self.kind]
            if not fitting and not ready:
                self._close()
                continue
            node = fitting[0] if fitting else ready[0]
            waiting.remove(node)
            self._compute(node)
        self._close()

    def _needs(self, node: Node) -> set[Node]:
        """The values that must be computed before."""
        found: set[Node] = set()
        for x in node.operands():
            found |= {x} if self._kept(x) else self._needs(x)
        return found

    def _kind(self, node: Node) -> Any:
        """Values of equal kinds may share loops; None: it has its own."""
        kind = _kind_of(node)
        if kind == "point":
            return "point", node.shape
        if kind == "reduce" and math.prod(node.shape) <= UNROLLED:
            return "reduce", tuple(_reduced(node))
        return None

    def _kept(self, node: Node) -> bool:
        """Whether a value is computed once, and not wherever it is read."""
        kind = _kind_of(node)
        if node.op in GIVEN or node.op in JOINS or kind == "fill" or source_of(node):
            return False
        if kind != "point" or node in self.wanted or len(self.uses[node]) != 1:
            return True
        return any(size_of(x) > size_of(node) for x in self._readers(node))

    def _readers(self, node: Node) -> Iterator[Node]:
        """The operations that read a value, perhaps through views."""
        for x in self.uses[node]:
            yield x
            if source_of(x):
                yield from self._readers(x)

    # ------------------------------------------------------------ values

    def value(self, node: Node, index: Index, nest: LaneLoops) -> str:
        """The text of an element; operations are named in the lines of a nest."""
        if node in nest.members:
            return nest.member(node, index)
        if node in self.buffers:
            return f"{self.buffers[node]}[{flat(node.shape, index)}]"
        if node.op == "input":
            return self.place(node.args[0], flat(node.shape, index))
        if node.op in GIVEN:
            text = f"{node.op}{node.args[0]}[{flat(node.shape, index)}]"
            return self._let(Lanes.shared(text, node.dtype), nest)
        if ops.kind(node.op) == "fill":
            return self._expression(node, index, nest)
        if node.op in JOINS:
            part, inner = self._part(node, index)
            return Lanes.cast(self.value(part, inner, nest), part.dtype, node.dtype)
        view = source_of(node)
        if view is None:
            return self._point(node, index, nest)
        x, inner, inside = view(index)
        zero = Lanes.constant(0, node.dtype)
        if inside == "false":
            return zero
        if inside != "true" and x not in self.buffers and x.op != "input":
            raise NoMemory(x)  # its lines would run where there is no such element
        text = self.value(x, inner, nest)
        return text if inside == "true" else self._let(f"({inside}) ? {text} : {zero}", nest)

    def _part(self, node: Node, index: Index) -> tuple[Node, Index]:
        """In which part of joined values an element is, and where there."""
        dim = _dim(node)
        stacked, start = node.op == JOINS[1], 0
        for part in node.args[0]:
            size = 1 if stacked else part.shape[dim]
            if node.shape[dim] == size or (
                isinstance(index[dim], int) and start <= index[dim] < start + size
            ):
                own = () if stacked else (plus(index[dim], -start),)
                return part, (*index[:dim], *own, *index[dim + 1 :])
            start += size
        raise NoMemory(node)

    def _point(self, node: Node, index: Index, nest: LaneLoops) -> str:
        """An operation on elements."""
        if node.op in BY_INDEX:
            return self._let(self._by_index(node, index, nest), nest)
        return self._let(self._expression(node, index, nest), nest)

    def _expression(self, node: Node, index: Index, nest: LaneLoops) -> str:
        printer = Lanes(nest.lines, self.counter)

        def name(x: Node) -> str:
            return self.value(x, broadcast(x.shape, index), nest)

        text = ops.expression(printer, node, name)
        return Lanes.wrapped(text) if node.dtype is torch.int32 else text

    def _by_index(self, node: Node, index: Index, nest: LaneLoops) -> str:
        """An element of a gather or a scatter along one dimension."""
        x, dim, places = node.args[:3]
        dim %= len(x.shape)
        if node.op == BY_INDEX[1]:
            if places.shape[dim] != 1 or places.shape != (*x.shape[:dim], 1, *x.shape[dim + 1 :]):
                raise Unsuitable("a scatter of several elements")
            here = self.value(places, (*index[:dim], 0, *index[dim + 1 :]), nest)
            other = self.value(x, index, nest)
            number = Lanes.constant(node.args[3], node.dtype)
            return f"choice(eq({here}, all_I({index[dim]})), {number}, {other})"
        if x not in self.buffers and x.op != "input":
            raise NoMemory(x)
        start = (*index[:dim], 0, *index[dim + 1 :])
        there = self.value(x, start, nest)
        step = math.prod(x.shape[dim + 1 :])
        if node.dtype is not torch.float64:
            raise Unsuitable(f"a gather of {node.dtype}")
        return f"gathered(&{there}, {step}, {x.shape[dim]}, {self.value(places, index, nest)})"

    def _let(self, text: str, nest: LaneLoops) -> str:
        name = f"s{next(self.counter)}"
        nest.lines.append(f"const auto {name} = {text};")
        return name

    # ------------------------------------------------------------ loops

    def _compute(self, node: Node) -> None:
        kind = _kind_of(node)
        if kind == "point":
            self._in_loops(node, self._kind(node), self._elements)
        elif kind == "reduce":
            self._in_loops(node, self._kind(node), self._reduce)
        elif node.op in PRODUCTS:
            self._alone(node, self._product)
        elif node.op in DECOMPOSITIONS:
            self._alone(node, partial(DECOMPOSITIONS[node.op], self))
        else:
            raise Unsuitable(f"the operation {node.op}")

    def _in_loops(self, node: Node, kind: Any, write: Callable[[Node], None]) -> None:
        """Write a value into the open loops, or into new ones."""
        if kind is None:
            self._alone(node, write)
            return
        if self.open is None or self.kind != kind:
            self._close()
            self.open, self.kind = LaneLoops(kind[1], "ij"[kind[0] == "reduce"]), kind
        mark = self.open.mark()
        try:
            write(node)
        except (Elsewhere, NoMemory) as error:
            self.open.undo(mark)
            self._close()
            if isinstance(error, NoMemory):
                self._store(error.node)
            self._in_loops(node, kind, write)

    def _alone(self, node: Node, write: Callable[[Node], None]) -> None:
        """Write a value that shares no loops."""
        self._close()
        count = len(self.lines)
        try:
            write(node)
        except NoMemory as error:
            del self.lines[count:]
            self._store(error.node)
            self._alone(node, write)

    def _close(self) -> None:
        if self.open is not None:
            self.lines += self.open.text()
            self.open = self.kind = None

    def _elements(self, node: Node) -> None:
        """A value whose elements are computed separately."""
        nest = self.open
        assert nest is not None
        texts = [self._point(node, index, nest) for index in nest.each()]
        buffer = self.buffer(node)
        nest.members[node] = texts
        for index, text in zip(nest.each(), texts, strict=True):
            nest.lines.append(f"{buffer}[{flat(node.shape, index)}] = {text};")

    def _copied(self, node: Node, where: str) -> None:
        nest = self.open
        assert nest is not None
        for index in nest.each():
            nest.lines.append(
                f"{where}[{flat(node.shape, index)}] = {self.value(node, index, nest)};"
            )

    def _store(self, node: Node) -> None:
        """Give memory to a value that would be computed wherever it is read."""
        while node not in self.buffers:
            try:
                self._stored(node)
            except NoMemory as error:
                self._store(error.node)

    def _stored(self, node: Node) -> None:
        if node.op not in JOINS:
            nest = LaneLoops(node.shape)
            for index in nest.each():
                text = self.value(node, index, nest)
                nest.lines.append(f"b{node.index}[{flat(node.shape, index)}] = {text};")
            self.buffer(node)
            self.lines += nest.text()
            return
        lines: list[str] = []
        dim = _dim(node)
        start = 0
        for part in node.args[0]:
            size = 1 if node.op == JOINS[1] else part.shape[dim]
            nest = LaneLoops((*node.shape[:dim], size, *node.shape[dim + 1 :]))
            for index in nest.each():
                there = (*index[:dim], plus(index[dim], start), *index[dim + 1 :])
                own = () if node.op == JOINS[1] else (index[dim],)
                text = self.value(part, (*index[:dim], *own, *index[dim + 1 :]), nest)
                text = Lanes.cast(text, part.dtype, node.dtype)
                nest.lines.append(f"b{node.index}[{flat(node.shape, there)}] = {text};")
            lines += nest.text()
            start += size
        self.buffer(node)
        self.lines += lines

    def buffer(self, node: Node) -> str:
        """Memory for a value: on the stack, or in the scratch memory if there are many elements."""
        name, size, kind = f"b{node.index}", size_of(node), VECTOR[node.dtype]
        if size <= 4 * UNROLLED:
            self.lines.append(f"{kind} {name}[{size}];")
        else:
            self.lines.append(f"{kind}* const {name} = ({kind}*)(scratch + {self.room(size)});")
        self.buffers[node] = name
        return name

    def room(self, size: int) -> str:
        """A name for the place of so many vectors in the scratch memory."""
        self.rooms.append(64 * size)
        return f"room{len(self.rooms) - 1}"

    # ------------------------------------------------------------ sums

    def _reduce(self, node: Node) -> None:
        x = next(node.operands())
        gone, keeps, how = ops.reduced_dims(node), ops.keeps_dims(node), ops.REDUCE[node.op]
        wide = torch.int64 if node.dtype is torch.int32 else node.dtype
        if node.dtype.is_floating_point and how in ("sum", "mean"):
            wide = torch.float64
        elif how in ("any", "all") or node.dtype is torch.bool:
            how, wide = {"max": "any", "min": "all"}.get(how, how), torch.bool

        def term(out: Index, at: Index, nest: LaneLoops) -> str:
            rest = iter([i for k, i in enumerate(out) if not keeps or k not in gone])
            along = iter(at)
            inner = [next(along if k in gone else rest) for k in range(len(x.shape))]
            return Lanes.cast(self.value(x, tuple(inner), nest), x.dtype, wide)

        def finish(total: str) -> str:
            if how == "mean":
                total = f"({total} / {Lanes.constant(math.prod(_reduced(node)), wide)})"
            return Lanes.cast(total, wide, node.dtype)

        self._accumulate(node, _reduced(node), wide, JOINED[how], term, finish)

    def _product(self, node: Node) -> None:
        """A product of matrices, as sums of products."""
        a, b = node.operands()
        wide = {torch.float32: torch.float64, torch.int32: torch.int64}.get(node.dtype, node.dtype)
        kind = node.op.partition(".")[0]

        def places(out: Index, k: Any) -> tuple[Index, Index]:
            if kind == "bmm":
                return (out[0], out[1], k), (out[0], k, out[2])
            return (*out[:1], k), (k, *out[1:])

        def term(out: Index, at: Index, nest: LaneLoops) -> str:
            left, right = places(out, at[0])
            x = Lanes.cast(self.value(a, left, nest), a.dtype, wide)
            y = Lanes.cast(self.value(b, right, nest), b.dtype, wide)
            return f"({x} * {y})"

        def finish(total: str) -> str:
            return Lanes.cast(total, wide, node.dtype)

        self._accumulate(node, a.shape[-1:], wide, JOINED["sum"], term, finish)

    def _accumulate(
        self,
        node: Node,
        over: Sequence[int],
        wide: torch.dtype,
        how: tuple[str, Any],
        term: Callable[[Index, Index, LaneLoops], str],
        finish: Callable[[str], str],
    ) -> None:
        """Elements that are each put together from several terms, in a dtype: few of them by the
        open loops, many by their own."""
        joined, neutral = how
        if not wide.is_floating_point and wide is not torch.bool and neutral:
            raise Unsuitable("the largest of integers")
        outer = LaneLoops(node.shape)
        shared = self.open is not None
        stores: list[str] = []
        for index in outer.each():
            loop = self.open if self.open is not None else LaneLoops(over, "j")
            total = f"t{next(self.counter)}"
            (loop.before if shared else outer.lines).append(
                f"{VECTOR[wide]} {total} = {Lanes.constant(neutral, wide)};"
            )
            for at in loop.each():
                text = term(index, at, loop)
                loop.lines.append(f"{total} = {joined.format(total, text)};")
            stored = f"b{node.index}[{flat(node.shape, index)}] = {finish(total)};"
            if shared:
                stores.append(stored)
            else:
                outer.lines.extend([*loop.text(), stored])
        self.buffer(node)
        if self.open is not None:
            self.open.after += stores
            self.open.members[node] = None
        else:
            self.lines += outer.text()


def _dim(node: Node) -> int:
    """The dimension along which values are joined."""
    given: Any = node.args[1:2] or (node.kwargs.get("dim", 0),)
    return given[0] % len(node.shape)


def _kind_of(node: Node) -> str | None:
    """As `ops.kind`; elements that are read by an index are computed separately, too."""
    return "point" if node.op in BY_INDEX else ops.kind(node.op)


def _reduced(node: Node) -> list[int]:
    """The sizes of the dimensions over which a reduction goes."""
    x = next(node.operands())
    return [x.shape[i] for i in sorted(ops.reduced_dims(node))]
