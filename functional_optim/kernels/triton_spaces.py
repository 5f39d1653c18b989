"""How the programs of a Triton kernel go over the elements of tensors: the loops, the places of
elements and their masks. `print_triton` writes what is done inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from functional_optim.kernels.graph import Graph
from functional_optim.kernels.node import Node
from functional_optim.kernels.triton_primitives import indented


class LaunchConfig(NamedTuple):
    """How a chunk of elements is divided.

    block: the elements that the threads of a program take at once. warps: 32 threads each.
    """

    block: int
    warps: int


CONFIGS = (LaunchConfig(1024, 8), LaunchConfig(1024, 4), LaunchConfig(2048, 8))
"""What is timed on a device; the first where nothing can be timed. A thread has 4 elements, or 8:
it then reads 16 bytes of a tensor in 2 bytes at once, too, but needs more registers."""

CHUNK = 1 << 13
"""Elements of a program."""


class Tile(NamedTuple):
    """How a reduction that keeps some axes is divided.

    kept, gone: the elements of both kinds that the threads of a program take at once. repeat: how
    often. rows: whether the last axis is reduced, so that neighbouring elements are put together.
    """

    kept: int
    gone: int
    repeat: int
    rows: bool

    @property
    def chunk(self) -> int:
        """The elements that a program reduces to one."""
        return self.gone * self.repeat


ROWS, COLUMNS = Tile(16, 64, 32, rows=True), Tile(64, 16, 32, rows=False)
TILE_WARPS = 8


class Flat:
    """A chunk of consecutive elements: whole blocks, and a masked rest.

    shape: of a block. axis: over which it is reduced; None for all of it. parts: where a program's
    part of a reduction is written, and the end of the call that does.
    """

    axis: int | None = None
    parts = ("chunk", "")

    def __init__(self, domain: tuple[int, ...], config: LaunchConfig) -> None:
        self.domain = domain
        self.block = config.block
        self.warps = config.warps
        self.chunk = CHUNK
        self.shape = [config.block]
        self.size = _size(domain)

    def begin(self, off: str) -> list[str]:
        """What is done before the loops. off: a factor of how many elements are left."""
        return [
            f"start = chunk * {self.chunk}",
            *self._ranges(),
            f"left = tl.minimum({self.size} - start, {self.chunk}){off}",
            f"blocks = left // {self.block}",
        ]

    def _ranges(self) -> list[str]:
        return [f"offsets = tl.arange(0, {self.block})"]

    def ahead(self, axes: tuple[int, ...]) -> str | None:
        """How many elements of a tensor with some axes are before its chunk; None for one that
        the chunk does not go along."""
        return "start" if axes == self.domain else None

    def loops(self, block: Callable[[bool], list[str]]) -> list[str]:
        """The loops. block: the lines of the k-th block; True: of one that a tensor has all of."""
        return [
            "for k in range(blocks):",
            *indented([*self._places(), f"mask = tl.full({self.shape}, 1, tl.int1)", *block(True)]),
            f"if left > blocks * {self.block}:",
            *indented(["k = blocks", *self._places(), *self._masks(), *block(False)]),
        ]

    def _places(self) -> list[str]:
        return _decoded(self.domain, f"start + k * {self.block}", "offsets")

    def _masks(self) -> list[str]:
        return [f"mask = offsets < left - k * {self.block}"]

    def at(self, axes: tuple[int, ...]) -> str:
        """The places of the elements of a block, after those that are `ahead`."""
        return f"(k * {self.block} + offsets)" if axes == self.domain else _index(axes)

    def mask(self, node: Node, *, whole: bool) -> str:
        """Which elements of a block a tensor has, as an argument of a call; "" for all."""
        return "" if whole else ", mask=mask"


class Blocks(Flat):
    """The same of tensors in blocks, whose axes a program's tensors have, too."""

    def __init__(self, graph: Graph, config: LaunchConfig) -> None:
        super().__init__(tuple(range(len(graph.sizes))), config)
        self.inner = [-size for size in graph.sizes[1:]]
        self.width = graph.block
        self.chunk = max(CHUNK, graph.block)
        self.shape = [config.block // graph.block, *self.inner]
        self.size = f"n_{len(graph.sizes)}"

    def _ranges(self) -> list[str]:
        names = ["r", *[f"i{k + 1}" for k in range(len(self.inner))]]
        return [
            f"{name} = tl.arange(0, {size})[{_spread(k, len(self.shape))}]"
            for k, (name, size) in enumerate(zip(names, self.shape, strict=True))
        ]

    def ahead(self, axes: tuple[int, ...]) -> str | None:
        """In whole blocks, of which a tensor may have fewer elements than the parameter."""
        if 0 not in axes:
            return None
        each = math.prod([self.inner[i - 1] for i in axes if i])
        return "start" if each == self.width else f"start // {self.width} * {each}"

    def _places(self) -> list[str]:
        return [f"i0 = k * {self.shape[0]} + r"]

    def _masks(self) -> list[str]:
        there = f"there = i0 < tl.cdiv(left, {self.width})"
        return [there, f"mask = {self.at(self.domain)} < left"]

    def at(self, axes: tuple[int, ...]) -> str:
        text = f"i{axes[0]}"
        for axis in axes[1:]:
            text = f"({text} * {self.inner[axis - 1]} + i{axis})"
        return text

    def mask(self, node: Node, *, whole: bool) -> str:
        """Those of the tensor; of codes and what belongs to them, whole blocks."""
        flat = node.axes == self.domain and len(node.dims) == 1
        return "" if whole else f", mask={'mask' if flat else 'there'}"


class Tiles:
    """Some of the elements that are kept, and of those that are not a part, tile by tile."""

    warps = TILE_WARPS

    def __init__(self, domain: tuple[int, ...], kept: tuple[int, ...]) -> None:
        self.tile = tile = tile_of(domain, kept)
        self.kept = kept
        self.gone = tuple([i for i in domain if i not in kept])
        self.shape = [tile.kept, tile.gone] if tile.rows else [tile.gone, tile.kept]
        self.axis = int(tile.rows)
        self.parts = ("part.to(tl.int64) * kept + j", ", mask=there")

    def begin(self, off: str) -> list[str]:
        tile, spread = self.tile, _spread(1 - self.axis, 2)
        return [
            f"kept = ({_size(self.kept)}).to(tl.int32)",
            f"gone = ({_size(self.gone)}).to(tl.int32)",
            f"across = (kept + {tile.kept - 1}) // {tile.kept}",
            "part = chunk.to(tl.int32) // across",
            f"j = chunk.to(tl.int32) % across * {tile.kept}",
            f"j = (j + tl.arange(0, {tile.kept}))[{spread}]",
            "there = j < kept",
            *_decoded(self.kept, "0", "j"),
            f"left = tl.minimum(gone - part * {tile.chunk}, {tile.chunk})",
        ]

    def ahead(self, axes: tuple[int, ...]) -> str | None:
        return None

    def loops(self, block: Callable[[bool], list[str]]) -> list[str]:
        tile, spread = self.tile, _spread(self.axis, 2)
        first = f"part * {tile.chunk} + k * {tile.gone}"
        lines = [
            f"g = ({first} + tl.arange(0, {tile.gone}))[{spread}]",
            "also = g < gone",
            "mask = there & also",
            *_decoded(self.gone, "0", "g"),
            *block(False),
        ]
        return [f"for k in range((left + {tile.gone - 1}) // {tile.gone}):", *indented(lines)]

    def at(self, axes: tuple[int, ...]) -> str:
        return _index(axes)

    def mask(self, node: Node, *, whole: bool) -> str:
        some = [
            x for x, own in (("there", self.kept), ("also", self.gone)) if {*own} & {*node.axes}
        ]
        return f", mask={' & '.join(some)}"


def tile_of(domain: tuple[int, ...], kept: tuple[int, ...]) -> Tile:
    """How reductions are divided that keep some axes."""
    return COLUMNS if domain[-1] in kept else ROWS


def _size(axes: Sequence[int]) -> str:
    return " * ".join([f"n_{i}" for i in axes]) or "1"


def _spread(axis: int, count: int) -> str:
    """An index by which a range becomes a tensor with this axis alone."""
    return ", ".join([":" if i == axis else "None" for i in range(count)])


def _decoded(axes: tuple[int, ...], first: str, offsets: str) -> list[str]:
    """The place of each element on each axis. first: where a block begins, in 64 bits; offsets:
    those in it, in 32."""
    if len(axes) < 2:
        return [f"i{i} = {offsets} + {first}" for i in axes]
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
