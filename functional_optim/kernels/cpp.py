"""C++ for the operations of a graph: types, primitives, and what every library begins with."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import torch

from functional_optim.kernels.node import Unsuitable

STORED = {
    **{torch.float32: "float", torch.float64: "double"},
    **dict.fromkeys((torch.bfloat16, torch.float16), "uint16_t"),
    **dict.fromkeys((torch.bool, torch.float8_e4m3fn, torch.float8_e5m2), "uint8_t"),
    **{getattr(torch, x): f"{x}_t" for x in ("int8", "uint8", "int16", "int32", "int64")},
}
"""The C++ type of an element in memory."""

VALUE = {**STORED, torch.bfloat16: "float", torch.float16: "float", torch.bool: "bool"}
"""That of a value: half types are floats that are rounded."""

NUMBER = re.compile(r"\((float|double)\)-?0x[0-9a-f.p+-]+")
"""A constant of floating point, as C++ has it; neither NaN nor infinite."""

SHORT = (torch.uint8, torch.int8, torch.int16)
"""Integers to which a larger number is cast modulo their range, as ATen does it."""

HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_no_float8(dtype: torch.dtype) -> None:
    """Raise Unsuitable for a cast into 8 bits, which `stored` makes of the float's bits."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise Unsuitable(f"a cast to {dtype}")


