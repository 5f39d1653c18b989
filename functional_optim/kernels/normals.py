"""Normal random numbers of a counter, filled into memory by a library of C++, or by a GPU.

The numbers are those of `core.randomness.normal`, up to the rounding of logarithm, sine and cosine.
"""

from __future__ import annotations

import array
from typing import Any

import torch
from torch import Tensor

from functional_optim.kernels import gpu_normals
from functional_optim.kernels.cpp import HEAD, MATH
from functional_optim.kernels.launches import TEAM
from functional_optim.kernels.libraries import library
from functional_optim.kernels.print_cpp import SYMBOL

BLOCK = 1 << 12
"""Counters that a thread takes at once."""


class Normals:
    """What a library is built from."""

    outputs = 0
    text = (
        HEAD
        + MATH
        + r"""
/* For a counter, two independent standard normal numbers: Philox-2x32-10, then Box and Muller. */
static APART void fill(
    float* __restrict__ const a, float* __restrict__ const b, const int64_t start,
    const int64_t count, const uint32_t low, const uint32_t high)
{
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
        const uint64_t i = (uint64_t)(start + j);
        uint32_t x = (uint32_t)i, y = (uint32_t)(i >> 32) ^ high;
#pragma GCC unroll 10
        for (uint32_t k = 0; k < 10; ++k) {
            const uint64_t p = (uint64_t)x * 0xd256d193u;
            x = (uint32_t)(p >> 32) ^ (low + k * 0x9e3779b9u) ^ y;
            y = (uint32_t)p;
        }
        const float radius = __builtin_sqrtf(-2 * log_of(((float)x + 0.5f) * 0x1p-32f));
        const double angle = (float)y * (float)(0x1.921fb54442d18p+2 * 0x1p-32);
        const double turns = __builtin_rint(angle * 0x1.45f306dc9c883p-1);
        const double t = __builtin_fma(turns, -0x1.921fb54442d18p+0, angle), s = t * t;
        const double sine = t * series(s, 1.0 / 362880, -1.0 / 5040, 1.0 / 120, -1.0 / 6, 1.0);
        const double cosine = series(s, -1.0 / 3628800, 1.0 / 40320, -1.0 / 720, 1.0 / 24, -0.5,
                                     1.0);
        const int32_t quarter = (int32_t)turns & 3;
        const double c = quarter & 1 ? sine : cosine, d = quarter & 1 ? cosine : sine;
        a[j] = radius * (float)(quarter == 1 || quarter == 2 ? -c : c);
        b[j] = radius * (float)(quarter & 2 ? -d : d);
    }
}

extern "C" void SYMBOL(const int64_t* call)
{
    float* const a = (float*)call[0];
    float* const b = (float*)call[1];
    const int64_t count = call[2], block = call[4], blocks = (count + block - 1) / block;
    const uint64_t key = (uint64_t)call[3];
    auto each = [&](int64_t k, int64_t) {
        const int64_t at = k * block, some = at + block < count ? block : count - at;
        fill(a + at, b + at, at, some, (uint32_t)key, (uint32_t)(key >> 32));
    };
    share((Team)call[5], call[6], blocks, 1, 2 * call[6], each);
}
"""
    ).replace("SYMBOL", SYMBOL)


def fill(out: Tensor, key: Tensor) -> bool:
    """Fill both rows of a contiguous float32 tensor, (2, n), with the numbers of the counters
    0, ..., n − 1; False, and nothing done, if there is no library, or no kernel of a GPU.

    key: the 64 bits of the stream's name, 0-dim int64.
    """
    if out.device.type != "cpu":
        return gpu_normals.fill(out, key)
    source: Any = Normals()
    native = library(source)
    if native is None:
        return False
    first, count = out.data_ptr(), out.shape[1]
    threads = torch.get_num_threads()
    call = array.array("q", [first, first + 4 * count, count, int(key), BLOCK, TEAM, threads])
    native.call(call.buffer_info()[0])
    return True
