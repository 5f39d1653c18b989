"""Normal random numbers of a counter, filled into memory by a library of C++, or by a GPU.

The numbers are those of `core.randomness`, up to the rounding of logarithm, sine and cosine.
"""

from __future__ import annotations

import array
from typing import Any

import torch
from torch import Tensor

from functional_optim.kernels import gpu_normals
from functional_optim.kernels.counters import NOISE
from functional_optim.kernels.cpp import HEAD, text_of
from functional_optim.kernels.launches import TEAM
from functional_optim.kernels.libraries import Text, library

BLOCK = 1 << 12
"""Numbers that a thread makes at once; of pairs, the first ones."""

LIBRARY: Any = Text(HEAD + NOISE + text_of("normals.cpp"))


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
