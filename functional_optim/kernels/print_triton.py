"""A graph as Triton: launches over a table of many tensors.

A row of the table has the sizes of a tensor's axes, the addresses of the parameter and its slots,
and what else belongs to that tensor; the addresses of the gradients are in another table, as they
change. A graph is a sequence of launches: a reduction that something else reads is complete before
the next launch begins, values are computed again wherever they are read, and those that write come
last. So no launch reads what another program of it writes. Tensors in blocks are gone through by
whole blocks, and what is reduced within a block is reduced within a program.

Results are those of the C++ (`print_cpp`) and of ATen to the bit: quotients and roots are rounded
correctly, and products and sums are fused only where ATen fuses them. Reductions are taken in
float64, in an order that depends on sizes alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from functional_optim.kernels import ops
from functional_optim.kernels.graph import Graph
from functional_optim.kernels.node import Node, NumberSource, Unsuitable
from functional_optim.kernels.triton_primitives import (
    HEAD,
    KernelText,
    Triton,
    folded,
    identity,
    indented,
    pointer,
    put,
    type_of,
)
from functional_optim.kernels.triton_spaces import CHUNK, CONFIGS, Blocks, Flat, LaunchConfig, Tiles


class KernelVariant(NamedTuple):
    """What kernels of one graph differ in.

    sources: where each number of a step comes from. aligned: whether all tensors begin at multiples
    of 16 bytes. skips: whether the last argument of those that write is a number that says, where
    it is not 0, to do nothing.
    """

    sources: tuple[NumberSource, ...]
    aligned: bool
    skips: bool = False


class Pass(NamedTuple):
    """A launch.

    domain: the axes over whose elements it goes; none for one element a tensor. kept: those that
    its reductions keep. reduced: the reductions. found: which results of the graph it adds up over
    all tensors, and of what. stores: as in a graph.
    """

    domain: tuple[int, ...]
    kept: tuple[int, ...] = ()
    reduced: tuple[Node, ...] = ()
    found: tuple[tuple[int, Node], ...] = ()
    stores: tuple[tuple[int, Node], ...] = ()


def how(node: Node) -> str:
    """What a reduction does: sum, max or min."""
    found = ops.REDUCE[node.op]
    return ops.COMBINED.get(found, found)


def _is_wide(node: Node) -> bool:
    """Whether an integer may have more than the 53 bits of a float64, in which programs put their
    parts together."""
    if node.op == ops.CAST and node.dtype is torch.int64:
        node = node.args[0]
        return node.dtype is torch.int64 or node.dtype.is_floating_point
    return node.dtype is torch.int64


def crosses(graph: Graph, node: Node) -> bool:
    """Whether a value is made of elements that several programs have."""
    if ops.kind(node.op) != "reduce":
        return False
    gone = {*next(node.operands()).axes} - {*node.axes}
    return any(graph.sizes[i] > 0 for i in gone)


def passes(graph: Graph) -> list[Pass]:
    """The launches of a graph, in their order."""
    read = {y for x in graph.nodes for y in x.operands()} | {x for _, x in graph.stores}
    crossing = {x for x in graph.nodes if crosses(graph, x)}
    direct = {x for x in crossing if x not in read and ops.REDUCE[x.op] == "sum"}
    level: dict[Node, int] = {}
    groups: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[Node]] = {}
    for node in graph.nodes:
        level[node] = max([level[x] for x in node.operands()], default=0)
        if node in crossing - direct:
            key = (level[node], next(node.operands()).axes, node.axes)
            groups.setdefault(key, []).append(node)
            level[node] += 1
    every = [Pass(*key[1:], tuple(groups[key])) for key in sorted(groups)]
    found: dict[tuple[int, ...], list[tuple[int, Node]]] = {}
    for i, node in enumerate(graph.results):
        value = next(node.operands()) if node in direct else node
        found.setdefault(value.axes, []).append((i, value))
    every += [Pass(domain, found=tuple(own)) for domain, own in found.items()]
    stores: dict[tuple[int, ...], list[tuple[int, Node]]] = {}
    for i, value in graph.stores:
        domain = graph.inputs[i].axes
        if graph.block and domain:  # all of a block at once
            domain = tuple(range(len(graph.sizes)))
        stores.setdefault(domain, []).append((i, value))
    for domain in sorted(stores, key=lambda own: (-len(own), own)):
        every.append(Pass(domain, stores=tuple(stores[domain])))
    if graph.block and any(0 < len(x.domain) < len(graph.sizes) or x.kept for x in every):
        raise Unsuitable("sums over blocks")
    return every


class TritonSource:
    """The launches of a graph, and the rows of the table that they share.

    A row has the sizes, the addresses of the parameter and the slots, the constants that depend on
    the shape, for each reduction where it is read and where programs write, and for each result
    where programs write. `constants`, `places` and `found` say where that is in a row.
    """

    def __init__(self, graph: Graph) -> None:
        for node in graph.nodes:
            type_of(node.dtype)
            if crosses(graph, node) and any(map(_is_wide, node.operands())):
                raise Unsuitable(f"{node.what} of int64", node.rule)
        self.graph = graph
        self.passes = passes(graph)
        self.sizes = len(graph.sizes) + (graph.block > 0)
        self.constants = self.sizes + len(graph.inputs) - 1
        first = self.constants + len(graph.places)
        reduced = [x for own in self.passes for x in own.reduced]
        self.places = {x: first + 2 * k for k, x in enumerate(reduced)}
        first += 2 * len(reduced)
        order = [i for own in self.passes for i, _ in own.found]
        self.found = {i: first + k for k, i in enumerate(order)}
        self.width = first + len(order)
        self.chunk = max(CHUNK, graph.block)
        self.kernels = [KernelSource(self, own) for own in self.passes]
        count = 1 + max([i for x in self.kernels for i in x.numbers], default=-1)
        texts = self.texts(KernelVariant(("value",) * count, True), self.configs()[0])
        self.text = "".join([x.text for x in texts])
        """What graphs have in common that share kernels."""

    def configs(self) -> list[LaunchConfig]:
        """Those whose blocks are no smaller than a codec's."""
        least = self.graph.block
        return list(dict.fromkeys([x._replace(block=max(least, x.block)) for x in CONFIGS]))

    def texts(self, variant: KernelVariant, config: LaunchConfig) -> list[KernelText]:
        """The kernels, in the order of their launches."""
        return [x.text(variant, config) for x in self.kernels]


