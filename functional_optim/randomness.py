"""Random numbers as pure functions of a key and a counter: no generator, no state.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
https://doi.org/10.1145/2063384.2063405: Threefry-2x32 with 20 rounds, in int64 tensors, as torch
has no arithmetic on unsigned ones. Box, Muller, "A note on the generation of random normal
deviates", https://doi.org/10.1214/aoms/1177706645.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from functional_optim import kernels

Words = tuple[Any, Any]
"""64 bits: two numbers in [0, 2³²), as int64 tensors or Python ints."""

MASK = 0xFFFFFFFF
BLOCK = 1 << 14
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def words(x: Any) -> Words:
    """An integer, of which the last 64 bits count, as low and high word."""
    return x & MASK, (x >> 32) & MASK


def threefry(key: Words, counter: Words) -> Words:
    """Two words that are random as a function of the counter, another one for each key."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + keys[0]) & MASK, (counter[1] + keys[1]) & MASK
    for i in range(1, 6):
        for r in ROTATIONS[(i - 1) % 2]:
            x = x + y  # masked only below: 64 bits are enough for four sums
            y = (((y << r) | (y >> (32 - r))) ^ x) & MASK
        x, y = (x + keys[i % 3]) & MASK, (y + keys[(i + 1) % 3] + i) & MASK
    return x, y


def named(path: str) -> int:
    """64 bits of a string: FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/."""
    h = 0xCBF29CE484222325
    for letter in path:
        h = ((h ^ ord(letter)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


def uniform(key: Words, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Independent numbers, evenly spread in (0, 1): float64, one for each value of the counter."""
    i = torch.arange(math.prod(shape), dtype=torch.int64, device=device)
    x, _ = threefry(key, words(i))
    return ((x.to(torch.float64) + 0.5) * 2.0**-32).reshape(shape)


def normal(key: Words, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Independent standard normal numbers: two for each value of the counter.

    Made block by block where nobody traces: the words of a number take several times its memory.
    """
    count = math.prod(shape)
    half = (count + 1) // 2
    if half <= BLOCK or torch.compiler.is_compiling() or kernels.transformed():
        return torch.cat(_box_muller(key, 0, half, dtype, device))[:count].reshape(shape)
    whole = torch.empty(2, half, dtype=dtype, device=device)
    for start in range(0, half, BLOCK):
        end = min(start + BLOCK, half)
        whole[0, start:end], whole[1, start:end] = _box_muller(key, start, end, dtype, device)
    return whole.reshape(-1)[:count].reshape(shape)


def _box_muller(
    key: Words, start: int, end: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    i = torch.arange(start, end, dtype=torch.int64, device=device)
    x, y = threefry(key, words(i))
    radius = (-2 * ((x.to(dtype) + 0.5) * 2.0**-32).log()).sqrt()
    angle = y.to(dtype) * (2 * math.pi * 2.0**-32)
    return radius * angle.cos(), radius * angle.sin()


def signs(key: Words, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Independent numbers that are -1 or 1: two for each value of the counter."""
    count = math.prod(shape)
    i = torch.arange((count + 1) // 2, dtype=torch.int64, device=device)
    x, y = threefry(key, words(i))
    return (1 - 2 * (torch.cat([x, y])[:count] & 1)).to(dtype).reshape(shape)


def seed_tensor(name: str, seed: Any, device: torch.device) -> Tensor:
    """A seed, in the name of who takes it, as a 0-dim int64 tensor of its own.

    Raises:
        TypeError: if the seed is no integer.
        ValueError: if it has more than 64 bits.
    """
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.is_floating_point() or seed.is_complex():
            raise TypeError(
                f"{name} needs one integer as its seed, but got a tensor of {seed.dtype} and "
                f"shape {tuple(seed.shape)}; for an ensemble call it under torch.vmap."
            )
        return seed.detach().to(device=device, dtype=torch.int64).reshape(()).clone()
    if not isinstance(seed, int):
        raise TypeError(f"{name} needs an integer as its seed, but got {seed!r}.")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"{name} needs a seed in [-2⁶³, 2⁶³), but got {seed}.")
    return torch.full((), seed, dtype=torch.int64, device=device)
