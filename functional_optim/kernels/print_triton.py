"""A graph as Triton: launches over a table of many tensors.

A row of the table has the sizes of a tensor's axes, the addresses of the parameter and its slots,
and what else belongs to that tensor; the addresses of the gradients come beside it, as they change.
A graph is a sequence of launches (`passes`): each reduction that something else reads is complete
before the next launch begins, values are computed again wherever they are read, and those that
write come last. So no launch reads what another program of it writes.

Results are those of the C++ (`print_cpp`) and of ATen to the bit: quotients and roots are rounded
correctly, and products and sums are fused only where ATen fuses them. Reductions are taken in
float64, in an order that depends on sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from functional_optim.kernels import ops
from functional_optim.kernels.graph import Graph, Node, Unsuitable

NumberSource = Literal["value", "tensor"]
"""Where a number of a step comes from: an argument of the launch, or a float64 tensor of no
dimensions on the device."""

TYPES = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.bool: "tl.int1",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.float8_e4m3fn: "tl.uint8",
    torch.float8_e5m2: "tl.uint8",
}
"""The Triton type of each dtype. Of floats of 8 bits kernels see the bits."""

HALF = (torch.bfloat16, torch.float16)

LIMIT = 1 << 31
"""Elements of several axes that kernels count in 32 bits."""


class LaunchConfig(NamedTuple):
    """How the work is divided.

    block: the elements that the threads of a program take at once. warps: 32 threads each. repeat:
    blocks of a program.
    """

    block: int
    warps: int
    repeat: int

    @property
    def chunk(self) -> int:
        """The elements of a program."""
        return self.block * self.repeat


class Tile(NamedTuple):
    """How a reduction that keeps some axes is divided. kept, gone: the elements of both kinds that
    the threads of a program take at once. repeat: how often. rows: whether the last axis is reduced,
    so that neighbouring elements are added up."""

    kept: int
    gone: int
    repeat: int
    rows: bool

    @property
    def chunk(self) -> int:
        """The elements that a program reduces to one."""
        return self.gone * self.repeat


ROWS, COLUMNS = Tile(4, 256, 16, rows=True), Tile(64, 16, 64, rows=False)
TILE_WARPS = 8


class Triton:
    """A printer: primitives as Triton, and the lines that give names to texts."""

    def __init__(self, lines: list[str], names: Iterable[int]) -> None:
        self.lines = lines
        self.names = iter(names)
        self.dtype = torch.float32

    add, sub, mul = (lambda self, x, y, _s=s: f"({x} {_s} {y})" for s in "+-*")
    lt, le, gt, ge, eq, ne = (
        lambda self, x, y, _s=s: f"({x} {_s} {y})" for s in ("<", "<=", ">", ">=", "==", "!=")
    )
    bitand, bitor, bitxor, shl, shr = (
        lambda self, x, y, _s=s: f"({x} {_s} {y})" for s in ("&", "|", "^", "<<", ">>")
    )

    def div(self, x: str, y: str) -> str:
        """Correctly rounded, which Triton's own `/` is in float64 alone."""
        return f"({x} / {y})" if self.dtype is torch.float64 else f"tl.div_rn({x}, {y})"

    def neg(self, x: str) -> str:
        """Triton's own minus is 0 - x, which makes 0 of 0, and not -0."""
        return f"({x} * -1.0)" if self.dtype.is_floating_point else f"(-{x})"

    def not_(self, x: str) -> str:
        return f"({x} == 0)" if self.dtype is torch.bool else f"(~{x})"

    def abs(self, x: str) -> str:
        return f"tl.abs({x})"

    def sqrt(self, x: str) -> str:
        return f"tl.sqrt({x})" if self.dtype is torch.float64 else f"tl.sqrt_rn({x})"

    def fma(self, x: str, y: str, z: str) -> str:
        return f"tl.fma({x}, {y}, {z})"

    def maximum(self, x: str, y: str) -> str:
        """NaN of either; of two zeros the second one, as ATen's vectors have it."""
        if not self.dtype.is_floating_point:
            return f"tl.maximum({x}, {y})"
        return f"tl.where(({x} > {y}) | ({x} != {x}), {x}, {y})"

    def minimum(self, x: str, y: str) -> str:
        if not self.dtype.is_floating_point:
            return f"tl.minimum({x}, {y})"
        return f"tl.where(({x} < {y}) | ({x} != {x}), {x}, {y})"

    def select(self, c: str, x: str, y: str) -> str:
        return f"tl.where({c}, {x}, {y})"

    def call(self, name: str, *x: str) -> str:
        own = name in ("floor", "ceil")
        return f"{'tl' if own else 'libdevice'}.{name}({', '.join(x)})"

    def const(self, x: Any) -> str:
        return self.constant(x, self.dtype)

    def let(self, x: str) -> str:
        name = f"s{next(self.names)}"
        self.lines.append(f"{name} = {x}")
        return name

    def cast(self, x: str, old: torch.dtype, new: torch.dtype) -> str:
        """A value in another dtype."""
        if old is new:
            return x
        if new is torch.bool:
            return f"({x} != 0)"
        if old is torch.float64 and new in HALF:  # as the CPU rounds, by way of float32
            x = f"{x}.to(tl.float32)"
        return f"{x}.to({_type(new)})"

    def constant(self, x: Any, dtype: torch.dtype) -> str:
        """A number in a dtype."""
        if not dtype.is_floating_point:
            return f"tl.full((), {int(x)}, {_type(dtype)})"
        value = float(x)
        if dtype is not torch.float64:
            value = float(torch.tensor(value, dtype=dtype, device="cpu"))
        text = repr(value) if math.isfinite(value) else f"float({str(value)!r})"
        return f"tl.full((), {text}, {_type(dtype)})"

    def bits(self, x: str, old: torch.dtype, new: torch.dtype) -> str:
        """The bits of a value as a value of another dtype."""
        return f"{x}.to({_type(new)}, bitcast=True)"


