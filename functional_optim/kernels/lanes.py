"""C++ of a program that solves many problems, eight at a time, each in one lane of vectors.

A value of a problem is an array of vectors: one vector for each of its elements, with that element
of eight problems, or of four if a vector of the processor holds four numbers. All operations act on
single lanes, so the bits of a problem do not depend on its neighbours. A lane whose problem has
finished gets the next one.
"""

from __future__ import annotations

from typing import Any

import torch

from functional_optim.kernels.cpp import HEAD, Cpp
from functional_optim.kernels.node import Unsuitable
from functional_optim.kernels.points import FUNCTIONS

VECTOR = {
    torch.float64: "D",
    torch.float32: "F",
    torch.int64: "I",
    torch.int32: "I",
    torch.bool: "I",
}
"""The vector of a value. That of bools is a mask: 0 or −1."""


class Lanes(Cpp):
    """A printer of operations on vectors. Each function is overloaded for the types of vectors."""

    eq, ne = (lambda self, x, y, _s=s: f"{_s}({x}, {y})" for s in ("eq", "ne"))
    lt, le, gt, ge = (
        lambda self, x, y, _s=s: self._ordered(_s, x, y) for s in ("lt", "le", "gt", "ge")
    )

    def _ordered(self, sign: str, x: str, y: str) -> str:
        """A comparison. The mask of true, −1, is below that of false."""
        return f"{sign}({y}, {x})" if self.dtype is torch.bool else f"{sign}({x}, {y})"

    def not_(self, x: str) -> str:
        return f"(~{x})"

    def abs(self, x: str) -> str:
        return f"abs_of({x})"

    def sqrt(self, x: str) -> str:
        return f"sqrt_of({x})"

    def fma(self, x: str, y: str, z: str) -> str:
        return f"fma_of({x}, {y}, {z})"

    def _larger(self, x: str, y: str, sign: str) -> str:
        if self.dtype is torch.bool:
            return f"({x} {'|' if sign == '>' else '&'} {y})"
        return f"{'larger' if sign == '>' else 'smaller'}({x}, {y})"

    def select(self, c: str, x: str, y: str) -> str:
        return f"choice({c}, {x}, {y})"

    def call(self, name: str, *x: str) -> str:
        return f"{name}_of({', '.join(x)})"

    def power(self, x: str, e: float) -> str:
        return f"pow_of({x}, {self.const(e)})"

    @staticmethod
    def cast(x: str, old: torch.dtype, new: torch.dtype) -> str:
        check(old)
        check(new)
        if new is torch.int32 and old is torch.int64:
            return Lanes.wrapped(x)
        if old is new or (VECTOR[old] == VECTOR[new] and torch.bool not in (old, new)):
            return x
        if new is torch.bool:
            return f"ne({x}, {Lanes.constant(0, old)})"
        if old is torch.bool:
            return f"choice({x}, {Lanes.constant(1, new)}, {Lanes.constant(0, new)})"
        return f"__builtin_convertvector({x}, {VECTOR[new]})"

    @staticmethod
    def wrapped(x: str) -> str:
        """An int64 as an int32 that has run over."""
        return f"(({x} << 32) >> 32)"

    @staticmethod
    def constant(x: Any, dtype: torch.dtype) -> str:
        check(dtype)
        if dtype is torch.bool:
            return f"all_I({-1 if x else 0})"
        wide = torch.int64 if dtype is torch.int32 else dtype
        return f"all_{VECTOR[dtype]}({Cpp.constant(x, wide)})"

    @staticmethod
    def bits(x: str, old: torch.dtype, new: torch.dtype) -> str:
        raise Unsuitable("the bits of a value")

    @staticmethod
    def shared(text: str, dtype: torch.dtype) -> str:
        """An element in memory that all problems share."""
        return f"all_{VECTOR[dtype]}({'-' if dtype is torch.bool else ''}({text}))"


def check(dtype: torch.dtype) -> None:
    """Raise Unsuitable for a dtype that has no vectors."""
    if dtype not in VECTOR:
        raise Unsuitable(f"a value in {dtype}")


UNARY = (*[x for x in FUNCTIONS if x != "exp"], "floor", "ceil", "trunc", "rint", "sqrt")
BINARY = ("pow", "atan2", "hypot", "copysign")

