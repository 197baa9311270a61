/* A strict reader of JSON text (RFC 8259), one value after another, which allocates nothing but room for
 * strings with escapes. Whatever is no JSON, or nested deeper than MOST_DEPTH, ends the reading with 0. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { MOST_DEPTH = 1024 };

/* A string with its escapes replaced. */
typedef struct { const char *p; int64_t n; } text;

/* arena: room for the strings with escapes; they are no longer than what they are read from. */
typedef struct { const char *p, *end; char *arena; int64_t arena_used, arena_bytes; int depth; } scanner;

/* What a member of an object is, where the reader only asks for an integer, a string or a flag. */
enum kind { ABSENT, INTEGER, STRING, YES, NO, OTHER };
typedef struct { enum kind kind; union { int64_t integer; text string; }; } scalar;

static inline int is_digit(char c) { return c >= '0' && c <= '9'; }

static inline void skip_space(scanner *s) {
    if (s->p < s->end && (unsigned char)*s->p > ' ') return;
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\n' || *s->p == '\t' || *s->p == '\r')) s->p++;
}

/* Takes one character behind any space. */
static inline int take(scanner *s, char c) {
    skip_space(s);
    if (s->p == s->end || *s->p != c) return 0;
    s->p++;
    return 1;
}

/* Whether `n` bytes are the same; words are sooner compared than memcmp is called. */
static inline int are_same(const char *a, const char *b, int64_t n) {
    uint64_t x, y, differ = 0;
    if (n < 8) {
        for (int64_t k = 0; k < n; k++) differ |= (uint64_t)(a[k] ^ b[k]);
        return !differ;
    }
    for (int64_t k = 0; k < n - 8; k += 8) memcpy(&x, a + k, 8), memcpy(&y, b + k, 8), differ |= x ^ y;
    memcpy(&x, a + n - 8, 8), memcpy(&y, b + n - 8, 8);
    return !(differ | (x ^ y));
}

static inline int is(text t, const char *name, int64_t n) { return t.n == n && !memcmp(t.p, name, (size_t)n); }
static inline int is_name(text t, text name) { return t.n == name.n && are_same(t.p, name.p, t.n); }
#define IS(t, literal) is(t, literal, (int64_t)sizeof(literal) - 1)

/* ---- strings ---- */

/* Four hexadecimal digits, or -1. */
static inline int32_t hex4(const char *p, const char *end) {
    int32_t value = 0;
    if (end - p < 4) return -1;
    for (int k = 0; k < 4; k++) {
        char c = p[k];
        int32_t digit = is_digit(c) ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (digit < 0) return -1;
        value = 16 * value + digit;
    }
    return value;
}

static inline char *put_utf8(char *to, int32_t c) {
    if (c < 0x80) *to++ = (char)c;
    else if (c < 0x800) *to++ = (char)(0xC0 | c >> 6), *to++ = (char)(0x80 | (c & 63));
    else if (c < 0x10000)
        *to++ = (char)(0xE0 | c >> 12), *to++ = (char)(0x80 | (c >> 6 & 63)), *to++ = (char)(0x80 | (c & 63));
    else {
        *to++ = (char)(0xF0 | c >> 18), *to++ = (char)(0x80 | (c >> 12 & 63));
        *to++ = (char)(0x80 | (c >> 6 & 63)), *to++ = (char)(0x80 | (c & 63));
    }
    return to;
}

/* The character of an escape, the backslash taken; -1: it is none, or half of a pair. */
static inline int32_t escaped(scanner *s) {
    if (s->p == s->end) return -1;
    char c = *s->p++;
    switch (c) {
    case '"': case '\\': case '/': return c;
    case 'b': return '\b';
    case 'f': return '\f';
    case 'n': return '\n';
    case 'r': return '\r';
    case 't': return '\t';
    case 'u': break;
    default: return -1;
    }
    int32_t high = hex4(s->p, s->end), low;
    if (high < 0 || (high >= 0xDC00 && high < 0xE000)) return -1;
    s->p += 4;
    if (high < 0xD800 || high >= 0xE000) return high;
    if (s->end - s->p < 6 || s->p[0] != '\\' || s->p[1] != 'u') return -1;
    low = hex4(s->p + 2, s->end);
    if (low < 0xDC00 || low >= 0xE000) return -1;
    s->p += 6;
    return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
}

/* The rest of a string that has an escape at `s->p`; begin: where it began. */
static __attribute__((noinline, unused)) int unescape(scanner *s, const char *begin, text *out) {
    if (!s->arena && !(s->arena = malloc((size_t)s->arena_bytes))) return 0;
    char *to = s->arena + s->arena_used;
    const char *from = begin;
    out->p = to;
    for (;;) {
        int64_t plain = s->p - from;
        if (s->arena_used + (to - out->p) + plain + 4 > s->arena_bytes) return 0;
        memcpy(to, from, (size_t)plain);
        to += plain;
        if (s->p == s->end || (unsigned char)*s->p < 0x20) return 0;
        if (*s->p++ == '"') break;
        int32_t c = escaped(s);
        if (c < 0) return 0;
        to = put_utf8(to, c);
        from = s->p;
        while (s->p < s->end && *s->p != '"' && *s->p != '\\' && (unsigned char)*s->p >= 0x20) s->p++;
    }
    out->n = to - out->p, s->arena_used += out->n;
    return 1;
}