def _type(dtype: torch.dtype) -> str:
    if dtype not in TYPES:
        raise Unsuitable(f"a value in {dtype}")
    return TYPES[dtype]


# ---------------------------------------------------------------- which launches there are


class Pass(NamedTuple):
    """A launch.

    domain: the axes over whose elements it goes; none for one program a tensor. kept: those that
    its reductions keep. reduced: the reductions. stores: as in a graph. results: what it measures
    of each tensor. total: whether its reductions are what the graph measures.
    """

    domain: tuple[int, ...]
    kept: tuple[int, ...] = ()
    reduced: tuple[Node, ...] = ()
    stores: tuple[tuple[int, Node], ...] = ()
    results: tuple[Node, ...] = ()
    total: bool = False

    @property
    def name(self) -> str:
        """What its kernel is called."""
        return "step_kernel" if self.stores else "measure_kernel"

    @property
    def outputs(self) -> int:
        """How many numbers a program leaves, or what of each element that is kept."""
        return len(self.reduced) + len(self.results)

    @property
    def tile(self) -> Tile | None:
        """How reductions are divided that keep axes; None where none do."""
        if not self.kept:
            return None
        return COLUMNS if self.domain[-1] in self.kept else ROWS


def reduces(node: Node) -> bool:
    """Whether a value is made of several others of the tensor."""
    return ops.kind(node.op) == "reduce" and next(node.operands()).axes != node.axes


def how(node: Node) -> str:
    """What a reduction does: sum, max or min."""
    return {"mean": "sum", "any": "max", "all": "min"}.get(ops.REDUCE[node.op], ops.REDUCE[node.op])


