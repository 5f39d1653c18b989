/* Normal numbers of a counter, whose constants `counters.py` defines. */

static inline float poly(float, float a) { return a; }
template <class... More> static inline float poly(float x, float a, float b, More... more)
{ return poly(x, __builtin_fmaf(a, x, b), more...); }

/* Two independent normal numbers: Box and Muller. The radius is that of a word x. The angle is at
   most an eighth of a turn, that of an int32; whether cosine and sine change places, and their
   signs, as the first bits of words, say in which eighth it is. Logarithm, cosine and sine are
   polynomials, whose largest errors are about those of rounding. */
static inline void deviates(float& a, float& b, const uint32_t x, const int32_t rest,
                            const bool swap, const uint32_t sign_a, const uint32_t sign_b)
{
    const float u = __builtin_fmaf((float)x, 0x1p-32f, 0x1p-33f);
    const int32_t bits = as<int32_t>(u), above = bits - 0x3f3504f3; /* than the root of a half */
    const float e = (float)(above >> 23);
    const float h = __builtin_fmaf(as<float>(bits - (above & ~0x7fffff)), -2, 2);
    const float p = poly(h, 0x1.9cf96ep-11f, 0x1.4b606ep-9f, 0x1.612428p-8f, 0x1.97b166p-7f,
                         0x1.ff6928p-6f, 0x1.5558f4p-4f, 0x1.00006cp-2f);
    const float size = __builtin_fmaf(e, -0x1.62e43p+0f, __builtin_fmaf(h * h, p, h));
    const float radius = __builtin_sqrtf(size);
    const float t = (float)rest * (float)(0x1.921fb54442d18p-1 * 0x1p-31), q = t * t;
    const float sine = __builtin_fmaf(
        t * q, poly(q, -0x1.994eb4p-13f, 0x1.11076p-7f, -0x1.555546p-3f), t);
    const float cosine = poly(q, -0x1.65e40ap-10f, 0x1.554a08p-5f, -0.5f, 1.0f);
    a = as<float>(as<uint32_t>(radius * (swap ? sine : cosine)) ^ (sign_a & 0x80000000u));
    b = as<float>(as<uint32_t>(radius * (swap ? cosine : sine)) ^ (sign_b & 0x80000000u));
}
static inline void deviates(double& a, double& b, const uint32_t x, const int32_t rest,
                            const bool swap, const uint32_t sign_a, const uint32_t sign_b)
{
    const double radius = __builtin_sqrt(-2 * __builtin_log(((double)x + 0.5) * 0x1p-32));
    const double t = (double)rest * (0x1.921fb54442d18p-1 * 0x1p-31);
    const double sine = radius * __builtin_sin(t), cosine = radius * __builtin_cos(t);
    a = swap ? sine : cosine, b = swap ? cosine : sine;
    a = sign_a >> 31 ? -a : a, b = sign_b >> 31 ? -b : b;
}

/* The keys of a step, for that of a tensor and the words of a step count: SplitMix64. */
struct Keys { uint64_t first, second; };
static inline uint64_t mixed(uint64_t z, const uint64_t key)
{
    z = (z ^ (z >> 30)) * FIRST;
    z = (z ^ (z >> 27) ^ key) * SECOND;
    return z ^ (z >> 31);
}
static inline Keys noise_keys(const int64_t key, const double low, const double high)
{
    const uint64_t step = 2 * ((uint64_t)low + ((uint64_t)high << WORD));
    return Keys{mixed((uint64_t)key + (step + 1) * GOLDEN, 0),
                mixed((uint64_t)key + (step + 2) * GOLDEN, 0)};
}

/* Two numbers of words x and y. */
template <class T> static inline void of_words(T& a, T& b, const uint32_t x, const uint32_t y)
{
    deviates(a, b, x, (int32_t)(y << 3), (int32_t)y < 0, y << 1, y << 2);
}

/* The noise of groups of elements: at least as many as there are elements. start: the first one, of
   a group. */
#ifdef __AVX512F__
enum { WIDE = 8 }; /* words of a vector: of one that is too long, g++ makes scalars */
#else
enum { WIDE = 4 };
#endif
typedef uint64_t Words __attribute__((vector_size(8 * WIDE)));
template <class T>
static inline void noise(T* __restrict__ out, const Keys keys, const int64_t start,
                         const int64_t count)
{
    const uint64_t odd = keys.second | 1, i = (uint64_t)start / 2;
    Words at[8 / WIDE], zero = {};
    for (int k = 0; k < 8; ++k)
        at[k / WIDE][k % WIDE] = keys.first + (k + i) * odd;
    const Words next = zero + 8 * odd, key = zero + keys.second;
    const Words first = zero + FIRST, second = zero + SECOND;
    for (int64_t j = 0; j < count; j += GROUP) {
        uint32_t words[2][LANES];
        for (auto& own : words) {
            for (int h = 0; h < 8 / WIDE; ++h) {
                Words z = at[h];
                z = (z ^ (z >> 30)) * first;
                z = (z ^ (z >> 27) ^ key) * second;
                z ^= z >> 31;
                memcpy(own + 2 * WIDE * h, &z, sizeof(z));
                at[h] += next;
            }
        }
#pragma omp simd
        for (int k = 0; k < LANES; ++k)
            of_words(out[j + k], out[j + LANES + k], words[0][k], words[1][k]);
    }
}

/* The noise of one element. */
template <class T> static inline T noise_at(const Keys keys, const int64_t place)
{
    const uint64_t lane = (uint64_t)place % LANES, odd = keys.second | 1;
    const uint64_t i = (uint64_t)place / GROUP * LANES + lane / 2;
    const uint64_t x = mixed(keys.first + i * odd, keys.second);
    const uint64_t y = mixed(keys.first + (i + LANES / 2) * odd, keys.second);
    const uint64_t shift = lane % 2 * 32;
    T a, b;
    of_words(a, b, (uint32_t)(x >> shift), (uint32_t)(y >> shift));
    return place & LANES ? b : a;
}