class Cpp:
    """A printer: primitives as C++, and the lines that give names to texts.

    outer: the lines before all loops; None: there are no loops.
    """

    def __init__(
        self, lines: list[str], names: Iterable[int], outer: list[str] | None = None
    ) -> None:
        self.lines = lines
        self.outer = lines if outer is None else outer
        self.names = iter(names)
        self.dtype = torch.float32

    sub, mul, div = (lambda self, x, y, _s=s: f"({x} {_s} {y})" for s in "-*/")
    lt, le, gt, ge, eq, ne = (
        lambda self, x, y, _s=s: f"({x} {_s} {y})" for s in ("<", "<=", ">", ">=", "==", "!=")
    )
    bitand, bitor, bitxor, shl, shr = (
        lambda self, x, y, _s=s: f"({x} {_s} {y})" for s in ("&", "|", "^", "<<", ">>")
    )

    def add(self, x: str, y: str) -> str:
        return f"({x} {'|' if self.dtype is torch.bool else '+'} {y})"

    def neg(self, x: str) -> str:
        return f"(-{x})"

    def not_(self, x: str) -> str:
        return f"(!{x})" if self.dtype is torch.bool else f"(~{x})"

    def abs(self, x: str) -> str:
        if self.dtype.is_floating_point:
            return f"__builtin_fabs{self._f()}({x})"
        return f"({x} < 0 ? -{x} : {x})"

    def sqrt(self, x: str) -> str:
        return f"__builtin_sqrt{self._f()}({x})"

    def fma(self, x: str, y: str, z: str) -> str:
        return f"__builtin_fma{self._f()}({x}, {y}, {z})"

    def maximum(self, x: str, y: str) -> str:
        """NaN of either; of two zeros the second one, as ATen's vectors have it."""
        return self._larger(x, y, ">")

    def minimum(self, x: str, y: str) -> str:
        return self._larger(x, y, "<")

    def _larger(self, x: str, y: str, sign: str) -> str:
        plain = f"({x} {sign} {y} ? {x} : {y})"
        if not self.dtype.is_floating_point:
            return plain
        if NUMBER.fullmatch(y):  # which is not NaN
            return f"({y} {sign}= {x} ? {y} : {x})"
        return f"({x} != {x} ? {x} : {self.let(plain)})"  # two choices, or g++ writes no vectors

    def select(self, c: str, x: str, y: str) -> str:
        return f"({c} ? {x} : {y})"

    def call(self, name: str, *x: str) -> str:
        if name in ("exp", "log") and self.dtype is not torch.float64:
            return f"{name}_of({x[0]})"
        return f"__builtin_{name}{self._f()}({', '.join(x)})"

    def power(self, x: str, e: float) -> str:
        """x to a power that is no whole number."""
        if self.dtype is torch.float64:
            return self.call("pow", x, self.const(e))
        if e == 1 / 3:
            return f"cbrt_of({x})"
        return f"pow_of({x}, {e.hex()})"

    def hidden(self, x: str) -> str:
        """An integer that was a float. Where it becomes a float again, g++ would remove the digits
        only, so that zeros keep their sign."""
        return f"({x} ^ {self.once('unseen_zero')})"

    def noise(self, key: str, low: str, high: str, place: str) -> str:
        """A normal number, see `kernels/counters.py`."""
        own = self.once(f"noise_keys({key}, {low}, {high})")
        return f"noise_at<{VALUE[self.dtype]}>({own}, {place})"

    def const(self, x: Any) -> str:
        return self.constant(x, self.dtype)

    def let(self, x: str) -> str:
        return self._named(x, self.lines)

    def once(self, x: str) -> str:
        """A name for what is the same for all elements: g++ leaves choices in loops."""
        return self._named(x, self.outer)

    def _named(self, x: str, lines: list[str]) -> str:
        name = f"s{next(self.names)}"
        lines.append(f"const auto {name} = {x};")
        return name

    def _f(self) -> str:
        return "" if self.dtype is torch.float64 else "f"

    @staticmethod
    def cast(x: str, old: torch.dtype, new: torch.dtype) -> str:
        """A value in another dtype."""
        if old is new or (old in HALF and new is torch.float32):
            return x
        check_no_float8(new)
        if new in HALF:
            return f"to_{HALF[new]}((float){x})"
        if new is torch.bool:
            return f"({x} != 0)"
        if old is torch.bool:  # a choice, of which g++ makes vectors
            return f"({x} ? ({VALUE[new]})1 : ({VALUE[new]})0)"
        if old.is_floating_point and new in SHORT:  # C++ leaves a larger number undefined
            x = f"(int32_t){x}"
        return f"({VALUE[new]}){x}"

    @staticmethod
    def constant(x: Any, dtype: torch.dtype) -> str:
        """A number in a dtype."""
        if dtype is torch.bool:
            return "true" if x else "false"
        if not dtype.is_floating_point:
            return f"({VALUE[dtype]}){int(x)}LL"
        value, kind = float(x), VALUE[dtype]
        if dtype is not torch.float64 and math.isfinite(value):
            value = float(torch.tensor(value, dtype=dtype, device="cpu"))
        if value != value:
            return f'({kind})__builtin_nan("")'
        if math.isinf(value):
            return f"({kind}){'-' if value < 0 else ''}__builtin_inf()"
        return f"({kind}){value.hex()}"

    @staticmethod
    def bits(x: str, old: torch.dtype, new: torch.dtype) -> str:
        """The bits of a value as a value of another dtype."""
        if STORED[old] == VALUE[new]:
            return x if VALUE[old] == VALUE[new] else stored(x, old)
        raw = stored(x, old)
        return f"from_{HALF[new]}({raw})" if new in HALF else f"as<{VALUE[new]}>({raw})"


def load(text: str, dtype: torch.dtype) -> str:
    """An element in memory as a value."""
    return f"from_{HALF[dtype]}({text})" if dtype in HALF else text


def stored(text: str, dtype: torch.dtype) -> str:
    """A value as an element in memory."""
    return f"{HALF[dtype]}_bits({text})" if dtype in HALF else text


