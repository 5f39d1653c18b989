"""Cells: encoding of the elements of a block in 16, 8 or 4 bits.

Codes of 8 and 4 bits are the first bits of a float32: with z = 1 + |x| / scale, the exponent of z
and the first bits of its mantissa. So the steps between two codes double with each octave of z, as
in the telephone's A-law (ITU-T G.711), and encoding takes one addition and one shift.

Rounding is stochastic if random numbers are passed: they are added before truncation, so that
changes smaller than a step are preserved in expectation. Otherwise they would be lost: an average
with β = 0.999 changes by a thousandth in a step. Below the first code it rounds to nearest: a small
momentum that was randomly rounded to a larger one would be a large step.

An element that is not finite becomes NaN; it does not affect the others of its block.

Each class of cells has

* `kind`: its name in `stored`, or `master_weights`;
* `fields`: the names of the stored tensors. The first one of a slot is the kind, which determines
  the decoding; "" for the tensor with the name of the slot;
* `entrywise`: whether all stored tensors have the shape of the slot;
* `encode(x, noise)`: the stored tensors of blocks. x: float32, (…, block). noise: random int32 of
  the same shape, or None;
* `decode(stored)`: blocks of float32.

All tensors may have more leading dimensions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

ONE, INFINITE, SIZE = 127 << 23, 255 << 23, (1 << 31) - 1
"""The float32 1.0 and infinity as integers, and the bits without the sign."""

NAN = INFINITE | 1 << 22
"""The float32 NaN as an integer."""

LARGEST_BFLOAT16 = 0x7F7F << 16
"""bfloat16's largest number as the integer of a float32."""

OVER = 1 << 23
"""The offset that makes an int32 negative if it is not finite as a float32."""

SMALLEST = 27 << 23
"""The smallest scale of a block, 2⁻¹⁰⁰: below, quotients would underflow."""


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def _first_half(bits: Tensor) -> Tensor:
    """The bfloat16 of the first 16 bits of a float32."""
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def _widened(x: Tensor) -> Tensor:
    """A bfloat16 as float32, by its bits: torch 2.11's compiler drops a cast there and back."""
    return (x.view(torch.int16).to(torch.int32) << 16).view(torch.float32)


