/* Decimal digits of floats for one instruction set. An including file defines NAME, LANES and TARGET.
 *
 * They are the fewest that are read back as the same float; one more where they lie within a millionth of a unit of
 * the ninth digit of the middle between two floats, and nine for a subnormal number. A value is scaled to s in
 * [1e8, 2e9), which a double says within 7e-7. The multiple of 1000, 100 or 10 next to it is taken, if it lies within
 * half of the step between floats there. That step is 11.9 or more, so that a multiple of 10 is always found, but for
 * powers of two, below which it is half as large. */
TARGET static void NAME(const uint8_t *values, digits *to) {
    typedef float floats __attribute__((vector_size(4 * LANES)));
    typedef int32_t ints __attribute__((vector_size(4 * LANES)));
    typedef double doubles __attribute__((vector_size(8 * LANES)));
    typedef int64_t longs __attribute__((vector_size(8 * LANES)));
    typedef uint32_t halves __attribute__((vector_size(8 * LANES)));
    typedef uint16_t quarters __attribute__((vector_size(8 * LANES)));
#define ROUND(x) ((x) + 0x1.8p52 - 0x1.8p52) /* to the nearest integer */
#define INTEGER_OF(x) ((longs)((x) + 0x1p52) & UINT32_MAX)
#define ABSOLUTE(x) ((doubles)((longs)(x) & INT64_MAX))
#define CHOOSE(mask, a, b) ((doubles)(((longs)(a) & (mask)) | ((longs)(b) & ~(mask))))
    for (int at = 0; at < AT_ONCE; at += LANES) {
        ints bits;
        doubles scale;
        longs exponent;
        memcpy(&bits, values + 4 * at, sizeof bits);
        for (int i = 0; i < LANES; i++) {
            const power of = power_of((uint32_t)bits[i]);
            scale[i] = of.scale, exponent[i] = of.exponent;
        }
        const doubles value = __builtin_convertvector((floats)(bits & 0x7fffffff), doubles), s = value * scale;
        const doubles power_of_2 = __builtin_convertvector((floats)(bits & 0x7f800000), doubles);
        doubles half = power_of_2 * scale * 0x1p-24;
        half = CHOOSE(value == power_of_2, half * 0.5, half) - 1e-6;
        const doubles by_10 = ROUND(s * 1e-1) * 1e1, by_100 = ROUND(s * 1e-2) * 1e2, by_1000 = ROUND(s * 1e-3) * 1e3;
        doubles found = CHOOSE(ABSOLUTE(by_10 - s) < half, by_10, ROUND(s));
        found = CHOOSE(ABSOLUTE(by_100 - s) < half, by_100, found);
        found = CHOOSE(ABSOLUTE(by_1000 - s) < half, by_1000, found);
        const longs is_long = found >= 1e9; /* ten digits, the last of which is 0 */
        found = CHOOSE(is_long, ROUND(found * 0.1), found), exponent -= is_long;
        /* The first digit, and the others as two numbers of four, then as four of two, then as eight of one. */
        const doubles first = ROUND(found * 1e-8 - 0.499999999), others = found - first * 1e8;
        const doubles high = ROUND(others * 1e-4 - 0.49999), low = others - high * 1e4;
        const longs one = INTEGER_OF(first), fours = INTEGER_OF(high) | INTEGER_OF(low) << 32;
        halves twos = ((halves)fours * 10486) >> 20;
        twos |= ((halves)fours - 100 * twos) << 16;
        quarters ones = ((quarters)twos * 103) >> 10;
        ones |= ((quarters)twos - 10 * ones) << 8;
        memcpy(to->first + at, &one, sizeof one);
        memcpy(to->others + at, &ones, sizeof ones);
        memcpy(to->exponent + at, &exponent, sizeof exponent);
    }
#undef ROUND
#undef INTEGER_OF
#undef ABSOLUTE
#undef CHOOSE
}
#undef NAME
#undef LANES
#undef TARGET