def passes(graph: Graph) -> list[Pass]:
    """The launches of a graph, in their order.

    Raises:
        Unsuitable: if there is an operation that Triton kernels do not know.
    """
    for node in graph.nodes:
        _type(node.dtype)
    level: dict[Node, int] = {}
    groups: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[Node]] = {}
    for node in graph.nodes:
        level[node] = max([level[x] for x in node.operands()], default=0)
        if reduces(node):
            key = (level[node], next(node.operands()).axes, node.axes)
            groups.setdefault(key, []).append(node)
            level[node] += 1
    found = [
        Pass(domain, kept, tuple(sorted(groups[at, domain, kept], key=_order)))
        for at, domain, kept in sorted(groups)
    ]
    written = {graph.inputs[i].axes for i, _ in graph.stores}
    for axes in sorted(written, key=lambda own: (-len(own), own)):
        mine = tuple([(i, x) for i, x in graph.stores if graph.inputs[i].axes == axes])
        found.append(Pass(axes, stores=mine))
    if graph.results and found and _is_total(graph, found[-1]):
        found[-1] = found[-1]._replace(reduced=tuple(graph.results), total=True)
    elif graph.results:
        found.append(Pass((), results=tuple(graph.results)))
    return found


def _order(node: Node) -> tuple[int, int]:
    return ["sum", "max", "min"].index(how(node)), node.index


def _is_total(graph: Graph, last: Pass) -> bool:
    """Whether the last launch computes what is measured, and nothing else."""
    plain = len(set(graph.results)) == len(graph.results) and not last.kept
    sums = all(reduces(x) and ops.REDUCE[x.op] == "sum" for x in graph.results)
    return plain and sums and set(last.reduced) == set(graph.results)


# ---------------------------------------------------------------- their text


class KernelText(NamedTuple):
    """The text of a kernel, and the type of each of its arguments."""

    text: str
    arguments: dict[str, str]