VECTORS = r"""
#pragma GCC optimize ("O2") /* the vectors are written out: a third of the time of O3 */

#ifdef __AVX512F__
#define LANES 8
#else
#define LANES 4 /* compilers split wider vectors into single elements */
#endif

typedef double D __attribute__((vector_size(8 * LANES)));
typedef float F __attribute__((vector_size(4 * LANES)));
typedef int64_t I __attribute__((vector_size(8 * LANES)));
typedef int32_t N __attribute__((vector_size(4 * LANES)));
#define LANE(x, l) (x)[l]
#define LOOP

/* distances in scratch memory are those between vectors of eight numbers */
struct Scratch
{ char* memory; char* operator+(int64_t x) const { return memory + x / 8 * LANES; } };

static inline D all_D(double x) { return x - D{}; }
static inline F all_F(float x) { return x - F{}; }
static inline I all_I(int64_t x) { return x - I{}; }
static inline I wide(N x) { return __builtin_convertvector(x, I); }

#define COMPARISON(NAME, SIGN) \
static inline I NAME(D a, D b) { return (I)(a SIGN b); } \
static inline I NAME(F a, F b) { return wide((N)(a SIGN b)); } \
static inline I NAME(I a, I b) { return (I)(a SIGN b); }
COMPARISON(lt, <) COMPARISON(le, <=) COMPARISON(gt, >) COMPARISON(ge, >=)
COMPARISON(eq, ==) COMPARISON(ne, !=)

static inline D choice(I c, D a, D b) { return c ? a : b; }
static inline F choice(I c, F a, F b) { return __builtin_convertvector(c, N) ? a : b; }
static inline I choice(I c, I a, I b) { return c ? a : b; }

static inline D abs_of(D x) { return (D)((I)x & all_I(INT64_MAX)); }
static inline F abs_of(F x) { return choice(lt(x, all_F(0)), -x, x) + all_F(0); }
static inline I abs_of(I x) { return choice(lt(x, all_I(0)), -x, x); }

#define UNARY(NAME) \
static inline D NAME##_of(D x) \
{ D y; for (int l = 0; l < LANES; ++l) y[l] = __builtin_##NAME(x[l]); return y; } \
static inline F NAME##_of(F x) \
{ F y; for (int l = 0; l < LANES; ++l) y[l] = (float)__builtin_##NAME((double)x[l]); return y; }
#define BINARY(NAME) \
static inline D NAME##_of(D x, D z) \
{ D y; for (int l = 0; l < LANES; ++l) y[l] = __builtin_##NAME(x[l], z[l]); return y; } \
static inline F NAME##_of(F x, F z) \
{ \
    F y; \
    for (int l = 0; l < LANES; ++l) y[l] = (float)__builtin_##NAME((double)x[l], z[l]); \
    return y; \
}
"""

EXTREMES = r"""
/* NaN of either */
template <class T> static inline T larger(T a, T b)
{ return choice(ne(a, a), a, choice(gt(a, b), a, b)); }
template <class T> static inline T smaller(T a, T b)
{ return choice(ne(a, a), a, choice(lt(a, b), a, b)); }
"""

FUNCTIONS = r"""
static inline D fma_of(D x, D z, D a)
{ D y; for (int l = 0; l < LANES; ++l) y[l] = __builtin_fma(x[l], z[l], a[l]); return y; }
static inline F fma_of(F x, F z, F a)
{ F y; for (int l = 0; l < LANES; ++l) y[l] = __builtin_fmaf(x[l], z[l], a[l]); return y; }

/* exp(n log 2 + f) = 2^n exp(f) with |f| <= log(2) / 2; off by less than one unit in the last
   place. 2^n in two factors, for results below the smallest normal number. */
static inline D exp_of(D x)
{
    const D z = smaller(larger(x, all_D(-746)), all_D(710));
    const D n = rint_of(z * 0x1.71547652b82fep+0);
    const D near = fma_of(n, all_D(-0x1.62e42fefa39efp-1), z);
    const D f = fma_of(n, all_D(-0x1.abc9e3b39803fp-56), near);
    D p = all_D(1.0 / 6227020800);
    p = fma_of(p, f, all_D(1.0 / 479001600)); p = fma_of(p, f, all_D(1.0 / 39916800));
    p = fma_of(p, f, all_D(1.0 / 3628800)); p = fma_of(p, f, all_D(1.0 / 362880));
    p = fma_of(p, f, all_D(1.0 / 40320)); p = fma_of(p, f, all_D(1.0 / 5040));
    p = fma_of(p, f, all_D(1.0 / 720)); p = fma_of(p, f, all_D(1.0 / 120));
    p = fma_of(p, f, all_D(1.0 / 24)); p = fma_of(p, f, all_D(1.0 / 6));
    p = fma_of(p, f, all_D(0.5)); p = fma_of(p, f, all_D(1.0)); p = fma_of(p, f, all_D(1.0));
    const I whole = __builtin_convertvector(n, I), half = whole >> 1;
    const D low = (D)((half + 1023) << 52), high = (D)((whole - half + 1023) << 52);
    return choice(ne(x, x), x, p * low * high);
}
static inline F exp_of(F x)
{ return __builtin_convertvector(exp_of(__builtin_convertvector(x, D)), F); }
static inline D gathered(const D* x, int step, int count, I index) /* NaN where nothing is */
{
    D y;
    for (int l = 0; l < LANES; ++l)
        y[l] = (uint64_t)index[l] < (uint64_t)count ? x[index[l] * step][l] : __builtin_nan("");
    return y;
}
"""

