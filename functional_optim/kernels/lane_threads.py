"""CUDA C++ of a program that solves many problems, each in one thread of a GPU.

The text of the program is that of `lanes`, where a vector is now a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from functional_optim.kernels.drivers import DRIVERS
from functional_optim.kernels.interrupts import let_through
from functional_optim.kernels.lanes import BINARY, EXTREMES, MATRICES, UNARY

NUMBERS = r"""
typedef unsigned char uint8_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef double D;
typedef float F;
typedef int64_t I; /* also a mask: 0 or -1 */

#define APART __noinline__
#define LANE(x, l) (x)
#define LOOP _Pragma("unroll 1")
#define __builtin_convertvector(x, T) ((T)(x))
#define __builtin_inf() __longlong_as_double(0x7ff0000000000000LL)
#define __builtin_nan(x) __longlong_as_double(0x7ff8000000000000LL)
#define unseen_zero 0

/* memory of a thread; distances are those between vectors of eight numbers */
struct Scratch { char* memory; char* operator+(int64_t x) const { return memory + x / 8; } };

static inline D all_D(double x) { return x; }
static inline F all_F(float x) { return x; }
static inline I all_I(int64_t x) { return x; }

#define COMPARISON(NAME, SIGN) \
static inline I NAME(D a, D b) { return -(I)(a SIGN b); } \
static inline I NAME(F a, F b) { return -(I)(a SIGN b); } \
static inline I NAME(I a, I b) { return -(I)(a SIGN b); }
COMPARISON(lt, <) COMPARISON(le, <=) COMPARISON(gt, >) COMPARISON(ge, >=)
COMPARISON(eq, ==) COMPARISON(ne, !=)

static inline D choice(I c, D a, D b) { return c ? a : b; }
static inline F choice(I c, F a, F b) { return c ? a : b; }
static inline I choice(I c, I a, I b) { return c ? a : b; }

static inline D abs_of(D x) { return fabs(x); }
static inline F abs_of(F x) { return fabsf(x); }
static inline I abs_of(I x) { return x < 0 ? -x : x; }
static inline D fma_of(D x, D z, D a) { return fma(x, z, a); }
static inline F fma_of(F x, F z, F a) { return fmaf(x, z, a); }
static inline D gathered(const D* x, int step, int count, I index) /* NaN where nothing is */
{ return (uint64_t)index < (uint64_t)count ? x[index * step] : __builtin_nan(""); }

#define FUNCTION(NAME) \
static inline D NAME##_of(D x) { return NAME(x); } \
static inline F NAME##_of(F x) { return (float)NAME((double)x); }
#define FUNCTION_OF_TWO(NAME) \
static inline D NAME##_of(D x, D z) { return NAME(x, z); } \
static inline F NAME##_of(F x, F z) { return (float)NAME((double)x, (double)z); }
"""

PRELUDE = (
    NUMBERS
    + "\n".join([f"FUNCTION({x})" for x in (*UNARY, "exp")])
    + "\n".join(["", *[f"FUNCTION_OF_TWO({x})" for x in BINARY]])
    + EXTREMES
    + MATRICES
)

DRIVER = r"""
extern "C" __global__ void SYMBOL(
    const int64_t* at, int64_t count, int64_t most, int64_t begins)
{{
    const int64_t p = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (p >= count || (!begins && !running(at, p))) return;
    State s;
    alignas(8) char memory[{scratch} / 8 + 8];
    const Scratch scratch = {{memory}};
    load(s, at, p, 0);
    if (begins) start(s, at, scratch);
    else for (int64_t k = 0; k < most && s.{status}[0] == {running}; ++k) advance(s, at, scratch);
    store(s, at, p, 0);
}}
"""


def on_device(
    text: str, device: torch.device
) -> Callable[[Sequence[int], int, int, bool], None] | None:
    """The program of a text on a device, see `lane_library.Call`; None if nothing compiles it."""
    launch = let_through(partial(DRIVERS[device.type].threads, text, device))
    if launch is None:
        return None

    def call(addresses: Sequence[int], count: int, most: int, begins: bool) -> None:
        table = torch.tensor(addresses, dtype=torch.int64, device=device)
        launch(count, (table.data_ptr(), count, most, int(begins)))

    return call