class KernelSource:
    """A launch of a graph, ready to be written.

    numbers: the indices of the numbers that it reads. read: the inputs. tables: the reductions of
    other launches that it reads. Behind the sizes a row of its table has the addresses of the
    parameter and the slots, constants that depend on the shape, the addresses of `tables`, and
    those to which its own reductions go, where these keep axes.
    """

    def __init__(self, graph: Graph, own: Pass) -> None:
        self.graph = graph
        self.own = own
        self.goals = [
            *[next(x.operands()) for x in own.reduced],
            *[value for _, value in own.stores],
            *own.results,
        ]
        self.needed = _needed(self.goals)
        self.numbers = sorted({x.args[0] for x in self.needed if x.op == "number"})
        self.read = [x for x in self.needed if x.op == "input"]
        self.tables = [x for x in self.needed if reduces(x)]
        self.axes = len(graph.sizes)
        self.pointers = {x.args[0]: x for x in (*self.read, *[graph.inputs[i] for i, _ in own.stores])}
        self._write()

    @property
    def width(self) -> int:
        """The entries of a row."""
        return self._targets + (len(self.own.reduced) if self.own.kept else 0)

    @property
    def _constants(self) -> int:
        return self.axes + len(self.graph.inputs) - 1

    @property
    def _tables(self) -> int:
        return self._constants + len(self.graph.places)

    @property
    def _targets(self) -> int:
        return self._tables + len(self.tables)

    def _write(self) -> None:
        """The lines of what is computed once, and of what is for each element."""
        self.once: list[str] = []
        self.lines: list[str] = []
        self.names: dict[Node, str] = {}
        self.leaves: list[Node] = []
        self.given: dict[str, None] = {}
        counter = iter(range(1 << 30))
        for node in self.needed:
            if node.op == "number":
                self.names[node] = f"n{node.args[0]}"
            elif node.op == "row":
                at = f"row + {self._constants + node.args[0]}"
                self.names[node] = f"v{node.index}"
                self.once.append(f"v{node.index} = tl.load({at}).to(tl.float64, bitcast=True)")
            elif node.op == "input":
                self.names[node] = f"x{node.args[0]}"
                if node.axes:
                    self.leaves.append(node)
                else:
                    self.once.append(f"x{node.args[0]} = tl.load(p{node.args[0]})")
            elif reduces(node):
                self.names[node] = f"v{node.index}"
                if node.axes:
                    self.leaves.append(node)
                else:
                    text = self._kept(node, f"tl.load(q{node.index})")
                    self.once.append(f"v{node.index} = {text}")
            elif node.op == "iota":
                self.names[node] = f"v{node.index}"
                self.leaves.append(node)
            else:
                lines = self.lines if node.axes else self.once
                inside = bool(node.axes)
                text = ops.expression(
                    Triton(lines, counter), node, lambda x, inside=inside: self._name(x, inside)
                )
                self.names[node] = f"v{node.index}"
                lines.append(f"v{node.index} = {text}")
        self.returned = [self._returned(x) for x in self.own.reduced]
        printer = Triton(self.lines, counter)
        for i, value in self.own.stores:
            target = self.graph.inputs[i].dtype
            name = self._name(value, inside=True)
            self.returned.append(printer.cast(name, value.dtype, target))

    def _name(self, node: Node, inside: bool) -> str:
        """The name of a value. inside: of the function of a block, which gets it passed."""
        if inside and not node.axes:
            self.given[self.names[node]] = None
        return self.names[node]

    def _returned(self, node: Node) -> str:
        """What a reduction adds up, in float64; for elements that a tensor lacks, what changes
        nothing."""
        x = next(node.operands())
        name = self._name(x, inside=True)
        if ops.REDUCE[node.op] in ("any", "all"):
            name = f"({name} != 0)"
        return f"tl.where(mask, {name}.to(tl.float64), {identity(how(node))})"

    def _kept(self, node: Node, text: str) -> str:
        """A reduction that was computed before, from its float64."""
        if ops.REDUCE[node.op] == "mean":
            gone = [f"n_{i}" for i in next(node.operands()).axes if i not in node.axes]
            text = f"({text} / ({' * '.join(gone)}).to(tl.float64))"
        return Triton([], ()).cast(text, torch.float64, node.dtype)

    def inputs(self) -> list[str]:
        """The arguments of the function of a block."""
        mask = ["mask"] if self.own.reduced else []
        return [*[self.names[x] for x in self.leaves], *self.given, *mask]

    def text(
        self, sources: Sequence[NumberSource], config: LaunchConfig, *, aligned: bool, skips: bool
    ) -> KernelText:
        """The kernel.

        Args:
            sources: where each number of a step comes from.
            config: how the work is divided.
            aligned: whether all tensors begin at multiples of 16 bytes.
            skips: whether the last argument is a number that says, where it is not 0, to do nothing.
        """
        arguments = {"chunks": "*i64", "rows": "*i64", "grads": "*i64"}
        numbers: list[str] = []
        for i in self.numbers:
            if sources[i] == "value":
                arguments[f"n{i}"] = "fp64"
            else:
                arguments[f"a{i}"] = "*fp64"
                numbers.append(f"n{i} = tl.load(a{i})")
        if self.own.outputs and not self.own.kept:
            arguments["partials"] = "*fp64"
        if skips:
            arguments["skip"] = "*fp32"
        head = [
            f"@triton.jit\ndef {self.own.name}({', '.join(arguments)}):",
            *_indented(["program = tl.program_id(0).to(tl.int64)", "at = tl.load(chunks + program)"]),
            *_indented(["tensor = at >> 32", f"row = rows + tensor * {self.width}"]),
            *_indented([f"n_{i} = tl.load(row + {i})" for i in range(self.axes)]),
            *_indented([f"chunk = at & {0xFFFFFFFF}"]),
            *_indented(self._pointers(aligned=aligned)),
            *_indented([*numbers, *self.once]),
        ]
        if not self.own.domain:
            body = self._of_tensor(skips)
        elif self.own.tile is None:
            body = self._of_elements(config, skips)
        else:
            body = self._of_kept(self.own.tile)
        inner = self._function() if self.own.domain else []
        return KernelText("\n".join([HEAD, *inner, *head, *_indented(body), ""]), arguments)

    def _function(self) -> list[str]:
        """What is done to a block."""
        lines = [*self.lines, f"return {', '.join(self.returned) or 'mask'}"]
        return [f"@triton.jit\ndef rule({', '.join(self.inputs())}):", *_indented(lines), "\n"]

    def _pointers(self, *, aligned: bool) -> list[str]:
        """Where the tensors begin, and what was reduced of this one."""
        found: list[str] = []
        for i, node in sorted(self.pointers.items()):
            address = "grads + tensor" if i == 0 else f"row + {self.axes + i - 1}"
            found.append(f"p{i} = {_pointer(address, _type(node.dtype), aligned=aligned)}")
        for k, node in enumerate(self.tables):
            found.append(
                f"q{node.index} = {_pointer(f'row + {self._tables + k}', 'tl.float64', aligned=False)}"
            )
        return found

    def _of_tensor(self, skips: bool) -> list[str]:
        """The lines of one program a tensor."""
        mask = ", mask=tl.load(skip) == 0" if skips else ""
        printer = Triton([], ())
        stores = [
            f"tl.store(p{i}, "
            f"{printer.cast(self.names[x], x.dtype, self.graph.inputs[i].dtype)}{mask})"
            for i, x in self.own.stores
        ]
        count = len(self.own.results)
        results = [
            f"tl.store(partials + program * {count} + {k}, "
            f"{printer.cast(self.names[x], x.dtype, torch.float64)})"
            for k, x in enumerate(self.own.results)
        ]
        return [*stores, *results, *([] if stores or results else ["pass"])]

    def _call(self) -> str:
        names = [*[f"z{k}" for k in range(len(self.own.reduced))], *[f"y{i}" for i, _ in self.own.stores]]
        return f"{', '.join(names) or '_'} = rule({', '.join(self.inputs())})"

    def _of_elements(self, config: LaunchConfig, skips: bool) -> list[str]:
        """The lines of a chunk of elements, one behind the other."""
        domain, block = self.own.domain, config.block
        whole = [x.args[0] for x in self.pointers.values() if x.axes == domain]
        count = len(self.own.reduced)
        off = " * (tl.load(skip) == 0).to(tl.int64)" if skips else ""
        return [
            f"size = {' * '.join([f'n_{i}' for i in domain])}",
            f"start = chunk * {config.chunk}",
            *[f"p{i} = p{i} + start" for i in whole],
            f"offsets = tl.arange(0, {block})",
            f"left = tl.minimum(size - start, {config.chunk}){off}",
            f"blocks = left // {block}",
            *[
                f"t{k} = tl.full([{block}], {identity(how(x))}, tl.float64)"
                for k, x in enumerate(self.own.reduced)
            ],
            "for k in range(blocks):",
            *_indented([f"mask = offsets < {block}", *self._block(config, whole=True)]),
            f"if left > blocks * {block}:",
            "    k = blocks",
            *_indented([f"mask = offsets < left - blocks * {block}", *self._block(config, whole=False)]),
            *[
                f"tl.store(partials + program * {count} + {k}, {_folded(f't{k}', x, 0)})"
                for k, x in enumerate(self.own.reduced)
            ],
        ]

    def _block(self, config: LaunchConfig, *, whole: bool) -> list[str]:
        """The lines of one block, the k-th of its chunk. whole: whether the tensor has all of it."""
        domain, lines = self.own.domain, list[str]()
        mask, other = ("", "") if whole else (", mask=mask", ", other=0")
        if any(x.axes != domain for x in self.leaves):
            lines += _decoded(domain, f"start + k * {config.block}", "offsets")
        here = f"k * {config.block} + offsets"
        for node in self.leaves:
            at = f"({here})" if node.axes == domain else _index(node.axes)
            if node.op == "iota":
                text = f"start + {here}" if node.axes == domain else at
                lines.append(f"{self.names[node]} = ({text}).to({_type(node.dtype)})")
            elif node.op == "input":
                lines.append(f"{self.names[node]} = tl.load(p{node.args[0]} + {at}{mask}{other})")
            else:
                at = f"(start + {here})" if node.axes == domain else at
                text = f"tl.load(q{node.index} + {at}{mask}{other})"
                lines.append(f"{self.names[node]} = {self._kept(node, text)}")
        lines.append(self._call())
        lines += [f"tl.store(p{i} + ({here}), y{i}{mask})" for i, _ in self.own.stores]
        return [*lines, *[_added(f"t{k}", f"z{k}", x) for k, x in enumerate(self.own.reduced)]]

    def _of_kept(self, tile: Tile) -> list[str]:
        """The lines of reductions that keep axes."""
        domain, kept = self.own.domain, self.own.kept
        gone = tuple([i for i in domain if i not in kept])
        mine, others = ("[:, None]", "[None, :]") if tile.rows else ("[None, :]", "[:, None]")
        shape = [tile.kept, tile.gone] if tile.rows else [tile.gone, tile.kept]
        inside: list[str] = [
            f"g = part * {tile.chunk} + k * {tile.gone} + tl.arange(0, {tile.gone})",
            f"mask = (there{mine}) & ((g < gone){others})",
            *_decoded(gone, "0", "g"),
            *[f"i{i} = i{i}{others}" for i in gone],
        ]
        for node in self.leaves:
            at = _index(node.axes)
            if node.op == "iota":
                inside.append(f"{self.names[node]} = ({at}).to({_type(node.dtype)})")
            elif node.op == "input":
                text = f"tl.load(p{node.args[0]} + {at}, mask=mask, other=0)"
                inside.append(f"{self.names[node]} = {text}")
            else:
                text = f"tl.load(q{node.index} + {at}, mask=mask, other=0)"
                inside.append(f"{self.names[node]} = {self._kept(node, text)}")
        inside.append(self._call())
        inside += [_added(f"t{k}", f"z{k}", x) for k, x in enumerate(self.own.reduced)]
        stores: list[str] = []
        for k, node in enumerate(self.own.reduced):
            target = _pointer(f"row + {self._targets + k}", "tl.float64", aligned=False)
            value = _folded(f"t{k}", node, int(tile.rows))
            stores.append(f"tl.store({target} + part.to(tl.int64) * kept + j, {value}, mask=there)")
        return [
            f"kept = ({' * '.join([f'n_{i}' for i in kept])}).to(tl.int32)",
            f"gone = ({' * '.join([f'n_{i}' for i in gone])}).to(tl.int32)",
            f"across = (kept + {tile.kept - 1}) // {tile.kept}",
            "chunk = chunk.to(tl.int32)",
            "part = chunk // across",
            f"j = chunk % across * {tile.kept} + tl.arange(0, {tile.kept})",
            "there = j < kept",
            *_decoded(kept, "0", "j"),
            *[f"i{i} = i{i}{mine}" for i in kept],
            *[
                f"t{k} = tl.full({shape}, {identity(how(x))}, tl.float64)"
                for k, x in enumerate(self.own.reduced)
            ],
            f"left = tl.minimum(gone - part * {tile.chunk}, {tile.chunk})",
            f"for k in range((left + {tile.gone - 1}) // {tile.gone}):",
            *_indented(inside),
            *stores,
        ]


