"""Codecs that store slots in 16, 8 or 4 bits, block by block; `core/cells.py` has the codes.

Random numbers for rounding are a hash of the key of a step and of the index in the slot: C.
Wellons, "Prospecting for hash functions", https://nullprogram.com/blog/2018/07/31/.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core import modes, randomness, sharding
from functional_optim.core.cells import CELLS
from functional_optim.core.memory import has_address
from functional_optim.core.storage import SlotSpec

WORD = 24
"""Bits of a key, so that float32 holds it exactly."""


PIECE = 1 << 18
"""Elements that are packed at once in larger slots: a multiple of all blocks."""


class InBlocks(NamedTuple):
    """A slot in blocks of consecutive elements, the last one padded with zeros.

    Each process packs its shard of a DTensor. All have as many blocks as the largest shard needs,
    in a grid like that of the shards, so the shape determines the number of processes.

    place: the index of the slot in its rule, so that slots are rounded by different random numbers.
    """

    cells: Any
    block: int
    place: int = 0

    @property
    def fields(self) -> tuple[str, ...]:
        return self.cells.fields

    @property
    def text(self) -> str:
        """Its description, for tables."""
        return self.cells.kind if self.entrywise else f"{self.cells.kind} in blocks of {self.block}"

    @property
    def entrywise(self) -> bool:
        """Whether all stored tensors have the shape of the slot."""
        return self.cells.entrywise

    def encode(self, x: Tensor, key: Any = None) -> tuple[Tensor, ...]:
        if not sharding.is_sharded(x):
            return self._encode(x, self.blocks(x.numel()), key)
        found = self._encode(sharding.part(x), self.blocks(sharding.largest_part(x)), key)
        make = sharding.from_part if self.entrywise else sharding.in_grid
        return tuple([make(y, x) for y in found])

    def blocks(self, size: int) -> int:
        """The number of blocks for a number of elements."""
        return max(1, math.ceil(size / self.block))

    def _encode(self, x: Tensor, count: int, key: Any) -> tuple[Tensor, ...]:
        if x.device.type == "meta":
            return tuple(
                [
                    x.new_empty(x.shape if self.entrywise else (count, *rest), dtype=dtype)
                    for rest, dtype in _kept_of_a_block(self)
                ]
            )
        if key is None and count > 1 and count == self.blocks(x.numel()) and is_one_number(x):
            return self._encode_one_number(x, count)
        if x.numel() > PIECE and has_address(x) and not x.requires_grad and not modes.traced():
            return self._encode_pieces(x, count, key)
        if self.entrywise:
            return self.encode_block(x.to(torch.float32), _places(x, key), key)
        flat = x.to(torch.float32).reshape(-1)
        missing = count * self.block - x.numel()
        if missing:
            flat = torch.cat([flat, flat.new_zeros(missing)])
        flat = flat.reshape(count, self.block)
        return self.encode_block(flat, _places(flat, key), key)

    def _encode_one_number(self, x: Tensor, count: int) -> tuple[Tensor, ...]:
        """The same for one expanded number: from one block and the last one, which may be padded
        with zeros."""
        block = x.reshape(-1)[: self.block].to(torch.float32).contiguous()
        if self.entrywise:
            each = self.encode_block(block[:1], None, None)
            return tuple([y.expand(x.shape).contiguous() for y in each])
        last = block.clone()
        last[x.numel() - (count - 1) * self.block :] = 0
        found: list[Tensor] = []
        for y in self.encode_block(torch.stack([block, last]), None, None):
            whole = y.new_empty((count, *y.shape[1:]))
            whole[:-1], whole[-1] = y[0], y[1]
            found.append(whole)
        return tuple(found)

    def _encode_pieces(self, x: Tensor, count: int, key: Any) -> tuple[Tensor, ...]:
        """The same in pieces: temporaries of a large slot would be many times its size."""
        flat, size = x.reshape(-1), x.numel()
        shape = (size,) if self.entrywise else (count,)
        found = [x.new_empty((*shape, *rest), dtype=y) for rest, y in _kept_of_a_block(self)]
        for start in range(0, size, PIECE):
            part = flat[start : start + PIECE].to(torch.float32)
            at = start
            if not self.entrywise:
                at = start // self.block
                missing = -part.numel() % self.block
                part = torch.nn.functional.pad(part, (0, missing)).reshape(-1, self.block)
            places = _places(part, key)
            if places is not None:
                places = places + start
            for whole, new in zip(found, self.encode_block(part, places, key), strict=True):
                whole[at : at + len(new)] = new
        return tuple([y.reshape(x.shape) for y in found] if self.entrywise else found)

    def encode_block(self, x: Tensor, places: Any, key: Any) -> tuple[Tensor, ...]:
        """Encode blocks in the last dimension, or, without blocks, tensors of any shape.

        places: the indices of the elements in the slot, int32; None without a key.
        """
        noise = None if key is None else words(places, key, self.place)
        return self.cells.encode(x, noise)

    def decode(self, stored: tuple[Tensor, ...], spec: SlotSpec) -> Tensor:
        like = stored[0]
        if not sharding.is_sharded(like):
            return self._decode(stored, spec.shape, spec.dtype)
        shape = sharding.local_shape(spec.shape, like)
        local = self._decode(self.local(stored, shape), shape, spec.dtype)
        return sharding.from_part(local, like, spec.shape)

    def _decode(
        self, stored: tuple[Tensor, ...], shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        if self.entrywise:
            return self.cells.decode(stored).to(dtype)
        found, size = self.cells.decode(stored).reshape(-1), math.prod(shape)
        return (found if found.numel() == size else found[:size]).reshape(shape).to(dtype)

    def local(self, stored: tuple[Any, ...], shape: Sequence[int]) -> tuple[Tensor, ...]:
        """The local part of a packed DTensor, like that of a plain tensor of the local shape.

        It shares the memory of the DTensor.
        """
        mine = map(sharding.shard, stored)
        if self.entrywise:
            return tuple(mine)
        count = self.blocks(math.prod(shape))
        return tuple([x.view(x.shape[len(shape) :])[:count] for x in mine])


def is_one_number(x: Tensor) -> bool:
    """Whether a plain tensor is one number in memory, expanded to several."""
    if not (has_address(x) and x.numel() > 1) or modes.traced():
        return False
    return not any(stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1)


def _places(x: Tensor, key: Any) -> Tensor | None:
    """The indices of the elements of a tensor, if there is a key."""
    if key is None:
        return None
    return torch.arange(x.numel(), dtype=torch.int32, device=x.device).reshape(x.shape)


@functools.cache
def _kept_of_a_block(codec: InBlocks) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The shape and dtype of each stored tensor of a block.

    Computed with data: on the meta device each operation would take a millisecond.
    """
    found = codec.encode_block(
        torch.zeros(1, codec.block, dtype=torch.float32, device="cpu"), None, None
    )
    return [(() if codec.entrywise else x.shape[1:], x.dtype) for x in found]