def _scale(sizes: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """The divisor that makes magnitudes of a block smaller than a number, and its inverse.

    Integers of sizes compare as the sizes do, and compilers find the largest with vector units.
    Elements that are not finite are ignored: they are negative after the last exponent overflows.
    """
    least = SMALLEST + OVER
    largest = (sizes + OVER).amax(-1, keepdim=True).clamp(min=least) - OVER
    size, most = largest.view(torch.float32), most * (1 - 2.0**-20)
    return (size / most).squeeze(-1), most / size  # in parallel, as divisions are slow


def _cut(x: Tensor, kept: int, first: int, noise: Tensor | None, least: int) -> Tensor:
    """A positive float32 as an integer, rounded to some bits of its mantissa, less the first code.

    Random bits are integers around zero, added to the half that rounds to nearest. least: below
    this integer a number is rounded to nearest even with noise.
    """
    shift = 23 - kept
    bits = _bits(x)
    code = bits + ((1 << (shift - 1)) - (first << shift))
    if noise is not None:
        code = code + (noise >> (32 - shift)).masked_fill(bits < least, 0)
    return code >> shift


class Companded(NamedTuple):
    """Codes of 8 or 4 bits, and a scale for each block.

    bits: 8 or 4. signed: False for elements that are never negative, such as second moments;
    positive ones are then never stored as 0. steps: 2**steps codes per octave.
    """

    bits: int = 8
    signed: bool = True
    steps: int = 4
    entrywise = False

    @property
    def kind(self) -> str:
        return f"int{self.bits}"

    @property
    def fields(self) -> tuple[str, ...]:
        return (f"{'int' if self.signed else 'uint'}{self.bits}", "scale")

    @property
    def last(self) -> int:
        """The code of a block's largest number."""
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 2

    @property
    def nan(self) -> int:
        """The code of NaN; of signed codes, -last - 1 as well."""
        return self.last + 1

    @property
    def top(self) -> float:
        """The largest |x| / scale that has a code."""
        whole, part = divmod(self.last, 1 << self.steps)
        return 2.0**whole * (1 + part / (1 << self.steps)) - 1

    def encode(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
        bits = _bits(x)
        size = bits & SIZE
        scale, inverse = _scale(size, self.top)
        one = torch.full((), 1.0, dtype=torch.float32, device=x.device)
        z = torch.addcmul(one, size.view(torch.float32), inverse)
        first = ONE >> (23 - self.steps)
        code = _cut(z, self.steps, first, noise, (first + 1) << (23 - self.steps))
        code = code.clamp(max=self.nan)
        if self.signed:
            code = torch.where(bits < 0, -code, code)
        else:
            code = torch.maximum(code, size.clamp(max=1))
        if self.bits == 4:
            halves = code.unflatten(-1, (2, code.shape[-1] // 2)) & 15
            code = torch.where(_is_first(code), halves, halves << 4).sum(-2, dtype=torch.int32)
        return code.to(torch.int8 if self.signed else torch.uint8), scale

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        codes, scale = stored
        code = codes.to(torch.int32)
        if self.bits == 4:
            pairs = code.unsqueeze(-2)
            halves = torch.where(_is_first(code), pairs & 15, (pairs >> 4) & 15)
            code = ((halves ^ 8) - 8 if self.signed else halves).flatten(-2)
        size = code.abs() if self.signed else code
        z = (size + (ONE >> (23 - self.steps))) << (23 - self.steps)
        scale = scale.unsqueeze(-1)
        found = torch.addcmul(-scale, z.view(torch.float32), scale)
        if self.signed:
            found = (_bits(found) | code & ~SIZE).view(torch.float32)
        return torch.where(size == self.nan, math.nan, found)


def _is_first(code: Tensor) -> Tensor:
    """Which of the two halves of a block is in the low bits of its bytes."""
    return torch.arange(2, dtype=torch.int32, device=code.device).unsqueeze(-1) == 0


NUMBERS = {3: 126, 2: 123}
"""The last code of a number of torch's 8-bit floats, by the bits of their mantissas."""


class Float8(NamedTuple):
    """torch's 8-bit floats, and a scale for each block."""

    dtype: torch.dtype = torch.float8_e4m3fn
    signed: bool = True
    entrywise = False

    @property
    def kind(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def fields(self) -> tuple[str, ...]:
        return (str(self.dtype).removeprefix("torch."), "scale")

    @property
    def steps(self) -> int:
        """Number of bits of its mantissa."""
        return 3 if self.dtype is torch.float8_e4m3fn else 2

    @property
    def least(self) -> int:
        """Its smallest normal number, as the integer of a float32."""
        return ONE - ((1 << (6 - self.steps)) - 2 << 23)

    @property
    def first(self) -> int:
        """The difference between the first bits of a float32 and its code."""
        return (self.least >> (23 - self.steps)) - (1 << self.steps)

    def encode(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
        size = _bits(x) & SIZE
        scale, inverse = _scale(size, torch.finfo(self.dtype).max)
        ratio = size.view(torch.float32) * inverse
        code = _cut(ratio, self.steps, self.first, noise, self.least)
        # below its smallest normal number all steps are equal: a sum rounds to them
        ulp = self.least - (self.steps << 23)
        anchor = torch.full((), ulp + (23 << 23), dtype=torch.int32, device=x.device)
        even = _bits(ratio + anchor.view(torch.float32)) - anchor
        code = torch.where(_bits(ratio) < self.least, even, code).clamp(max=127)
        if not self.signed:
            code = torch.maximum(code, size.clamp(max=1))
        if self.signed:
            code = code | ((_bits(x) >> 31) & 128)
        return code.to(torch.uint8).view(self.dtype), scale

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        codes, scale = stored
        code = codes.view(torch.uint8).to(torch.int32)
        size = code & 127
        normal = ((size + self.first) << (23 - self.steps)).view(torch.float32)
        ulp = math.ldexp(1.0, (self.least >> 23) - 127 - self.steps)
        found = torch.where(
            size < 1 << self.steps, size.to(torch.float32) * ulp, normal
        ) * scale.unsqueeze(-1)
        if self.signed:
            found = (_bits(found) | (code & 128) << 24).view(torch.float32)
        return torch.where(size > NUMBERS[self.steps], math.nan, found)


class Bfloat16(NamedTuple):
    """bfloat16, without a scale: the first 16 bits of a float32."""

    kind: str = "bfloat16"  # a field, since empty tuples of any two classes are equal
    fields = ("bfloat16",)
    entrywise = True

    def encode(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
        if noise is None:
            return (x.to(torch.bfloat16),)
        bits = _bits(x)
        size = bits & SIZE
        # all bits or none: vector loops over 16 bits cannot mask 32
        add = noise >> 16 & 0xFFFF & ((size - LARGEST_BFLOAT16) >> 31)
        return (_first_half(bits + add | NAN & ((INFINITE - size) >> 31)),)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        return stored[0].to(torch.float32)


class Split(NamedTuple):
    """A float32 as the nearest bfloat16, and its remaining bits as an integer.

    bits: 16, or 8 for the first 8 of them.
    """

    bits: int = 16

    @property
    def kind(self) -> str:
        return f"split{self.bits}"

    fields = ("", "low")
    entrywise = True

    def encode(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
        bits, cut = _bits(x), 16 - self.bits
        size = bits & SIZE
        size = size.masked_fill(size > INFINITE, NAN)
        if cut:
            add = 1 << (cut - 1)
            if noise is not None:
                add = noise >> (32 - cut) & ((1 << cut) - 1)
            size = (size + add) >> cut
        high = (size + (1 << (self.bits - 1))) >> self.bits
        low = size - (high << self.bits)
        kept = _first_half(high << 16 | bits & ~SIZE)
        return kept, low.to(torch.int16 if self.bits == 16 else torch.int8)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        high, low = stored
        bits = _bits(high.to(torch.float32))
        # a parameter that was set to 0 by hand still has the low bits of its former value
        size = ((bits & SIZE) + (low.to(torch.int32) << (16 - self.bits))).clamp(min=0)
        return (size | bits & ~SIZE).view(torch.float32)


class Compensated(NamedTuple):
    """A float32 as the nearest bfloat16, and the remainder as another one."""

    kind: str = "kahan"
    fields = ("", "compensation")
    entrywise = True

    def encode(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, ...]:
        kept = x.to(torch.bfloat16)
        wide = _widened(kept)
        rest = torch.where(wide.abs() < math.inf, x - wide, 0.0)
        return kept, rest.to(torch.bfloat16)

    def decode(self, stored: tuple[Tensor, ...]) -> Tensor:
        return stored[0].to(torch.float32) + stored[1].to(torch.float32)


CELLS = {
    cells.fields[0]: cells
    for cells in (
        Companded(8, True, 4),
        Companded(8, False, 4),
        Companded(4, True, 1),
        Companded(4, False, 1),
        Float8(torch.float8_e4m3fn),
        Float8(torch.float8_e5m2),
        Bfloat16(),
    )
}
"""The decoding of slots, by their names in the state."""

WEIGHT_SLOTS = ("weight_low16", "weight_low8", "weight_compensation")
"""The slots of `master_weights` for the remaining bits of parameters."""