static inline __attribute__((always_inline)) int read_string(scanner *s, text *out) {
    if (!take(s, '"')) return 0;
    const char *begin = s->p;
#ifdef __SSE2__
    while (s->end - s->p >= 16) { /* up to a quote, a backslash or a control character */
        const __m128i all = _mm_loadu_si128((const __m128i *)(const void *)s->p), low = _mm_set1_epi8(0x1f);
        const __m128i found = _mm_or_si128(
            _mm_or_si128(_mm_cmpeq_epi8(all, _mm_set1_epi8('"')), _mm_cmpeq_epi8(all, _mm_set1_epi8('\\'))),
            _mm_cmpeq_epi8(_mm_max_epu8(all, low), low));
        const int bits = _mm_movemask_epi8(found);
        s->p += bits ? __builtin_ctz((unsigned)bits) : 16;
        if (bits) break;
    }
#endif
    while (s->p < s->end && *s->p != '"' && *s->p != '\\' && (unsigned char)*s->p >= 0x20) s->p++;
    if (s->p == s->end || (unsigned char)*s->p < 0x20) return 0;
    if (*s->p == '\\') return unescape(s, begin, out);
    *out = (text){begin, s->p++ - begin};
    return 1;
}

/* ---- numbers ---- */

/* The double nearest to the number that begins at `p`, whatever the process's locale. */
double nearest(const char *p);

/* A number's text. is_integer: it has no fraction and no exponent. */
typedef struct { const char *p, *end; int is_integer; } number;

static inline int skip_digits(scanner *s) {
    const char *begin = s->p;
    while (s->p < s->end && is_digit(*s->p)) s->p++;
    return s->p > begin;
}

/* Takes a number that is finite as a double. */
static inline int read_number(scanner *s, number *out) {
    *out = (number){s->p, NULL, 1};
    if (s->p < s->end && *s->p == '-') s->p++;
    const char *digits = s->p;
    if (!skip_digits(s) || (*digits == '0' && s->p - digits > 1)) return 0;
    if (s->p < s->end && *s->p == '.') {
        s->p++, out->is_integer = 0;
        if (!skip_digits(s)) return 0;
    }
    int has_exponent = s->p < s->end && (*s->p | 32) == 'e';
    if (has_exponent) {
        s->p++, out->is_integer = 0;
        if (s->p < s->end && (*s->p == '+' || *s->p == '-')) s->p++;
        if (!skip_digits(s)) return 0;
    }
    out->end = s->p;
    return (!has_exponent && s->p - digits < 300) || isfinite(nearest(out->p));
}

/* The value of an integer; 0: int64 does not hold it. */
static inline int integer_of(const number *n, int64_t *value) {
    const char *p = n->p;
    uint64_t found = 0;
    int is_negative = *p == '-';
    p += is_negative;
    if (!n->is_integer || n->end - p > 19) return 0;
    for (; p < n->end; p++) found = 10 * found + (uint64_t)(*p - '0'); /* 19 digits fit */
    if (found > (uint64_t)INT64_MAX + (uint64_t)is_negative) return 0;
    *value = is_negative ? (int64_t)(0 - found) : (int64_t)found;
    return 1;
}

/* Takes an integer of at most 18 digits without a sign; 0: it is another number, and nothing is taken. */
static inline int read_small(scanner *s, int64_t *value) {
    const char *p = s->p;
    int64_t found = 0;
    while (p < s->end && is_digit(*p) && p - s->p < 18) found = 10 * found + (*p++ - '0');
    if (p == s->p || p == s->end || is_digit(*p) || *p == '.' || (*p | 32) == 'e') return 0;
    if (*s->p == '0' && p - s->p > 1) return 0;
    s->p = p, *value = found;
    return 1;
}

