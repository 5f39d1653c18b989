"""Programs for threads of a GPU where there is none: g++ compiles them, and threads run one after
another."""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from functional_optim.kernels.drivers import Launcher

SHIM = r"""
#include <math.h>
#define int64_t own_int64_t
#define uint64_t own_uint64_t
#define int32_t own_int32_t
#define uint8_t own_uint8_t
#define __global__
#define __noinline__ __attribute__((noinline))
struct Index { unsigned x; };
static Index blockIdx, blockDim = {64}, threadIdx;
static double __longlong_as_double(long long x) { double y; __builtin_memcpy(&y, &x, 8); return y; }
"""

RUN = r"""
extern "C" void run(int64_t threads, const int64_t* x)
{
    for (int64_t p = 0; p < (threads + 63) / 64 * 64; ++p) {
        blockIdx.x = p / 64;
        threadIdx.x = p % 64;
        SYMBOL((const int64_t*)x[0], x[1], x[2], x[3]);
    }
}
"""


@cache
def library(text: str) -> ctypes.CDLL:
    compiler = shutil.which("g++") or "g++"
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "threads.cpp", Path(folder) / "threads.so"
        source.write_text(SHIM + text + RUN)
        flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-ffp-contract=off"]
        subprocess.run([compiler, *flags, str(source), "-o", str(made)], check=True)
        return ctypes.CDLL(str(made))


def launcher(text: str) -> Launcher:
    run = library(text).run

    def launch(threads: int, arguments: Sequence[int]) -> None:
        run(ctypes.c_int64(threads), (ctypes.c_int64 * len(arguments))(*arguments))

    return launch
