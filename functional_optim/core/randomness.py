"""Random numbers as pure functions of a key and a counter: no generator, no state.

Numbers: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
https://doi.org/10.1145/2063384.2063405: Philox-2x32 with 10 rounds, in int64 tensors, as torch has
no arithmetic on unsigned ones. Keys: Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", https://doi.org/10.1145/2714064.2660195: SplitMix64. Both have few operations, which
determine the compile time.

A stream is identified by 64 bits. Philox has a key of 32 bits and a counter of 64, so the other
half of a stream's key is the upper half of the counter. (The upper half of an index beyond 2³² is
xored into it.)

Box, Muller, "A note on the generation of random normal deviates",
https://doi.org/10.1214/aoms/1177706645.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core import modes
from functional_optim.kernels import normals
from functional_optim.kernels.counters import FIRST, GOLDEN, LANES, MULTIPLIER, ROUNDS, SECOND, WEYL

MASK = 0xFFFFFFFF
BLOCK, LAUNCH = 1 << 14, 1 << 22
"""Counters that are processed at once: on a CPU as many as fit into a core's cache, elsewhere
enough to amortize a launch."""


def derived(key: Tensor, x: Any) -> Tensor:
    """The key derived from a key by x: output x of SplitMix64 with the key as its seed.

    Args:
        key: int64, of any shape.
        x: an int64 tensor, or a Python integer, modulo 2⁶⁴.
    """
    at = signed((x + 1) * GOLDEN) if isinstance(x, int) else (x + 1) * signed(GOLDEN)
    z = key + at  # these products wrap around, as torch's integers do
    z = (z ^ shifted(z, 30)) * signed(FIRST)
    z = (z ^ shifted(z, 27)) * signed(SECOND)
    return z ^ shifted(z, 31)


def derived_number(key: int, x: int) -> int:
    """`derived` for a key that is a Python integer: the same 64 bits, without a sign."""
    whole = (1 << 64) - 1
    z = (key + (x + 1) * GOLDEN) & whole
    z = ((z ^ (z >> 30)) * FIRST) & whole
    z = ((z ^ (z >> 27)) * SECOND) & whole
    return z ^ (z >> 31)


def signed(x: int) -> int:
    """The last 64 bits of an integer, as int64 has them."""
    return ((x + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def shifted(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int64 by n bits."""
    return (x >> n) & ((1 << (64 - n)) - 1)


