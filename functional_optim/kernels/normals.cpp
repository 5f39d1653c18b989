/* Normal numbers, filled into memory. */

/* The two words of Philox for a counter. */
static inline void philox(uint32_t& x, uint32_t& y, const uint64_t i, const uint64_t key)
{
    x = (uint32_t)i, y = (uint32_t)(i >> 32) ^ (uint32_t)(key >> 32);
#pragma GCC unroll 16
    for (uint32_t k = 0; k < ROUNDS; ++k) {
        const uint64_t p = (uint64_t)x * MULTIPLIER;
        x = (uint32_t)(p >> 32) ^ ((uint32_t)key + k * WEYL) ^ y;
        y = (uint32_t)p;
    }
}

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