/* The double nearest to a number. */
static inline double double_of(const number *n) {
    static const double power[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13,
                                   1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    const char *p = n->p;
    uint64_t mantissa = 0;
    int64_t exponent = 0, digits = 0;
    int is_negative = *p == '-';
    for (p += is_negative; p < n->end && (is_digit(*p) || *p == '.'); p++) {
        if (*p == '.') {
            exponent = p + 1 - n->end; /* the digits behind it, if no exponent follows */
            continue;
        }
        mantissa = 10 * mantissa + (uint64_t)(*p - '0'), digits += digits || *p != '0';
    }
    /* Both are exact as doubles then, and one operation rounds once (Clinger 1990). */
    if (p == n->end && digits <= 19 && mantissa <= (uint64_t)1 << 53 && exponent >= -22) {
        double value = exponent < 0 ? (double)mantissa / power[-exponent] : (double)mantissa;
        return is_negative ? -value : value;
    }
    return nearest(n->p);
}

static inline int take_word(scanner *s, const char *word, int64_t n) {
    if (s->end - s->p < n || memcmp(s->p, word, (size_t)n)) return 0;
    s->p += n;
    return 1;
}

/* ---- objects, lists, and values that nobody asks for ---- */

static inline int enter(scanner *s, char c) { return take(s, c) && ++s->depth <= MOST_DEPTH; }

/* Goes to the next member or item of what was entered; `*first` is 1 before the first one. 1: its value is
 * next; 0: the end was taken; -1: no JSON. */
static inline int next_of(scanner *s, int *first, char close) {
    if (take(s, close)) {
        s->depth--;
        return 0;
    }
    if (!*first && !take(s, ',')) return -1;
    *first = 0;
    return 1;
}

static inline int next_item(scanner *s, int *first) {
    int found = next_of(s, first, ']');
    return found;
}

static inline int next_member(scanner *s, int *first, text *key) {
    int found = next_of(s, first, '}');
    if (found != 1) return found;
    return read_string(s, key) && take(s, ':') ? 1 : -1;
}

/* Takes a key as nearly all clients write it. */
#define TAKE_KEY(s, name) take_word(s, "\"" name "\":", (int64_t)sizeof(name) + 2)

/* Takes a value that is no object and no list. */
static __attribute__((noinline, unused)) int read_plain(scanner *s, scalar *out) {
    number n;
    out->kind = OTHER;
    if (s->p == s->end) return 0;
    switch (*s->p) {
    case '"': out->kind = STRING; return read_string(s, &out->string);
    case 't': out->kind = YES; return take_word(s, "true", 4);
    case 'f': out->kind = NO; return take_word(s, "false", 5);
    case 'n': return take_word(s, "null", 4);
    default:
        if (!read_number(s, &n)) return 0;
        if (integer_of(&n, &out->integer)) out->kind = INTEGER;
        return 1;
    }
}

/* Takes any value. */
static __attribute__((noinline, unused)) int skip_value(scanner *s) {
    char is_object[MOST_DEPTH + 1];
    const int outside = s->depth;
    int first = 1;
    for (;;) {
        skip_space(s);
        if (s->p == s->end) return 0;
        if (*s->p == '{' || *s->p == '[') {
            if (s->depth >= MOST_DEPTH) return 0;
            is_object[s->depth++] = *s->p++ == '{';
            first = 1;
        } else {
            scalar ignored;
            if (!read_plain(s, &ignored)) return 0;
            first = 0;
        }
        while (s->depth > outside) {
            text key;
            int object = is_object[s->depth - 1];
            int found = object ? next_member(s, &first, &key) : next_item(s, &first);
            if (found < 0) return 0;
            if (found) break;
            first = 0;
        }
        if (s->depth == outside) return 1;
    }
}

static inline int read_scalar(scanner *s, scalar *out) {
    skip_space(s);
    if (s->p < s->end && *s->p == '"') {
        out->kind = STRING;
        return read_string(s, &out->string);
    }
    if (read_small(s, &out->integer)) {
        out->kind = INTEGER;
        return 1;
    }
    if (s->p < s->end && (*s->p == '{' || *s->p == '[')) {
        *out = (scalar){.kind = OTHER};
        return skip_value(s);
    }
    return read_plain(s, out);
}

/* ---- the text as a whole ---- */

/* Whether it is UTF-8 (RFC 3629). */
static inline int is_utf8(const char *text, int64_t n) {
    const unsigned char *p = (const unsigned char *)text, *end = p + n;
    uint64_t any = 0, word;
    for (; end - p >= 8; p += 8) memcpy(&word, p, 8), any |= word;
    for (const unsigned char *rest = p; rest < end; rest++) any |= *rest;
    if (!(any & 0x8080808080808080u)) return 1;
    for (p = (const unsigned char *)text; p < end;) {
        if (*p < 0x80) {
            p++;
            continue;
        }
        int more = *p >= 0xC2 && *p < 0xE0 ? 1 : (*p & 0xF0) == 0xE0 ? 2 : *p >= 0xF0 && *p < 0xF5 ? 3 : 0;
        if (!more || end - p <= more) return 0;
        unsigned char low = 0x80, high = 0xBF; /* of the second byte: no long forms, no halves of pairs */
        if (*p == 0xE0) low = 0xA0;
        if (*p == 0xED) high = 0x9F;
        if (*p == 0xF0) low = 0x90;
        if (*p == 0xF4) high = 0x8F;
        if (p[1] < low || p[1] > high) return 0;
        for (int k = 2; k <= more; k++)
            if ((p[k] & 0xC0) != 0x80) return 0;
        p += more + 1;
    }
    return 1;
}