def words(place: Tensor, key: Any, slot: int) -> Tensor:
    """Random int32 for int32 indices and a slot of a rule; their high bits are the best.

    Two slots share a hash: one uses the high bits, the other the low ones. key: an integer < 2²⁴.
    """
    if isinstance(key, Tensor):
        own = key.to(torch.int32)
    else:
        own = torch.full((), int(key), dtype=torch.int32, device=place.device)
    apart = slot // 2 * 0x9E3779B1 & 0xFFFFFFFF  # as an int32
    h = (place ^ (own ^ (apart - (apart >> 31 << 32)))) * 0x2C1B3C6D
    h = (h ^ (h >> 13)) * 0x297A2D39
    return (h << 16) ^ h if slot % 2 else h


def rounding_key(seed: int, t: Any) -> Any:
    """The key of a step: an integer below 2²⁴, as a float, or as a float64 tensor if t is one."""
    if isinstance(t, Tensor):
        own = torch.full((), seed, dtype=torch.int64, device=t.device)
        return (randomness.derived(own, t.to(torch.int64)) & ((1 << WORD) - 1)).to(torch.float64)
    return float(randomness.derived_number(seed, int(t)) & ((1 << WORD) - 1))


def in_blocks(kind: str, shape: Sequence[int]) -> InBlocks:
    """The codec of a slot that is stored under the name of a kind. shape: of its codes."""
    cells: Any = CELLS[kind]
    whole = InBlocks(cells, 256)
    if whole.entrywise:
        return whole
    return InBlocks(cells, shape[-1] * (2 if getattr(cells, "bits", 8) == 4 else 1))
