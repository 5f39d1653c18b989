"""Packed slots in a Triton kernel: blocks of codes become floats before the rule, codes after it.

The Triton is written from the codec's own functions, as it is from a rule's: on some blocks of
codes at once, a row each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.kernels.building import Unsuitable
from functional_optim.kernels.tracing import PackedSlot, record
from functional_optim.kernels.triton_graph import GraphWriter, dtype_of
from functional_optim.kernels.triton_ops import TYPES

ROWS = 2
"""Blocks of the tensors with which a codec is traced."""

aten = torch.ops.aten


class PackedText(NamedTuple):
    """How a kernel reads and writes a packed slot.

    at: the index of the slot among the tensors of a leaf. block: of the codec. types: the Triton
    type of each tensor that it is stored in. widths: how many entries a block has in each; None for
    one number. entrywise: whether all have the shape of the slot. key: where the key of the step is
    among the numbers. unpack, pack: the lines of functions, and what these return.
    """

    at: int
    block: int
    types: list[str]
    widths: list[int | None]
    entrywise: bool
    key: int | None
    unpack: list[str]
    pack: list[str]

    @property
    def parts(self) -> range:
        """The indices of the tensors that it is stored in."""
        return range(len(self.types))

    def size(self, j: int) -> int:
        """The entries of a block in one of these tensors."""
        return self.widths[j] or 1

    def functions(self) -> str:
        """Triton that unpacks and packs blocks."""
        stored = ", ".join([f"x{j}" for j in self.parts])
        given = "x0" if self.key is None else "x0, x1, n0"
        heads = {f"unpack{self.at}({stored})": self.unpack, f"pack{self.at}({given})": self.pack}
        return "".join(
            [
                "\n\n@triton.jit\n" + "\n    ".join([f"def {head}:", *lines]) + "\n"
                for head, lines in heads.items()
            ]
        )

    def load(self, block: int, *, whole: bool) -> list[str]:
        """The lines that set x to the floats of one block of a kernel.

        block: its entries. whole: whether the tensor has all of them.
        """
        lines: list[str] = []
        for j in self.parts:
            place, mask = self._place(j, block, whole=whole)
            mask = f"{mask}, other=0" if mask else ""
            lines.append(f"c{self.at}_{j} = tl.load({place}{mask})")
            if not self.entrywise:
                lines[-1] += f".reshape({self._shape(j, block)})"
        stored = ", ".join([f"c{self.at}_{j}" for j in self.parts])
        call = f"unpack{self.at}({stored})"
        return [*lines, f"x{self.at} = {call if self.entrywise else f'{call}.reshape([{block}])'}"]

    def store(self, block: int, *, whole: bool) -> list[str]:
        """The lines that store y, as they are for `load`."""
        own, shape = f"y{self.at}", f"[{block // self.block}, {self.block}]"
        lines = [f"{own} = tl.broadcast_to({own}, [{block}])"]
        if not whole:  # what a last block is filled up with
            lines.append(f"{own} = tl.where(mask, {own}, 0.0)")
        given = [own]
        if self.key is not None:
            given.append(f"(start + k * {block}).to(tl.int32) + offsets")
        if not self.entrywise:
            given = [f"tl.reshape({x}, {shape})" for x in given]
        if self.key is not None:
            given.append(f"n{self.key}")
        codes = ", ".join([f"c{self.at}_{j}" for j in self.parts])
        lines.append(f"{codes} = pack{self.at}({', '.join(given)})")
        for j in self.parts:
            place, mask = self._place(j, block, whole=whole)
            code = f"c{self.at}_{j}"
            if not self.entrywise:
                code = f"tl.reshape({code}, [{self._entries(j, block)}])"
            lines.append(f"tl.store({place}, {code}{mask})")
        return lines

    def _entries(self, j: int, block: int) -> int:
        return block // self.block * self.size(j)

    def _shape(self, j: int, block: int) -> list[int]:
        width, rows = self.widths[j], block // self.block
        return [rows] if width is None else [rows, width]

    def _place(self, j: int, block: int, *, whole: bool) -> tuple[str, str]:
        """Pointers to the entries of one tensor, and a mask if not all are there."""
        entries = self._entries(j, block)
        place = f"p{self.at}_{j} + (k * {entries} + tl.arange(0, {entries}))"
        if whole:
            return place, ""
        if self.entrywise:
            return place, ", mask=mask"
        there = f"tl.cdiv(left - blocks * {block}, {self.block})"
        return place, f", mask=tl.arange(0, {entries}) < {there} * {self.size(j)}"


def packed_text(slot: PackedSlot, dtype: torch.dtype) -> PackedText:
    """How kernels read and write a slot. dtype: of a step's numbers.

    Raises:
        Unsuitable: if its codec does what no line of Triton is known for.
    """
    codec, cpu = slot.codec, torch.device("cpu")
    kept = codec.encode_block(torch.zeros(ROWS, codec.block, device=cpu), None, None)

    def decode(tensors: list[Tensor], numbers: Tensor) -> tuple[Tensor, ...]:
        return (codec.cells.decode(tuple(tensors)),)

    def encode(tensors: list[Tensor], numbers: Tensor) -> tuple[Tensor, ...]:
        if slot.key is None:
            return codec.encode_block(tensors[0], None, None)
        return codec.encode_block(*tensors, numbers.unbind()[0])

    whole = (ROWS, codec.block)
    given = [(whole, torch.float32), *[(whole, torch.int32)] * (slot.key is not None)]
    return PackedText(
        at=slot.at,
        block=codec.block,
        types=[TYPES[x.dtype] for x in kept],
        widths=[x.shape[1] if x.dim() == 2 else None for x in kept],
        entrywise=codec.entrywise,
        key=slot.key,
        unpack=_lines(decode, [(tuple(x.shape), x.dtype) for x in kept], dtype),
        pack=_lines(encode, given, dtype),
    )


def _lines(
    function: Callable[[list[Tensor], Tensor], tuple[Tensor, ...]],
    given: Sequence[tuple[tuple[int, ...], torch.dtype]],
    dtype: torch.dtype,
) -> list[str]:
    """The lines of a function of tensors of these shapes, and one number."""

    def made(sizes: list[Any]) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype) for shape, dtype in given]

    def flat(sizes: list[Any], tensors: list[Tensor], numbers: Tensor) -> tuple[Tensor, ...]:
        return function(tensors, numbers)

    traced = record(flat, (), made, (1, dtype), torch.device("cpu"))
    writer = _CodecWriter(traced, [dtype for _, dtype in given])
    writer.write()
    return [*writer.lines, f"return {', '.join([writer.names[x] for x in writer.returned])}"]


class _CodecWriter(GraphWriter):
    """The lines of a function of blocks: what else than entry by entry is done, is done by rows."""

    def take(self, node: Any) -> None:
        """Write what a node does."""
        target, x = node.target, node.args[0]
        if target is aten.amax.default and node.args[1:] == ([-1], True):
            self._add(node, f"tl.max({self._operand(x, dtype_of(x))}, axis=1, keep_dims=True)")
        elif target is aten.squeeze.dim and node.args[1] == -1:
            self._add(node, f"tl.reshape({self.names[x]}, [{self.names[x]}.shape[0]])")
        elif target is aten.unsqueeze.default and node.args[1] == -1:
            self._add(node, f"tl.expand_dims({self.names[x]}, 1)")
        elif target is aten.slice.Tensor:
            self._add(node, f"{_halves(self.names[x])}[{_half(node)}]")
        elif target is aten.cat.default and len(x) == 2 and node.args[1] == -1:
            self._add(node, _beside(*[self.names[own] for own in x]))
        else:
            super().take(node)


def _half(node: Any) -> int:
    """Which half of its rows a slice of a tensor is."""
    x, dim, start, _ = node.args
    half = x.meta["val"].shape[-1] // 2
    if dim not in (1, -1) or node.meta["val"].shape[-1] != half or start not in (0, half):
        raise Unsuitable("a codec with a slice that is no half of a block")
    return start // half


def _halves(x: str) -> str:
    """Both halves of the rows of x."""
    shape = f"[{x}.shape[0], 2, {x}.shape[1] // 2]"
    return f"tl.split(tl.permute(tl.reshape({x}, {shape}), [0, 2, 1]))"


def _beside(a: str, b: str) -> str:
    """The rows of a, and those of b behind them."""
    shape = f"[{a}.shape[0], 2 * {a}.shape[1]]"
    return f"tl.reshape(tl.permute(tl.join({a}, {b}), [0, 2, 1]), {shape})"