HEAD = r"""
#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef __clang__
#define APART __attribute__((noinline))
#else
#define APART __attribute__((noipa)) /* g++ 12 drops calls of functions that it takes for pure */
#endif

typedef void* (*Reader)(void*);
typedef void (*Team)(void (*)(void*), void*, unsigned, unsigned); /* GOMP_parallel */

template <class F> struct Work { const F& each; int64_t count, least, parts, next, threads; };

template <class F> static void work(void* given)
{
    Work<F>& own = *(Work<F>*)given;
    const int64_t thread = __atomic_fetch_add(&own.threads, 1, __ATOMIC_RELAXED);
    for (;;) {
        const int64_t left = own.count - __atomic_load_n(&own.next, __ATOMIC_RELAXED);
        const int64_t some = left / own.parts > own.least ? left / own.parts : own.least;
        int64_t i = __atomic_fetch_add(&own.next, some, __ATOMIC_RELAXED);
        const int64_t stop = i + some < own.count ? i + some : own.count;
        if (i >= stop) return;
        for (; i < stop; ++i) own.each(i, thread);
    }
}

/* Call a function with each of 0, ..., count - 1, and with the index of the thread. Threads of
   torch's own OpenMP runtime, if it has one, each take at least `least` at a time, or a `parts`-th
   of what is left. */
template <class F>
static void share(
    Team team, int64_t threads, int64_t count, int64_t least, int64_t parts, const F& each)
{
    Work<F> own = {each, count, least, parts, 0, 0};
    if (team && threads > 1) team(work<F>, &own, (unsigned)threads, 0);
    else work<F>(&own);
}

template <class A, class B> static inline A as(B x)
{ static_assert(sizeof(A) == sizeof(B), ""); A a; memcpy(&a, &x, sizeof(A)); return a; }
static inline float from_bf16(uint16_t x) { return as<float>((uint32_t)x << 16); }
static inline uint16_t bf16_bits(float x) { return (uint16_t)(as<uint32_t>(x) >> 16); }
static inline float to_bf16(float x)
{
    const uint32_t u = as<uint32_t>(x), r = (u + 0x7fffu + ((u >> 16) & 1)) & 0xffff0000u;
    return as<float>(x != x ? 0x7fc00000u : r);
}
static inline float from_fp16(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000u) << 16, rest = (uint32_t)(x & 0x7fffu) << 13;
    /* not by a product with 2^112: a processor takes a hundred cycles for a float below 2^-126 */
    const uint32_t small = as<uint32_t>(as<float>(rest + 0x38800000u) - 0x1p-14f);
    const uint32_t usual = rest < 0x00800000u ? small : rest + 0x38000000u;
    return as<float>(sign | (rest >= 0x0f800000u ? rest | 0x7f800000u : usual));
}
static inline uint16_t fp16_bits(float x)
{
    const uint32_t u = as<uint32_t>(x), sign = (u >> 16) & 0x8000u, size = u & 0x7fffffffu;
    const uint32_t small = as<uint32_t>(as<float>(size) + 0.5f) - 0x3f000000u;
    const uint32_t usual = (size + 0xc8000fffu + ((size >> 13) & 1)) >> 13;
    const uint32_t large = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return (uint16_t)(sign | (size >= 0x47800000u ? large : size < 0x38800000u ? small : usual));
}
static inline float to_fp16(float x) { return from_fp16(fp16_bits(x)); }

static volatile int32_t unseen_zero;

/* Bytes as int32, and back. */
template <class T>
static inline void widen(int32_t* __restrict__ to, const T* __restrict__ from, int count)
{
    for (int j = 0; j < count; ++j) to[j] = from[j];
}
template <class T>
static inline void narrow(T* __restrict__ to, const int32_t* __restrict__ from, int count)
{
    for (int j = 0; j < count; ++j) to[j] = (T)from[j];
}

struct Tensor {
    const int64_t* size;      /* of the axes; the rows of a chunk, the chunks, the rows of all
                                 processes */
    const int64_t* at;        /* where kept values lie in the scratch memory */
    const int64_t* row;       /* addresses of the parameter and its slots */
    const double* numbers;
    char* scratch;
    void* grad;
};

struct Sum { template <class T> static T of(T a, T b) { return a + b; } };
struct Max { template <class T> static T of(T a, T b) { return a > b || a != a ? a : b; } };
struct Min { template <class T> static T of(T a, T b) { return a < b || a != a ? a : b; } };

/* Put together what the chunks have left, in their order; `none` if there are no chunks. */
template <class How, class T>
static void combine(T* total, const T* parts, int64_t chunks, int64_t length, T none)
{
    for (int64_t j = 0; j < length; ++j) total[j] = chunks ? parts[j] : none;
    for (int64_t k = 1; k < chunks; ++k)
        for (int64_t j = 0; j < length; ++j) total[j] = How::of(total[j], parts[k * length + j]);
}
"""