def _needed(goals: Sequence[Node]) -> list[Node]:
    """What values are made of, in order; reductions are not looked behind."""
    found: set[Node] = set()
    waiting = [*goals]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            if not reduces(node) and node.op != "number":
                waiting += node.operands()
    return sorted(found, key=lambda x: x.index)


def _decoded(axes: tuple[int, ...], first: str, offsets: str) -> list[str]:
    """The place of each element on each axis. first: where a block begins, in 64 bits; offsets:
    those in it, in 32."""
    if len(axes) == 1:
        return [f"i{axes[0]} = {offsets} + {first}"]
    lines = [f"e = {first}", f"c = {offsets}"]
    for axis in reversed(axes[1:]):
        small = f"n_{axis}.to(tl.int32)"
        if first != "0":
            lines += [f"c = c + (e % n_{axis}).to(tl.int32)", f"e = e // n_{axis}"]
        lines += [f"i{axis} = c % {small}", f"c = c // {small}"]
    return [*lines, f"i{axes[0]} = c + e"]


def _index(axes: tuple[int, ...]) -> str:
    """Where the element of a tensor with some axes is, in 64 bits."""
    text = f"i{axes[0]}.to(tl.int64)"
    for axis in axes[1:]:
        text = f"({text} * n_{axis} + i{axis})"
    return text


