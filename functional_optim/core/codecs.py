"""Codecs that store slots in 16, 8 or 4 bits, block by block.

Codes of 8 and 4 bits are the first bits of a float32: with z = 1 + |x| / scale, the exponent of z
and the first bits of its mantissa. So the steps between two codes double with each octave of z, as
in the telephone's A-law (ITU-T G.711), and a code is made by one addition and one shift.

Rounding is stochastic where a key is given: a random number is added before the bits are cut off,
so that what is small against a step is kept in the mean. It would be lost otherwise: an average
with β = 0.999 changes by a thousandth in a step. Below the first code it goes to the nearest one: a
small momentum that became a larger one by chance would be a large step. Random numbers are a hash
of the key and of the place in the slot: C. Wellons, "Prospecting for hash functions",
https://nullprogram.com/blog/2018/07/31/.

A number that is not finite becomes NaN, alone: the others of its block are stored as without it.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from functional_optim.core import randomness
from functional_optim.core.storage import SlotSpec

WORD = 24
"""Bits of a random number; of a key as many, so that float32 holds it exactly."""

ONE, INFINITE, SIZE = 127 << 23, 255 << 23, (1 << 31) - 1
"""The float32 1.0 and infinity as integers, and the bits without the sign."""

SMALLEST = 27 << 23
"""The least that a block's largest number counts for, 2⁻¹⁰⁰: below, quotients would underflow."""


class Cells(Protocol):
    """How the numbers of a block become codes. All tensors may have more dimensions in front."""

    @property
    def kind(self) -> str:
        """What `stored` calls it."""
        ...

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of what is stored; "" for what has the shape of the slot."""
        ...

    def encode(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
        """The stored tensors of blocks. x: float32, (…, block). noise: `words` beside it."""
        ...

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        """Blocks of float32."""
        ...


class InBlocks(NamedTuple):
    """A slot in blocks of consecutive entries, the last one filled up with zeros.

    place: of the slot in its rule, so that no two are rounded by the same random numbers.
    """

    cells: Any
    block: int
    place: int = 0

    @property
    def fields(self) -> tuple[str, ...]:
        return self.cells.fields

    @property
    def text(self) -> str:
        """What it is in words, for tables."""
        return self.cells.kind if self.entrywise else f"{self.cells.kind} in blocks of {self.block}"

    @property
    def entrywise(self) -> bool:
        """Whether it stores one tensor in the shape of the slot."""
        return self.fields == ("",)

    def encode(self, x: Tensor, key: Any = None) -> tuple[Tensor, ...]:
        count = max(1, math.ceil(x.numel() / self.block))
        if x.device.type == "meta":
            return tuple(
                [
                    x.new_empty(x.shape if self.entrywise else (count, *rest), dtype=dtype)
                    for rest, dtype in _kept_of_a_block(self)
                ]
            )
        flat = x.to(torch.float32).reshape(-1)
        missing = count * self.block - x.numel()
        if missing:
            flat = torch.cat([flat, flat.new_zeros(missing)])
        found = self.encode_block(flat.reshape(count, self.block), 0, key)
        if self.entrywise:
            return (found[0].reshape(-1)[: x.numel()].reshape(x.shape),)
        return found

    def encode_block(self, x: Tensor, start: Any, key: Any) -> tuple[Tensor, ...]:
        """Blocks in a last dimension, one after the other. start: the place of the first entry."""
        noise = None
        if key is not None:
            at = start + torch.arange(x.numel(), dtype=torch.int32, device=x.device)
            noise = words(at.reshape(x.shape), key, self.place)
        return self.cells.encode(x, noise)

    def decode(self, stored: tuple[Tensor, ...], spec: SlotSpec) -> Tensor:
        found = self.cells.decode(stored).reshape(-1)
        return found[: math.prod(spec.shape)].reshape(spec.shape).to(spec.dtype)


@functools.cache
def _kept_of_a_block(codec: InBlocks) -> list[tuple[torch.Size, torch.dtype]]:
    """The shape and dtype of each tensor that a block becomes.

    By a block with data: without, each operation would take a millisecond.
    """
    found = codec.encode_block(torch.zeros(1, codec.block, device="cpu"), 0, None)
    return [(x.shape[1:], x.dtype) for x in found]


def words(place: Tensor, key: Any, salt: int) -> Tensor:
    """Random int32 in [0, 2²⁴) for int32 places. key: a whole number below 2²⁴."""
    if isinstance(key, Tensor):
        own = key.to(torch.int32)
    else:
        own = torch.full((), int(key), dtype=torch.int32, device=place.device)
    h = place ^ (own ^ (salt << WORD))
    h = (h ^ _shifted(h, 16)) * 0x7FEB352D
    h = (h ^ _shifted(h, 15)) * (0x846CA68B - (1 << 32))
    return _shifted(h ^ _shifted(h, 16), 32 - WORD)


def _shifted(x: Tensor, n: int) -> Tensor:
    """int32 shifted to the right by n bits, zeros coming in."""
    return (x >> n) & ((1 << (32 - n)) - 1)


def rounding_key(seed: int, t: Any) -> Any:
    """The key of a step: a whole number below 2²⁴, as a float, or a float64 tensor where t is."""
    if isinstance(t, Tensor):
        own = torch.full((), seed, dtype=torch.int64, device=t.device)
        return (randomness.derived(own, t.to(torch.int64)) & ((1 << WORD) - 1)).to(torch.float64)
    return float(randomness.derived_number(seed, int(t)) & ((1 << WORD) - 1))


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _below(x: Tensor, least: int) -> Tensor:
    """All bits set where an int32 is below a number, else none: a choice without a branch."""
    return (x - least) >> 31


def _finite(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where numbers are finite, as bits; the sizes of these as integers; a block's largest.

    Integers of sizes compare as the sizes do, and compilers find the largest with vector units.
    """
    size = _bits(x) & SIZE
    finite = _below(size, INFINITE)
    size = size & finite
    largest = size.amax(-1, keepdim=True).clamp(min=SMALLEST).view(torch.float32)
    return finite, size, largest


