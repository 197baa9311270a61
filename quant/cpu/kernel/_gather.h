/* Rows that a GPU asks for: CUDA calls `gather_rows` in stream order, without the interpreter. list[0]:
 * number of rows; list[2 ...]: address in 48 bits, bytes / 4 above. units: ascending places in `staging`,
 * in 16 bytes, to which rows are padded with zeros. Gathers the rows that go to units [from, to). */
#pragma once
#if defined(__x86_64__)
#include <emmintrin.h>
#endif
#include "_pool.h"

typedef struct { const volatile int64_t *list; const int32_t *units; uint8_t *staging; int64_t threads, from,
                to; } request;
enum { ROWS_A_PART = 512, ROWS_AHEAD = 16 };
static const int64_t ADDRESS = ((int64_t)1 << 48) - 1;
static inline int64_t words_of(int64_t listed) { return (int64_t)((uint64_t)listed >> 48); }
typedef struct { const request *request; int64_t first, rows; int parts; } gathering;

/* Writes units past the caches: a device waits long for lines that a core has modified. */
static void copy_past_caches(uint8_t *to, const uint8_t *from, int64_t words) {
    const int64_t units = words / 4, rest = words % 4 * 4;
    uint8_t last[16] = {0};
    __builtin_memcpy(last, from + units * 16, (size_t)rest);
#if defined(__x86_64__)
    for (int64_t n = 0; n < units; n++)
        _mm_stream_si128((__m128i *)to + n, _mm_loadu_si128((const __m128i *)from + n));
    if (rest) _mm_stream_si128((__m128i *)to + units, _mm_loadu_si128((const __m128i *)last));
#else
    __builtin_memcpy(to, from, (size_t)units * 16);
    if (rest) __builtin_memcpy(to + units * 16, last, 16);
#endif
}

static void gather_part(const void *argument, int part) {
    const gathering *g = argument;
    const int64_t *list = (const int64_t *)g->request->list + 2;
    int64_t i = g->first + g->rows * part / g->parts, end = g->first + g->rows * (part + 1) / g->parts;
    for (int64_t n = i; n < end && n < i + ROWS_AHEAD; n++)
        __builtin_prefetch((const void *)(list[n] & ADDRESS));
    for (; i < end; i++) {
        if (i + ROWS_AHEAD < end) {
            const int64_t ahead = list[i + ROWS_AHEAD];
            const uint8_t *next = (const uint8_t *)(ahead & ADDRESS);
            for (int64_t at = 0; at < words_of(ahead) * 4; at += 64) __builtin_prefetch(next + at);
        }
        uint8_t *to = g->request->staging + (int64_t)g->request->units[i] * 16;
        copy_past_caches(to, (const uint8_t *)(list[i] & ADDRESS), words_of(list[i]));
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/* The first of the listed rows that goes to a unit or behind it. */
static int64_t first_at(const request *r, int64_t unit) {
    int64_t low = 0, high = r->list[0];
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (r->units[middle] < unit) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void gather_rows(void *argument) {
    const request *r = argument;
    int64_t first = first_at(r, r->from), rows = first_at(r, r->to) - first;
    if (rows <= 0) return;
    /* more parts than threads: some of those are interrupted */
    gathering g = {r, first, rows, (int)(rows / ROWS_A_PART + 1)};
    run_parts(g.parts, (int)r->threads, gather_part, &g);
}