def identity(kind: str) -> str:
    """What changes nothing in a reduction."""
    return {"sum": "0.0", "max": "float('-inf')", "min": "float('inf')"}[kind]


def _added(total: str, x: str, node: Node) -> str:
    kind = how(node)
    return f"{total} = {total} + {x}" if kind == "sum" else f"{total} = {kind}_of({total}, {x})"


def _folded(total: str, node: Node, axis: int) -> str:
    kind = how(node)
    if kind == "sum":
        return f"tl.sum({total}, axis={axis})"
    return f"tl.reduce({total}, {axis}, {kind}_of)"


def _pointer(address: str, kind: str, *, aligned: bool) -> str:
    """The pointer that is stored at an address.

    The hint is on the pointer: on the integer that it is made of, it would be lost.
    """
    pointer = f"tl.load({address}).to(tl.pointer_type({kind}))"
    return f"tl.multiple_of({pointer}, 16)" if aligned else pointer


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


HEAD = '''import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def max_of(a, b):
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def min_of(a, b):
    return tl.where((a < b) | (a != a), a, b)

'''

COMBINE = """
@triton.jit
def {kind}_kernel(partials, ranges, totals, outputs, first, columns, stride):
    program = tl.program_id(0).to(tl.int64)
    tensor = program // columns
    output = program % columns + first
    start = tl.load(ranges + 2 * tensor)
    stop = tl.load(ranges + 2 * tensor + 1)
    offsets = tl.arange(0, 1024)
    total = tl.full([1024], {identity}, tl.float64)
    for at in range(start, stop, 1024):
        rows = at + offsets
        own = tl.load(partials + rows * outputs + output, mask=rows < stop, other={identity})
        total = {put}
    tl.store(totals + tensor * stride + output, {folded})
"""
"""Puts together what programs have left of each tensor, in an order that depends on sizes alone."""

