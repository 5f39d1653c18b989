"""Rounding that numpy lacks: fused multiply-add, directed modes, bfloat16, flushing of subnormals.

A float32 result is found from a float64 value and the rest that this value lacks, both exact.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

Array = np.ndarray

SMALLEST_NORMAL = np.float32(2.0**-126)
SPLITTER = 2.0**27 + 1
"""Veltkamp's constant: cuts a float64 into two halves whose products are exact."""


def two_sum(x: Array, y: Array) -> tuple[Array, Array]:
    """The rounded sum, and what it lacks (Knuth)."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def two_product(x: Array, y: Array) -> tuple[Array, Array]:
    """The rounded product, and what it lacks (Dekker); no factor may be near the largest number."""
    product = x * y
    x_high, x_low = _halves(x)
    y_high, y_low = _halves(y)
    rest = ((x_high * y_high - product) + x_high * y_low + x_low * y_high) + x_low * y_low
    return product, rest


def _halves(x: Array) -> tuple[Array, Array]:
    big = SPLITTER * x
    high = big - (big - x)
    return high, x - high


def to_odd(value: Array, rest: Array) -> Array:
    """`value` + `rest` in float64, rounded to odd: another rounding to fewer bits is then right."""
    bits = value.view(np.int64)
    inexact = np.isfinite(value) & (rest != 0) & np.isfinite(rest)
    even = inexact & ((bits & 1) == 0)
    # the neighbour towards the rest: one bit up where it leads away from zero
    step = np.where(np.signbit(value) == np.signbit(rest), 1, -1)
    return np.where(even, bits + step, bits).view(np.float64)


def to_float32(value: Array, rest: Array | float, mode: str = "rn") -> Array:
    """`value` + `rest` (float64, `rest` below half a unit of `value`) as one float32."""
    near = value.astype(np.float32)
    if mode == "rn":
        return _nearest(value, rest, near)
    gap = value - near
    lacks = np.where(gap != 0, gap, rest)
    return _directed(near, lacks, mode)


def _nearest(value: Array, rest: Array | float, near: Array) -> Array:
    if isinstance(rest, float):
        return near
    # float64 lies between two float32 at a tie, or below the normal numbers: only there does the
    # rest decide
    tie = (value.view(np.uint64) & np.uint64(0x1FFFFFFF)) == 0x10000000
    hard = (tie | (np.abs(near) <= SMALLEST_NORMAL)) & (rest != 0)
    if not hard.any():
        return near
    return np.where(hard, to_odd(value, rest).astype(np.float32), near)


def _directed(near: Array, lacks: Array, mode: str) -> Array:
    """`near` was rounded to nearest and lacks `lacks`: the result of another mode."""
    zero, low, high = near.dtype.type(0), near.dtype.type(-np.inf), near.dtype.type(np.inf)
    down, up = np.nextafter(near, low), np.nextafter(near, high)
    if mode == "rm":
        return np.where(lacks < 0, down, near)
    if mode == "rp":
        return np.where(lacks > 0, up, near)
    inward = np.nextafter(near, zero)
    return np.where((lacks != 0) & (np.signbit(lacks) != np.signbit(near)), inward, near)


def add(x: Array, y: Array, mode: str) -> Array:
    if mode == "rn":
        return x + y
    if x.dtype == np.float32:
        return to_float32(*two_sum(x.astype(np.float64), y.astype(np.float64)), mode)
    total, rest = two_sum(x, y)
    return _directed(total, rest, mode)


def multiply(x: Array, y: Array, mode: str) -> Array:
    if mode == "rn":
        return x * y
    if x.dtype == np.float32:
        return to_float32(x.astype(np.float64) * y.astype(np.float64), 0.0, mode)
    raise NotImplementedError(f"No product of float64 is rounded by {mode} here.")


def fma(x: Array, y: Array, z: Array, mode: str) -> Array:
    if x.dtype == np.float32:
        product = x.astype(np.float64) * y.astype(np.float64)  # exact: 48 bits
        return to_float32(*two_sum(product, z.astype(np.float64)), mode)
    if mode != "rn":
        raise NotImplementedError(f"No fma of float64 is rounded by {mode} here.")
    return fma64(x, y, z)


def fma_odd(x: Array, y: Array, z: Array) -> Array:
    """Of 16-bit floats, which stand as float64: rounded to odd, for the caller to round again."""
    return to_odd(*two_sum(x * y, z))


def fma64(x: Array, y: Array, z: Array) -> Array:
    """Boldo and Melquiond, "Emulation of FMA"; by fractions where exponents are extreme."""
    x, y, z = np.broadcast_arrays(x, y, z)
    high, low = two_product(x, y)
    upper, lower = two_sum(z, low)
    top, middle = two_sum(high, upper)
    result = top + to_odd(*two_sum(lower, middle))
    plain = high + z
    exact = (x == 0) | (y == 0) | ~np.isfinite(x) | ~np.isfinite(y) | ~np.isfinite(z)
    size = np.abs(high)
    outside = (size < 2.0**-960) | (size > 2.0**1000) | (np.abs(z) > 2.0**1000)
    outside |= (np.abs(x) > 2.0**990) | (np.abs(y) > 2.0**990)
    # a sum of exactly zero: its sign is that of the plain sum
    result = np.where(exact | (result == 0), plain, result)
    hard = outside & ~exact
    if hard.any():
        result[hard] = [_by_fractions(*of) for of in zip(x[hard], y[hard], z[hard], strict=True)]
    return result


def _by_fractions(x: float, y: float, z: float) -> float:
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    if exact == 0:
        # a product that cancels gives +0, one that is itself below all numbers cannot be 0
        return 0.0
    try:
        near = float(exact)
    except OverflowError:
        return np.inf if exact > 0 else -np.inf
    return near if near != 0 or exact > 0 else -0.0


def bfloat16_bits(x: Array) -> Array:
    """Float32 or float64 to bfloat16, to nearest, ties to even; as uint16."""
    if x.dtype == np.float64:
        near = x.astype(np.float32)
        x = _odd_float32(x, near)
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def _odd_float32(x: Array, near: Array) -> Array:
    gap = x - near
    bits = near.view(np.int32)
    even = np.isfinite(near) & (gap != 0) & ((bits & 1) == 0)
    step = np.where(np.signbit(near) == np.signbit(gap), 1, -1).astype(np.int32)
    return np.where(even, bits + step, bits).view(np.float32)


def odd_integers(x: Array) -> Array:
    """64-bit integers to float64, rounded to odd, for a second rounding to a narrower float."""
    kept = (x >> x.dtype.type(11)) << x.dtype.type(11)
    sticky = kept | ((kept != x).astype(x.dtype) << x.dtype.type(11))
    large = np.abs(x.astype(np.float64)) >= 2.0**53
    return np.where(large, sticky, x).astype(np.float64)


def flush(x: Array) -> Array:
    """Subnormal float32 numbers become zeros of their sign."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)
