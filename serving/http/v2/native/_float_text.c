#include "_float_text.h"
#include <string.h>
#if defined(__x86_64__)
#include "_processor.h"
#endif

enum { AT_ONCE = 8, LEAST_FIXED = -6, MOST_FIXED = 7 }; /* exponents of numbers that are written without one */

/* Of floats: the first of nine digits, the others, one a byte, and the decimal exponent of the first one. */
typedef struct { int64_t first[AT_ONCE]; uint64_t others[AT_ONCE]; int64_t exponent[AT_ONCE]; } digits;

/* What a float is multiplied with to have nine or ten digits before the point, and the exponent of the first of
 * nine. */
typedef struct { double scale; int64_t exponent; } power;
enum { EXPONENTS = 256, BITS = 23 };
static power powers[EXPONENTS + BITS]; /* by a float's exponent, and of subnormal ones by their highest bit */

/* 10 ** k, which is rounded at most twice for |k| <= 44. */
static double ten_to(int k) {
    double found = 1;
    for (int left = k < 0 ? -k : k; left;) {
        double exact = 1;
        for (int n = 0; n < 22 && left; n++, left--) exact *= 10;
        found *= exact;
    }
    return k < 0 ? 1 / found : found;
}

static power power_to(double least) {
    int k = -30;
    while (least * ten_to(k) < 1e8) k++;
    return (power){ten_to(k), 8 - k};
}

static inline power power_of(uint32_t bits) {
    const int exponent = bits >> BITS & 255;
    return powers[exponent || !(bits << 1) ? exponent : EXPONENTS + 31 - __builtin_clz(bits & 0x7fffff)];
}

#define NAME digits_portable
#define LANES 4
#define TARGET
#include "_digits.h"
#if defined(__x86_64__)
#define NAME digits_avx2
#define LANES 4
#define TARGET __attribute__((target("avx2,fma")))
#include "_digits.h"
#define NAME digits_avx512
#define LANES 8
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#include "_digits.h"
#endif
static void (*find_digits)(const uint8_t *values, digits *to) = digits_portable;

int begin_float_text(int most) {
    double least = 0x1p-149;
    int level = 0;
    for (int bit = 0; bit < BITS; bit++, least *= 2) powers[EXPONENTS + bit] = power_to(least);
    for (int exponent = 1; exponent < EXPONENTS - 1; exponent++, least *= 2) powers[exponent] = power_to(least);
    find_digits = digits_portable;
    (void)most;
#if defined(__x86_64__)
    const processor here = find_processor();
    if (here.avx2 && most >= 1) find_digits = digits_avx2, level = 1;
    if (here.avx512 && most >= 2) find_digits = digits_avx512, level = 2;
#endif
    return level;
}

/* Writes the first n of nine digits with an exponent. */
static char *write_scientific(const char *nine, int64_t n, int64_t exponent, char *to) {
    *to++ = nine[0], *to++ = '.';
    memcpy(to, nine + 1, 8);
    to += n > 1 ? n - 1 : 1;
    *to++ = 'e', *to++ = exponent < 0 ? '-' : '+';
    if (exponent < 0) exponent = -exponent;
    *to++ = (char)('0' + exponent / 10), *to++ = (char)('0' + exponent % 10);
    return to;
}

static inline char *write_one(uint32_t bits, const digits *of, int i, char *to) {
    char zeros_and_digits[48] = "00000000", *const nine = zeros_and_digits + 8;
    const uint64_t others = of->others[i], text = others | 0x3030303030303030;
    const int64_t exponent = of->exponent[i], n = others ? 9 - (__builtin_clzll(others) >> 3) : 1;
    if ((bits & 0x7f800000) == 0x7f800000) return memcpy(to, "null", 4), to + 4;
    nine[0] = (char)('0' + of->first[i]);
    memcpy(nine + 1, &text, 8);
    *to = '-', to += bits >> 31;
    if (exponent < LEAST_FIXED || exponent > MOST_FIXED) return write_scientific(nine, n, exponent, to);
    /* 16 bytes before the point and 16 behind it, of which the next number overwrites what is too much. */
    const int64_t zeros = exponent < 0 ? -exponent : 0, whole = exponent < 0 ? 1 : exponent + 1;
    const char *from = nine - zeros;
    memcpy(to, from, 16), memcpy(to + whole + 1, from + whole, 16);
    to[whole] = '.';
    return to + (n + zeros > whole ? n + zeros : whole + 1) + 1;
}

/* An fp16 number as a float. */
static inline float widened(uint16_t half) {
    union { uint32_t bits; float value; } found = {(uint32_t)(half & 0x7fff) << 13};
    found.value *= 0x1p112f;
    if ((half & 0x7c00) == 0x7c00) found.bits |= 0x7f800000;
    found.bits |= (uint32_t)(half & 0x8000) << 16;
    return found.value;
}

char *write_floats(const uint8_t *values, int is_half, int64_t n, char *to) {
    digits of;
    for (int64_t at = 0; at < n; at += AT_ONCE) {
        const int64_t count = n - at < AT_ONCE ? n - at : AT_ONCE;
        const uint8_t *from = values + 4 * at;
        float some[AT_ONCE] = {0};
        if (is_half) {
            uint16_t halves[AT_ONCE] = {0};
            memcpy(halves, values + 2 * at, 2 * (size_t)count);
            for (int i = 0; i < AT_ONCE; i++) some[i] = widened(halves[i]);
            from = (const uint8_t *)some;
        } else if (count < AT_ONCE) from = memcpy(some, from, 4 * (size_t)count);
        find_digits(from, &of);
        for (int i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, from + 4 * i, 4);
            to = write_one(bits, &of, i, to);
            *to++ = ',';
        }
    }
    return n ? to - 1 : to;
}

char *write_vectors(const vectors *of, int64_t n, char *to) {
    *to++ = '{';
    for (const vectors *v = of; v < of + n; v++) {
        memcpy(to, v->label.p, (size_t)v->label.n), to += v->label.n;
        *to++ = ':', *to++ = '[';
        for (int64_t k = 0; k < v->count; k++) {
            *to++ = '[';
            to = write_floats(v->values + k * v->dim * (v->is_half ? 2 : 4), v->is_half, v->dim, to);
            *to++ = ']', *to++ = ',';
        }
        to -= v->count > 0;
        *to++ = ']', *to++ = ',';
    }
    to -= n > 0;
    *to++ = '}';
    return to;
}