source_of = functools.lru_cache(maxsize=1024)(TritonSource)
"""The launches of a graph, which may be Unsuitable: for a dtype or a reduction."""


class KernelSource:
    """A launch, ready to be written. numbers: the indices of the numbers that it reads."""

    def __init__(self, source: TritonSource, own: Pass) -> None:
        self.source = source
        self.graph = source.graph
        self.own = own
        self.outputs = [(how(x), source.places[x] + 1) for x in own.reduced]
        self.outputs += [("sum", source.found[i]) for i, _ in own.found]
        """What is reduced: how, and where in a row is the address of the parts."""
        operands = [next(x.operands()) for x in own.reduced] + [x for _, x in own.found]
        needed = self._needed(operands + [x for _, x in own.stores])
        self.numbers = sorted({x.args[0] for x in needed if x.op == "number"})
        self.pointers: dict[str, Node] = {}
        self.once: list[str] = []
        self.lines: list[str] = []
        self.names: dict[Node, str] = {}
        self.leaves: list[Node] = []
        self.given: dict[str, None] = {}
        self.counter = iter(range(1 << 30))
        for node in needed:
            self._take(node)
        for i, _ in own.stores:
            self.pointers[f"p{i}"] = self.graph.inputs[i]
        self.returned: list[str] = []
        for node in own.reduced:
            truth = ops.REDUCE[node.op] in ("any", "all")
            self.returned.append(self._masked(how(node), next(node.operands()), truth=truth))
        self.returned += [self._masked("sum", x, truth=False) for _, x in own.found]
        for i, x in own.stores:
            self.returned.append(Triton.cast(self._name(x), x.dtype, self.graph.inputs[i].dtype))

    def _needed(self, goals: Sequence[Node]) -> list[Node]:
        """What values are made of, in order; what other launches reduce is not looked behind."""
        found: set[Node] = set()
        waiting = [*goals]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                if not crosses(self.graph, node):
                    waiting += node.operands()
        return sorted(found, key=lambda x: x.index)

    def _take(self, node: Node) -> None:
        """Write a value: once, or for each element."""
        name = self.names[node] = f"v{node.index}"
        scalar = not node.axes
        if node.op == "number":
            self.names[node] = f"n{node.args[0]}"
        elif node.op == "row":
            at = f"row + {self.source.constants + node.args[0]}"
            self.once.append(f"{name} = tl.load({at}).to(tl.float64, bitcast=True)")
        elif node.op == "inside":
            self.names[node] = "mask"
        elif node.op == "iota":
            self.leaves.append(node)
        elif node.op == "input" or crosses(self.graph, node):
            pointer = f"p{node.args[0]}" if node.op == "input" else f"q{node.index}"
            self.pointers[pointer] = node
            if scalar:
                self.once.append(f"{name} = {self._loaded(node, pointer, '')}")
            else:
                self.leaves.append(node)
        elif ops.kind(node.op) == "reduce" and next(node.operands()).axes != node.axes:
            self.lines.append(f"{name} = {self._within(node)}")
        else:
            lines = self.once if scalar else self.lines
            inner = (lambda x: self.names[x]) if scalar else self._name
            text = ops.expression(Triton(lines, self.counter), node, inner)
            lines.append(f"{name} = {text}")

    def _name(self, node: Node) -> str:
        """The name of a value in the function of a block, which gets passed what is the same for
        all elements."""
        if not node.axes:
            self.given[self.names[node]] = None
        return self.names[node]

    def _loaded(self, node: Node, address: str, mask: str) -> str:
        """An input, or what another launch has reduced, in float64, as a value."""
        text = f"tl.load({address}{mask})"
        if node.op == "input":
            return text
        gone = [i for i in next(node.operands()).axes if i not in node.axes]
        places = [self.source.sizes - 1] if self.graph.block else gone
        count = f"({' * '.join([f'n_{i}' for i in places])})"
        if ops.REDUCE[node.op] == "mean":
            text = f"({text} / {count}.to(tl.float64))"
        if ops.REDUCE[node.op] == "all":  # of no element it is true
            text = f"tl.where({count} == 0, 1.0, {text})"
        return Triton.cast(text, torch.float64, node.dtype)

    def _within(self, node: Node) -> str:
        """A sum, maximum or minimum within blocks."""
        x = next(node.operands())
        integer, text = not x.dtype.is_floating_point, self._name(x)
        if ops.REDUCE[node.op] not in ("sum", "max", "min"):
            raise Unsuitable(node.what, node.rule)
        for axis in [i for i in x.axes if i not in node.axes]:
            text = folded(how(node), text, axis, integer=integer)
        return f"{text}.to({type_of(node.dtype)})"

    def _masked(self, kind: str, x: Node, *, truth: bool) -> str:
        """What is put together, in float64; for elements that a tensor lacks, what changes
        nothing. truth: of a number, whether it is 0."""
        name = f"({self._name(x)} != 0)" if truth else self._name(x)
        return f"tl.where(mask, {name}.to(tl.float64), {identity(kind)})"

    def text(self, variant: KernelVariant, config: LaunchConfig) -> KernelText:
        """The kernel."""
        types = {"chunks": "*i64", "rows": "*i64", "grads": "*i64"}
        numbers: list[str] = []
        for i in self.numbers:
            if variant.sources[i] == "value":
                types[f"n{i}"] = "fp64"
            else:
                types[f"a{i}"] = "*fp64"
                numbers.append(f"n{i} = tl.load(a{i})")
        off = ""
        if variant.skips and self.own.stores:
            types["skip"] = "*fp32"
            off = " * (tl.load(skip) == 0).to(tl.int64)"
        space = self._space(config)
        lines = [
            "at = tl.load(chunks + tl.program_id(0).to(tl.int64))",
            "tensor = at >> 32",
            "chunk = at & 0xFFFFFFFF",
            f"row = rows + tensor * {self.source.width}",
            *[f"n_{i} = tl.load(row + {i})" for i in range(self.source.sizes)],
            *[self._pointer(name, aligned=variant.aligned) for name in self.pointers],
            *numbers,
            *self.once,
            *space.begin(off),
            *self._advanced(space),
            *[
                f"t{k} = tl.full({space.shape}, {identity(kind)}, tl.float64)"
                for k, (kind, _) in enumerate(self.outputs)
            ],
            *space.loops(lambda whole: self._block(space, whole=whole)),
            *self._left(space),
        ]
        inner = [*self.lines, f"return {', '.join(self.returned)}"]
        name = "step_kernel" if self.own.stores else "measure_kernel"
        parts = [
            HEAD,
            f"@triton.jit\ndef rule({', '.join(self._arguments())}):",
            *[*indented(inner), "\n"],
            f"@triton.jit\ndef {name}({', '.join(types)}):",
            *[*indented(lines), ""],
        ]
        return KernelText(name, "\n".join(parts), types, space.warps)

    def _space(self, config: LaunchConfig) -> Flat | Tiles:
        if self.own.kept:
            return Tiles(self.own.domain, self.own.kept)
        in_blocks = self.graph.block and self.own.domain
        return Blocks(self.graph, config) if in_blocks else Flat(self.own.domain, config)

    def _arguments(self) -> list[str]:
        """Those of the function of a block."""
        return [*[self.names[x] for x in self.leaves], *self.given, "mask"]

    def _pointer(self, name: str, *, aligned: bool) -> str:
        """The line that reads where a tensor is."""
        node = self.pointers[name]
        if node.op != "input":
            at = f"row + {self.source.places[node]}"
            return f"{name} = {pointer(at, 'tl.float64', aligned=False)}"
        i = node.args[0]
        at = "grads + tensor" if i == 0 else f"row + {self.source.sizes + i - 1}"
        return f"{name} = {pointer(at, type_of(node.dtype), aligned=aligned)}"

    def _advanced(self, space: Flat | Tiles) -> list[str]:
        """The lines by which pointers are those of a chunk."""
        pairs = [(name, space.ahead(x.axes)) for name, x in self.pointers.items()]
        return [f"{name} = {name} + {ahead}" for name, ahead in pairs if ahead is not None]

    def _block(self, space: Flat | Tiles, *, whole: bool) -> list[str]:
        """The lines of one block. whole: whether the tensor has all of it."""
        lines: list[str] = []
        named = {node: name for name, node in self.pointers.items()}
        for node in self.leaves:
            at, mask = space.at(node.axes), space.mask(node, whole=whole)
            if node.op == "iota":
                ahead = space.ahead(node.axes)
                at = at if ahead is None else f"{ahead} + {at}"
                text = f"({at}).to({type_of(node.dtype)})"
            else:
                text = self._loaded(
                    node, f"{named[node]} + {at}", f"{mask}, other=0" if mask else ""
                )
            lines.append(f"{self.names[node]} = {text}")
        names = [f"z{k}" for k in range(len(self.outputs))] + [f"y{i}" for i, _ in self.own.stores]
        lines.append(f"{', '.join(names)} = rule({', '.join(self._arguments())})")
        lines += [f"t{k} = {put(own[0], f't{k}', f'z{k}')}" for k, own in enumerate(self.outputs)]
        for i, _ in self.own.stores:
            node = self.graph.inputs[i]
            mask = space.mask(node, whole=whole)
            lines.append(f"tl.store(p{i} + {space.at(node.axes)}, y{i}{mask})")
        return lines

    def _left(self, space: Flat | Tiles) -> list[str]:
        """The lines that store what a program has put together."""
        offset, end = space.parts
        return [
            f"tl.store({pointer(f'row + {place}', 'tl.float64', aligned=False)} + {offset}, "
            f"{folded(kind, f't{k}', space.axis)}{end})"
            for k, (kind, place) in enumerate(self.outputs)
        ]
