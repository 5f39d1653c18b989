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