MATH = r"""
/* Functions of floats, worked out in double: loops over them become vectors, which those over calls
   of a library do not. All but about one result in 10^5 are rounded correctly. */
static inline double series(double x, double a) { return a; }
template <class... More> static inline double series(double x, double a, double b, More... more)
{ return series(x, __builtin_fma(a, x, b), more...); }
static inline double log2_of(float x) /* x > 0 */
{
    const float wide = x < 0x1p-126f ? x * 0x1p24f : x;
    const int32_t bits = as<int32_t>(wide), up = (bits & 0x7fffff) > 0x3504f3;
    const int32_t e = (bits >> 23) - 127 + up - (x < 0x1p-126f ? 24 : 0);
    const double m = as<float>((bits & 0x7fffff) | (up ? 0x3f000000 : 0x3f800000));
    const double t = (m - 1) / (m + 1), s = t * t;
    const double p = series(s, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3,
                            1.0);
    return e + 0x1.71547652b82fep+1 * t * p;
}
static inline float exp2_of(double y)
{
    const double z = y > 200 ? 200 : y < -200 ? -200 : y, n = __builtin_rint(z);
    const double f = (z - n) * 0x1.62e42fefa39efp-1;
    const double p = series(f, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                            1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0);
    return (float)(p * as<double>((int64_t)((int32_t)n + 1023) << 52));
}
static inline float exp_of(float x)
{
    const float y = exp2_of(x * 0x1.71547652b82fep+0);
    return x != x ? x : y;
}
static inline float log_of(float x)
{
    const float y = (float)(log2_of(x) * 0x1.62e42fefa39efp-1);
    const float z = x == __builtin_inff() ? x : y;
    return x > 0 ? z : x == 0 ? -__builtin_inff() : __builtin_nanf("");
}
static inline float pow_of(float x, double e) /* e is no whole number */
{
    const float y = exp2_of(e * log2_of(x));
    const float low = e > 0 ? 0 : __builtin_inff(), high = e > 0 ? __builtin_inff() : 0;
    const float z = x == __builtin_inff() ? high : y;
    return x > 0 ? z : x == 0 ? low : x == -__builtin_inff() ? high : __builtin_nanf("");
}
/* One over the cube root of x: by its bits, off by 4 %, and one step of fifth order. */
static inline float near_inverse_cbrt(float x) /* 2^-126 <= x < inf */
{
    const float y = as<float>(0x54a2fa8c - (int32_t)((float)as<int32_t>(x) * (1.0f / 3)));
    const float e = __builtin_fmaf(x * y, -(y * y), 1.0f);
    const float p = __builtin_fmaf(__builtin_fmaf(e, 35.0f / 243, 14.0f / 81), e, 2.0f / 9);
    return __builtin_fmaf(y * e, __builtin_fmaf(p, e, 1.0f / 3), y);
}
static inline float cbrt_of(float given) /* at last a step of Newton's, with x - y^3 as it is */
{
    const float x = given + 0.0f;
    /* choices as bits: of two scales g++ would make both roots */
    const int32_t bits = as<int32_t>(x), small = -(int32_t)(bits < 0x21800000);
    const float wide = x * as<float>(0x3f800000 + (small & 0x24000000)); /* by 2^72 */
    const float z = near_inverse_cbrt(wide), zz = z * z, y = wide * zz, s = y * y;
    const float rest = __builtin_fmaf(-__builtin_fmaf(y, y, -s), y, __builtin_fmaf(-s, y, wide));
    const float root = __builtin_fmaf(rest, zz * (1.0f / 3), y);
    const float found = root * as<float>(0x3f800000 - (small & 0x0c000000)); /* by 2^-24 */
    const uint32_t other = (bits & 0x7fffffff) == 0x7f800000 ? 0x7f800000u : 0x7fc00000u;
    return as<float>((uint32_t)bits < 0x7f800000u ? as<uint32_t>(found) : other);
}
"""

