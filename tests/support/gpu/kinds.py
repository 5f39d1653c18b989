"""PTX's types: bits of a register as numbers that numpy computes with, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gpu.rounding import bfloat16_bits

Array = np.ndarray

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


def resize(raw: Array, bits: int, signed: bool = False) -> Array:
    """Bits of another width: cut off above, or filled with zeros or with the sign."""
    width = raw.itemsize * 8
    if width == bits:
        return raw
    if signed and bits > width:
        return raw.view(SIGNED[width]).astype(SIGNED[bits]).view(UNSIGNED[bits])
    return raw.astype(UNSIGNED[bits])


@dataclass(frozen=True)
class Kind:
    """A type. 16-bit floats are computed in float64, and rounded once when they are encoded."""

    name: str
    bits: int
    decode: Callable[[Array], Array]
    encode: Callable[[Array], Array]

    @property
    def floating(self) -> bool:
        return "f" in self.name

    @property
    def signed(self) -> bool:
        return self.name.startswith("s")

    @property
    def half(self) -> bool:
        """Whether it is a 16-bit float, or a pair of them."""
        return self.name.rstrip("2").rstrip("x") in ("f16", "bf16")


def _viewed(name: str, bits: int, dtype: type) -> Kind:
    unsigned = UNSIGNED[bits]

    def decode(raw: Array) -> Array:
        return resize(raw, bits).view(dtype)

    def encode(value: Array) -> Array:
        return value.view(unsigned)

    return Kind(name, bits, decode, encode)


def _f16_decode(raw: Array) -> Array:
    return resize(raw, 16).view(np.float16).astype(np.float64)


def _f16_encode(value: Array) -> Array:
    return value.astype(np.float16).view(np.uint16)


def _bf16_decode(raw: Array) -> Array:
    wide = resize(raw, 16).astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32).astype(np.float64)


def _pair(name: str, half: Kind) -> Kind:
    """Two in one register: a further axis in front, the lower half first."""

    def decode(raw: Array) -> Array:
        return half.decode(np.stack([raw, raw >> np.uint32(16)]))

    def encode(value: Array) -> Array:
        low, high = half.encode(value).astype(np.uint32)
        return low | (high << np.uint32(16))

    return Kind(name, 32, decode, encode)


def _same(x: Array) -> Array:
    return x


def _kinds() -> dict[str, Kind]:
    kinds = [_viewed(f"{letter}{bits}", bits, dtype) for letter, bits, dtype in _INTEGERS]
    kinds += [_viewed("f32", 32, np.float32), _viewed("f64", 64, np.float64)]
    f16 = Kind("f16", 16, _f16_decode, _f16_encode)
    bf16 = Kind("bf16", 16, _bf16_decode, bfloat16_bits)
    kinds += [f16, bf16, _pair("f16x2", f16), _pair("bf16x2", bf16)]
    kinds.append(Kind("pred", 1, _same, _same))
    return {kind.name: kind for kind in kinds}


_INTEGERS = [
    (letter, bits, of[bits])
    for letter, of in (("u", UNSIGNED), ("b", UNSIGNED), ("s", SIGNED))
    for bits in (8, 16, 32, 64)
]

KINDS = _kinds()
