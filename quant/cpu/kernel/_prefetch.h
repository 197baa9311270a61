/* Prefetches rows some hundred lines ahead, across bags and jobs of a call: `prefetch_ahead` prefetches
 * the first rows; then each row read prefetches one more, so the distance stays and reaches into later
 * jobs. */
#pragma once
#include "_rows.h"

/* Distance in bytes of lines: a quarter of L1. More evicts unread rows, less leaves a core idle. */
enum { AHEAD_BYTES = 12 << 10 };

/* Reads the lines of the first `used` bytes of the row whose id lies at `id`, into L1 or else into L2. */
static inline __attribute__((always_inline)) void prefetch_row(const uint8_t *table, int64_t row_bytes,
                                                               int64_t used, const uint8_t *id, int into_l1) {
    const uint8_t *row = table + load_i64(id) * row_bytes;
#define LINES(locality) \
    _Pragma("GCC unroll 16") for (int64_t b = 0; b < used; b += 64) __builtin_prefetch(row + b, 0, \
        locality); \
    /* rows start at multiples of 4, so of 4 bytes behind a whole line none is in the next one */ \
    if (used % 64 != 4) __builtin_prefetch(row + used - 1, 0, locality);
    if (into_l1) {
        LINES(3)
    } else {
        LINES(2)
    }
#undef LINES
}

/* The next `rows` rows, over jobs. */
static __attribute__((noinline, unused)) void prefetch_rows(ahead *a, int64_t rows) {
    while (a->job < a->end) {
        const job *j = a->job;
        const int64_t last = j->n_ids + j->beyond, until = rows < last - a->id ? a->id + rows : last;
        rows -= until - a->id;
        for (; a->id < until; a->id++)
            prefetch_row(j->table, j->row_bytes, j->row_bytes, j->ids + 8 * a->id, a->how.into_l1);
        if (a->id < last) return;
        a->job++, a->id = 0;
    }
}

/* The same, where all rows of job `j` have been prefetched. */
static __attribute__((noinline, unused)) void prefetch_later(ahead *a, const job *j, int64_t rows) {
    if (a->job == j) a->job++, a->id = 0;
    prefetch_rows(a, rows);
}

/* Starts a thread's jobs: a row lies in row_bytes / 64 lines and, on average, in 48 / 64 more. */
static inline ahead prefetch_ahead(const job *jobs, const job *end, prefetching how) {
    int64_t ids = 0, bytes = 0;
    for (const job *j = jobs; j < end; j++) ids += j->n_ids, bytes += j->n_ids * (j->row_bytes + 48);
    ahead a = {jobs, end, 0, how};
    if (ids) prefetch_rows(&a, 1 + AHEAD_BYTES / (bytes / ids));
    return a;
}
