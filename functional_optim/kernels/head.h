/* What every library begins with. */

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