def _cut(x: Tensor, kept: int, noise: Tensor | None, least: int) -> Tensor:
    """A positive float32 as an integer, rounded to some bits of its mantissa.

    least: below this integer it goes to the nearest, noise or not.
    """
    shift = 23 - kept
    bits, add = _bits(x), 1 << (shift - 1)
    if noise is not None:
        low = _below(bits, least)
        add = (noise >> (WORD - shift)) & ~low | low & add
    return (bits + add) >> shift


class Companded(NamedTuple):
    """Codes of 8 or 4 bits, and a scale for each block.

    bits: 8 or 4. signed: False for what is never negative, such as second moments: what is above 0
    is never stored as 0 then. steps: 2**steps codes an octave.
    """

    bits: int = 8
    signed: bool = True
    steps: int = 4

    @property
    def kind(self) -> str:
        return f"int{self.bits}"

    @property
    def fields(self) -> tuple[str, ...]:
        return ("codes", "scale")

    @property
    def last(self) -> int:
        """The code of a block's largest number."""
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 2

    @property
    def nan(self) -> int:
        """The code of NaN; of signed codes that of -0."""
        return self.last + 1

    @property
    def top(self) -> float:
        """|x| / scale of a block's largest number."""
        whole, part = divmod(self.last, 1 << self.steps)
        return 2.0**whole * (1 + part / (1 << self.steps)) - 1

    def encode(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
        finite, size, largest = _finite(x)
        scale = largest / self.top
        first = ONE >> (23 - self.steps)
        z = 1 + size.view(torch.float32) / scale
        code = _cut(z, self.steps, noise, (first + 1) << (23 - self.steps)) - first
        code = code.clamp(max=self.last)
        if self.signed:
            code = code + (_below(-code, 0) & (_bits(x) >> 31) & (self.last + 1))
        else:
            code = torch.maximum(code, _below(-size, 0) & 1)
        code = code & finite | self.nan & ~finite
        if self.bits == 4:
            half = code.shape[-1] // 2
            code = code[..., :half] | code[..., half:] << 4
        return code.to(torch.uint8), scale.squeeze(-1)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        codes, scale = stored
        code = codes.to(torch.int32)
        if self.bits == 4:
            return torch.cat([self._opened(x, scale) for x in (code & 15, code >> 4)], -1)
        return self._opened(code, scale)

    def _opened(self, code: Tensor, scale: Tensor) -> Tensor:
        """The numbers of codes, in int32."""
        known = code
        if self.signed:
            known = torch.where(code > self.last, code - (self.last + 1), code)
        z = ((known + (ONE >> (23 - self.steps))) << (23 - self.steps)).view(torch.float32)
        size = (z - 1) * scale.unsqueeze(-1)
        if self.signed:
            size = torch.where(code > self.last, -size, size)
        return torch.where(code == self.nan, math.nan, size)


class Float8(NamedTuple):
    """torch's 8-bit floats, and a scale for each block."""

    dtype: torch.dtype = torch.float8_e4m3fn
    signed: bool = True

    @property
    def kind(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def fields(self) -> tuple[str, ...]:
        return ("codes", "scale")

    def encode(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
        info = torch.finfo(self.dtype)
        finite, size, largest = _finite(x)
        scale = largest / info.max
        kept = 3 if self.dtype is torch.float8_e4m3fn else 2
        size = (size.view(torch.float32) / scale).clamp(max=info.max)
        if noise is not None:
            cut = _cut(size, kept, noise, 0) << (23 - kept)
            cut = cut.view(torch.float32).clamp(max=info.max)
            size = torch.where(size < info.smallest_normal, size, cut)
        if self.signed:
            size = torch.where(x < 0, -size, size)
        else:  # half of the smallest number would be rounded to 0
            least = info.smallest_normal * 2.0**-kept
            size = torch.where(x > 0, size.clamp(min=least), size)
        size = torch.where(finite < 0, size, math.nan)
        return size.to(self.dtype), scale.squeeze(-1)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        codes, scale = stored
        return codes.to(torch.float32) * scale.unsqueeze(-1)


class Bfloat16(NamedTuple):
    """bfloat16, with no scale: the first 16 bits of a float32."""

    @property
    def kind(self) -> str:
        return "bfloat16"

    @property
    def fields(self) -> tuple[str, ...]:
        return ("",)

    def encode(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
        if noise is None:
            return (x.to(torch.bfloat16),)
        kept = (_bits(x) + (noise >> (WORD - 16))) & -(1 << 16)
        cut = torch.where(x.abs() < torch.finfo(torch.bfloat16).max, kept, _bits(x))
        return (cut.view(torch.float32).to(torch.bfloat16),)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        return stored[0].to(torch.float32)
