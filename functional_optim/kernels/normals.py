"""Normal random numbers of a counter, filled into memory by a library of C++, or by a GPU.

The numbers are those of `core.randomness`, up to the rounding of logarithm, sine and cosine.
"""

from __future__ import annotations

import array
from typing import Any

import torch
from torch import Tensor

from functional_optim.kernels import gpu_normals
from functional_optim.kernels.counters import NOISE, PHILOX
from functional_optim.kernels.cpp import HEAD
from functional_optim.kernels.launches import TEAM
from functional_optim.kernels.libraries import Text, library

BLOCK = 1 << 12
"""Numbers that a thread makes at once; of pairs, the first ones."""


LIBRARY: Any = Text(
    HEAD
    + NOISE
    + PHILOX
    + r"""
/* For counters, two independent standard normal numbers each. */
static APART void pairs(
    float* __restrict__ const a, float* __restrict__ const b, const int64_t start,
    const int64_t count, const uint64_t key)
{
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
        uint32_t x, y;
        philox(x, y, (uint64_t)(start + j), key);
        const uint32_t turned = y + 0x20000000u; /* by an eighth, to the start of a quarter */
        deviates(a[j], b[j], x, (int32_t)(y << 2), turned >> 30 & 1, turned + 0x40000000u, turned);
    }
}

/* The noise of a tensor, whose last group may be incomplete. */
template <class T>
static APART void whole(
    T* const out, const int64_t start, const int64_t count, const Keys keys)
{
    const int64_t most = count / GROUP * GROUP;
    T last[GROUP];
    noise(out, keys, start, most);
    if (most == count) return;
    noise(last, keys, start + most, count - most);
    memcpy(out + most, last, sizeof(T) * (count - most));
}

extern "C" void SYMBOL(const int64_t* call)
{
    const int64_t count = call[1], kind = call[4], block = call[5];
    const int64_t blocks = (count + block - 1) / block;
    const Keys keys = {(uint64_t)call[2], (uint64_t)call[3]};
    auto each = [&](int64_t k, int64_t) {
        const int64_t at = k * block, some = at + block < count ? block : count - at;
        float* const out = (float*)call[0];
        if (kind == 0) pairs(out + at, out + count + at, at, some, keys.first);
        else if (kind == 4) whole(out + at, at, some, keys);
        else whole((double*)call[0] + at, at, some, keys);
    };
    share((Team)call[6], call[7], blocks, 1, 2 * call[7], each);
}
"""
)
"""Normal numbers in C++."""


def fill(out: Tensor, key: Tensor) -> bool:
    """Fill both rows of a contiguous float32 tensor, (2, n), with the numbers of the counters
    0, ..., n − 1; False, and nothing done, if there is no library, or no kernel of a GPU.

    key: the 64 bits of the stream's name, 0-dim int64.
    """
    if out.device.type != "cpu":
        return gpu_normals.run(gpu_normals.NORMALS, out, key, out.shape[1])
    return _filled(out, out.shape[1], [int(key), 0], 0)


def fill_noise(out: Tensor, keys: Tensor) -> bool:
    """The same for a contiguous tensor of any shape, float32 or float64, with the numbers of
    `core.randomness.noise`. keys: both of them, (2,) int64."""
    if out.device.type != "cpu":
        single = out.dtype is torch.float32
        return single and gpu_normals.run(gpu_normals.NOISE, out, keys, out.numel())
    return _filled(out, out.numel(), keys.tolist(), out.element_size())


def _filled(out: Tensor, count: int, keys: list[int], kind: int) -> bool:
    """kind: 0 for pairs, or the bytes of an element of noise."""
    native = library(LIBRARY)
    if native is None:
        return False
    threads = torch.get_num_threads() if count > BLOCK else 1
    call = array.array("q", [out.data_ptr(), count, *keys, kind, BLOCK, TEAM, threads])
    native.call(call.buffer_info()[0])
    return True