def words(key: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
    """Two words in [0, 2³²), int64: a random function of i and the key."""
    # masked even for small i: Inductor would use 32 bits for a product of indices
    return philox(key & MASK, (i & MASK, (i >> 32) ^ shifted(key, 32)))


def philox(key: Tensor, counter: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Philox-2x32-10 of words in [0, 2³²), int64."""
    x, y = counter
    for i in range(ROUNDS):
        product = x * (MULTIPLIER - 2**32)  # the product minus 2³² x, which fits in int64
        x, y = ((product >> 32) + x) ^ ((key + i * WEYL) & MASK) ^ y, product & MASK
    return x, y


def named(path: str) -> int:
    """64 bits of a string: FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/."""
    h = 0xCBF29CE484222325
    for letter in path:
        h = ((h ^ ord(letter)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


def uniform(key: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Independent uniform numbers in (0, 1): float64, one for each value of the counter."""
    i = torch.arange(math.prod(shape), dtype=torch.int64, device=device)
    x, _ = words(key, i)
    return ((x.to(torch.float64) + 0.5) * 2.0**-32).reshape(shape)


def normal(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Independent standard normal numbers: two for each value of the counter.

    Without a trace, many float32 numbers come from a C++ library, or from a kernel on a GPU. Others
    are computed block by block: the words of a number take several times its memory.
    """
    count = math.prod(shape)
    half = (count + 1) // 2
    here = device.type == "cpu"
    block = BLOCK if here else LAUNCH
    if half > (block if here else 0) and dtype is torch.float32 and not modes.traced():
        whole = torch.empty(2, half, dtype=dtype, device=device)
        if normals.fill(whole, key):
            return whole.reshape(-1)[:count].reshape(shape)
    if half <= block or torch.compiler.is_compiling() or modes.transformed():
        return torch.cat(_box_muller(key, 0, half, dtype, device))[:count].reshape(shape)
    whole = torch.empty(2, half, dtype=dtype, device=device)
    for start in range(0, half, block):
        end = min(start + block, half)
        whole[0, start:end], whole[1, start:end] = _box_muller(key, start, end, dtype, device)
    return whole.reshape(-1)[:count].reshape(shape)


def _box_muller(
    key: Tensor, start: int, end: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    i = torch.arange(start, end, dtype=torch.int64, device=device)
    return _deviates(*words(key, i), dtype)


def _deviates(x: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    radius = (-2 * ((x.to(dtype) + 0.5) * 2.0**-32).log()).sqrt()
    angle = y.to(torch.float64) * (2 * math.pi * 2.0**-32)
    return radius * angle.cos().to(dtype), radius * angle.sin().to(dtype)


def noise_keys(key: Tensor, step: Tensor) -> Tensor:
    """Both keys of the noise of a step, (2,) int64. step: 0-dim int64, below 2⁶²."""
    return torch.stack([derived(key, 2 * step), derived(key, 2 * step + 1)])


def noise(keys: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Independent standard normal numbers, float32 or float64, for the elements of a tensor.

    Groups of neighbouring elements share the words of some counters, see `noise_at`. Many come
    from a C++ library, or in float32 from a kernel on a GPU.
    """
    whole = torch.empty(shape, dtype=dtype, device=device)
    if not whole.numel() or normals.fill_noise(whole, keys):
        return whole
    flat = whole.view(-1)
    for start in range(0, len(flat), LAUNCH):
        end = min(start + LAUNCH, len(flat))
        place = torch.arange(start, end, dtype=torch.int64, device=device)
        flat[start:end] = noise_at(keys, place, dtype)
    return whole


def noise_at(keys: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of `noise` for elements by their index, int64.

    A group of 32 elements has 16 counters, whose 64 bits are SplitMix64's for the first key, with
    the second key as the (odd) step between counters, and once more between its two rounds. These
    are 16 words of 32 bits for radii, and then 16 for angles: the vectors of a processor need no
    shuffles for that. Element j has the first number of radius and angle j, and element 16 + j the
    second one.
    """
    lane = place % LANES
    i = place // (2 * LANES) * LANES + lane // 2
    x, y = [(_mixed(keys, at) >> (lane % 2 * 32)) & MASK for at in (i, i + LANES // 2)]
    radius = (-2 * (x.to(dtype) * 2.0**-32 + 2.0**-33).log()).sqrt()
    rest = ((y & (MASK >> 3)) ^ (1 << 28)) - (1 << 28)  # with its first bit as the sign
    angle = rest.to(torch.float64) * (math.pi * 2.0**-30)
    sine, cosine = radius * angle.sin().to(dtype), radius * angle.cos().to(dtype)
    second = (place & LANES) > 0
    found = torch.where(((y >> 31) > 0) ^ second, sine, cosine)
    return torch.where((torch.where(second, y >> 29, y >> 30) & 1) > 0, -found, found)


def _mixed(keys: Tensor, i: Tensor) -> Tensor:
    first, second = keys.unbind()
    z = first + i * (second | 1)  # these products wrap around
    z = (z ^ shifted(z, 30)) * signed(FIRST)
    z = (z ^ shifted(z, 27) ^ second) * signed(SECOND)
    return z ^ shifted(z, 31)


def signs(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Independent numbers that are -1 or 1: two for each value of the counter."""
    count = math.prod(shape)
    i = torch.arange((count + 1) // 2, dtype=torch.int64, device=device)
    return torch.cat(_two_signs(*words(key, i), dtype))[:count].reshape(shape)


def _two_signs(x: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (1 - 2 * (x & 1)).to(dtype), (1 - 2 * (y & 1)).to(dtype)


def several(
    keys: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: Any,
    *,
    of_signs: bool,
) -> list[Tensor]:
    """`normal`, or `signs`, for several keys, by the operations of one."""
    halves = [(math.prod(shape) + 1) // 2 for shape in shapes]
    key = torch.cat([own.expand(half) for own, half in zip(keys, halves, strict=True)])
    i = torch.cat([torch.arange(half, dtype=torch.int64, device=device) for half in halves])
    x, y = (_two_signs if of_signs else _deviates)(*words(key, i), dtype)
    pairs = zip(x.split(halves), y.split(halves), strict=True)
    drawn = [torch.cat(pair) for pair in pairs]
    return [
        own[: math.prod(shape)].reshape(shape) for own, shape in zip(drawn, shapes, strict=True)
    ]


def whole_seed(name: str, seed: Any) -> int:
    """A seed as a Python integer. name: the caller, for errors.

    Raises:
        TypeError: if the seed is not an integer.
        ValueError: if it has more than 64 bits.
    """
    try:  # torch.compile would make a constant of the index
        number = seed if isinstance(seed, int) else operator.index(seed)
    except TypeError:
        raise TypeError(f"{name} needs an integer as its seed, but got {seed!r}.") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} needs a seed in [-2⁶³, 2⁶³), but got {seed}.")
    return number


def seed_tensor(name: str, seed: Any, device: torch.device) -> Tensor:
    """A seed as a new 0-dim int64 tensor. name: the caller, for errors.

    Raises:
        TypeError, ValueError: as `whole_seed`.
    """
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.is_floating_point() or seed.is_complex():
            raise TypeError(
                f"{name} needs one integer as its seed, but got a tensor of {seed.dtype} and "
                f"shape {tuple(seed.shape)}; for an ensemble call it under torch.vmap."
            )
        return seed.detach().to(device=device, dtype=torch.int64).reshape(()).clone()
    return torch.full((), whole_seed(name, seed), dtype=torch.int64, device=device)