JOIN = """
@triton.jit
def {kind}_parts_kernel(chunks, entries):
    at = tl.load(chunks + tl.program_id(0).to(tl.int64))
    entry = entries + (at >> 32) * 4
    source = tl.load(entry).to(tl.pointer_type(tl.float64))
    target = tl.load(entry + 1).to(tl.pointer_type(tl.float64))
    count = tl.load(entry + 2)
    length = tl.load(entry + 3)
    j = (at & 0xFFFFFFFF) * 256 + tl.arange(0, 256)
    total = tl.full([256], {identity}, tl.float64)
    for k in range(count):
        own = tl.load(source + k * length + j, mask=j < length, other={identity})
        total = {put}
    tl.store(target + j, total, mask=j < length)
"""
"""The same of reductions that keep axes: for each of them what the parts of a tensor have left."""

JOINED = 256
"""Elements of a program of `JOIN`."""


def combine_text(kind: str, *, parts: bool) -> KernelText:
    """The kernel that puts together what programs have left. kind: as `how` has it. parts: of
    reductions that keep axes."""
    put = "total + own" if kind == "sum" else f"{kind}_of(total, own)"
    folded = "tl.sum(total, axis=0)" if kind == "sum" else f"tl.reduce(total, 0, {kind}_of)"
    if parts:
        text = JOIN.format(kind=kind, identity=identity(kind), put=put)
        return KernelText(HEAD + text, {"chunks": "*i64", "entries": "*i64"})
    text = COMBINE.format(kind=kind, identity=identity(kind), put=put, folded=folded)
    integers = dict.fromkeys(("outputs", "first", "columns", "stride"), "i64")
    types = {"partials": "*fp64", "ranges": "*i64", "totals": "*fp64", **integers}
    return KernelText(HEAD + text, types)