MATRICES = r"""
static inline void cholesky(D* __restrict__ l, const D* __restrict__ a, int n)
{
    LOOP for (int i = 0; i < n; ++i) {
        LOOP for (int j = 0; j <= i; ++j) {
            D t = a[i * n + j];
            LOOP for (int k = 0; k < j; ++k) t -= l[i * n + k] * l[j * n + k];
            l[i * n + j] = i == j ? sqrt_of(t) : t / l[j * n + j];
        }
        LOOP for (int j = i + 1; j < n; ++j) l[i * n + j] = all_D(0);
    }
}
/* [A | b] in w, n rows, eliminated with the largest pivots; the solution is where w begins. */
static inline I solved(D* __restrict__ w, const D* __restrict__ a, const D* __restrict__ b, int n,
                       int count)
{
    const int wide = n + count;
    I failed = all_I(0);
    LOOP for (int i = 0; i < n; ++i) {
        LOOP for (int j = 0; j < n; ++j) w[i * wide + j] = a[i * n + j];
        LOOP for (int j = 0; j < count; ++j) w[i * wide + n + j] = b[i * count + j];
    }
    LOOP for (int k = 0; k < n; ++k) {
        LOOP for (int i = k + 1; i < n; ++i) {
            const I swap = gt(abs_of(w[i * wide + k]), abs_of(w[k * wide + k]));
            LOOP for (int j = k; j < wide; ++j) {
                const D x = w[k * wide + j], y = w[i * wide + j];
                w[k * wide + j] = choice(swap, y, x);
                w[i * wide + j] = choice(swap, x, y);
            }
        }
        failed |= eq(w[k * wide + k], all_D(0));
        LOOP for (int i = k + 1; i < n; ++i) {
            const D factor = w[i * wide + k] / w[k * wide + k];
            LOOP for (int j = k + 1; j < wide; ++j) w[i * wide + j] -= factor * w[k * wide + j];
        }
    }
    LOOP for (int c = n; c < wide; ++c)
        LOOP for (int i = n - 1; i >= 0; --i) {
            D t = w[i * wide + c];
            LOOP for (int k = i + 1; k < n; ++k) t -= w[i * wide + k] * w[k * wide + c];
            w[i * wide + c] = t / w[i * wide + i];
        }
    LOOP for (int i = 0; i < n; ++i)
        LOOP for (int j = 0; j < count; ++j) w[i * count + j] = w[i * wide + n + j];
    return failed;
}
/* Insertion into what is in order so far; NaN last. Of equal elements the first stays first. */
template <class T> static inline void ranked(T* v, I* order, const T* x, int n)
{
    LOOP for (int i = 0; i < n; ++i) {
        T value = x[i];
        I place = all_I(i), moved = all_I(0);
        LOOP for (int j = 0; j < i; ++j) {
            const I less = moved | lt(value, v[j]) | (ne(v[j], v[j]) & eq(value, value));
            const T kept = v[j];
            const I there = order[j];
            v[j] = choice(less, value, kept);
            order[j] = choice(less, place, there);
            value = choice(less, kept, value);
            place = choice(less, there, place);
            moved = less;
        }
        v[i] = value;
        order[i] = place;
    }
}
static inline I positive(const D* l, int n)
{
    I found = all_I(-1);
    LOOP for (int i = 0; i < n; ++i) found &= gt(l[i * n + i], all_D(0));
    return found;
}
"""

DRIVER = r"""
/* Lanes of problems that run; each thread takes the next problem when a lane is free. */
extern "C" void SYMBOL(const int64_t* call)
{{
    const int64_t count = call[0], most = call[1], threads = call[2], begins = call[4];
    const int64_t* const at = call + 5;
    int64_t next = 0;
    auto own = [&](int64_t, int64_t) {{
        const int64_t size = (sizeof(State) + 63) / 64 * 64;
        char* const memory = (char*)aligned_alloc(64, size + {scratch});
        State& s = *(State*)memory;
        const Scratch scratch = {{memory + size}};
        int64_t id[LANES], steps[LANES], used = 0;
        auto take = [&](int l) {{
            for (;;) {{
                id[l] = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
                if (id[l] >= count) {{ id[l] = -1; return false; }}
                if (begins || running(at, id[l])) break;
            }}
            load(s, at, id[l], l);
            steps[l] = 0;
            return true;
        }};
        for (int l = 0; l < LANES; ++l) used += take(l);
        for (int l = 0; used && l < LANES; ++l) /* empty lanes repeat another problem */
            for (int k = 0; id[l] < 0 && k < LANES; ++k)
                if (id[k] >= 0) {{ load(s, at, id[k], l); break; }}
        while (used) {{
            if (begins) start(s, at, scratch); else advance(s, at, scratch);
            for (int l = 0; l < LANES; ++l) {{
                if (id[l] < 0 || (!begins && s.{status}[0][l] == {running} && ++steps[l] < most))
                    continue;
                store(s, at, id[l], l);
                used -= !take(l);
            }}
        }}
        free(memory);
    }};
    const int64_t parts = threads > 1 && count > 16 ? threads : 1;
    share((Team)call[3], parts, parts, 1, parts, own);
}}
"""

PRELUDE = (
    HEAD
    + VECTORS
    + "\n".join([f"UNARY({x})" for x in UNARY])
    + "\n".join(["", *[f"BINARY({x})" for x in BINARY]])
    + EXTREMES
    + FUNCTIONS
    + MATRICES
)