CALL = """
extern "C" void SYMBOL(const int64_t* call)
{{
    const int64_t *table = (const int64_t*)call[0], *rows = (const int64_t*)call[2];
    const int64_t first = call[1], count = call[4], threads = call[6], several = {several};
    const int64_t* given = (const int64_t*)call[3];
    const double* numbers = (const double*)call[5];
    double *totals = (double*)call[7], *parts = (double*)call[10];
    const Reader read = (Reader)call[8];
    const Team team = (Team)call[9];
    int64_t* grads = (int64_t*)(parts + {outputs} * several);
    for (int64_t i = 0; i < count; ++i)
        grads[i] = read ? (int64_t)read((void*)given[i]) : given[i];
    memset(parts, 0, 8 * {outputs} * several);
    {body}
    for (int64_t i = 0; i < several; ++i)
        for (int64_t j = 0; j < {outputs}; ++j) totals[j] += parts[{outputs} * i + j];
}}
"""
"""What each call does: it reads the addresses of the gradients, and adds up what was found."""

BLOCKS = """
    auto block = [&](int64_t b, int64_t) {{
        const int64_t* own = table + 3 * b;
        const Tensor t = {{nullptr, nullptr, rows + {width} * own[0], numbers, nullptr,
                          (void*)grads[own[0]]}};
        chunk0(t, own[1], own[2], parts + {outputs} * b);
    }};
    const int64_t least = several < 1024 ? 1 : 8; /* of few blocks, eight are a long wait */
    share(team, threads, several, least, 2 * threads, block);
"""
"""Goes over blocks of tensors, each of which is computed separately."""

PHASES = """
    const int64_t alone = call[13], own = call[14], phase = call[15]; /* -1: all of them */
    const int64_t* const homes = (const int64_t*)call[16]; /* of tensors whose phases are apart */
    const int64_t* order = (const int64_t*)call[11];
    char* const scratch = (char*)call[12];
    auto tensor = [&](int64_t i, char* memory) {{
        const int64_t* mine = table + {columns} * i;
        return Tensor{{mine, mine + {places}, rows + {width} * i, numbers, memory,
                      (void*)grads[i]}};
    }};
    auto step = [&](const Tensor& t, double* found, auto each) {{
        {steps}
    }};
    /* scratch memory: for each thread what belongs to rows, then that of tensors */
    char* const shared = scratch + own * threads;
    for (int64_t b = 0; b < first; ++b) {{
        const Tensor t = tensor(order[b], homes ? (char*)homes[order[b]] : shared);
        const int64_t chunks = t.size[{sizes} + 1];
        step(t, parts + {outputs} * order[b], [&](auto chunk) {{
            share(team, threads, chunks, 2, chunks, [&](int64_t k, int64_t thread) {{
                chunk(k, scratch + own * thread);
            }});
        }});
    }}
    share(team, threads, count - first, 1, count, [&](int64_t i, int64_t thread) {{
        const int64_t b = first + i;
        char* const memory = homes ? (char*)homes[order[b]] : shared + alone * thread;
        const Tensor t = tensor(order[b], memory);
        const int64_t chunks = t.size[{sizes} + 1];
        step(t, parts + {outputs} * order[b], [&](auto chunk) {{
            for (int64_t k = 0; k < chunks; ++k) chunk(k, scratch + own * thread);
        }});
    }});
"""
"""Goes over tensors, through all of their phases: large ones by all threads, then small ones by one
each."""
