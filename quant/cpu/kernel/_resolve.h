/* Turns a table's ids into row numbers, for one instruction set (included once for each). Blocks of ids go
 * through three steps, each prefetching for the next: hashes and pilots' places; row numbers, some blocks
 * later; the rows' kept ids. Loops are plain so that the compiler vectorizes them. An overlay is asked for
 * a stretch of 2048 ids before these are placed. */
#pragma once
#include "_ids.h"

/* Numbers of 64 bits, as many as a register has, at any alignment. GCC makes scalars of what is wider. */
#if defined(ISA_AVX512)
#define WIDTH 8
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15
#elif defined(ISA_AVX2)
#define WIDTH 4
#define EVENS 0, 2, 4, 6
#define ODDS 1, 3, 5, 7
#else
#define WIDTH 2
#define EVENS 0, 2
#define ODDS 1, 3
#endif
typedef uint64_t lanes __attribute__((vector_size(8 * WIDTH), aligned(1), may_alias));
#define EACH_ID for (int64_t i = 0; i < ID_BLOCK; i++)
#define EACH_VECTOR for (int64_t i = 0; i < ID_BLOCK; i += WIDTH)
#define VECTOR(array) (*(lanes *)(void *)((array) + i))
#if defined(__clang__)
#define EVERY_OTHER(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define EVERY_OTHER(a, b, ...) __builtin_shuffle(a, b, (lanes){__VA_ARGS__})
#endif

/* Hashes a block and prefetches its pilots. is_whole: all of the table's buckets are here, chosen by the
 * hash. */
INLINE void hash_block(const row_map *m, const uint8_t *ids, int64_t n, int is_whole, id_block *b) {
    const whole_entry *entries = (const whole_entry *)(intptr_t)m->entries;
    const uint8_t *pilots = (const uint8_t *)(intptr_t)m->pilots;
    const uint64_t mask = (uint64_t)(m->buckets - 1);
    uint64_t id[ID_BLOCK], bucket[ID_BLOCK], hash[ID_BLOCK], found[2 * ID_BLOCK];
    b->n = n;
    __builtin_prefetch(ids + 1024), __builtin_prefetch(ids + 1088);
    if (n == ID_BLOCK) __builtin_memcpy(id, ids, sizeof id);
    else EACH_ID id[i] = i < n ? (uint64_t)load_i64(ids + 8 * i) : 0;
    EACH_VECTOR {
        lanes x = VECTOR(id);
        x = (x ^ (x >> 32)) * ID_MIX;
        x = (x ^ (x >> 32)) * ID_MIX;
        x ^= x >> 32;
        VECTOR(hash) = x;
        VECTOR(bucket) = x & mask;
    }
    if (is_whole) {
        EACH_ID __builtin_memcpy(found + 2 * i, entries + bucket[i], sizeof(whole_entry));
    } else {
        EACH_ID {
            bucket[i] = bucket_of(m, id[i], hash[i]);
            const int outside = bucket[i] >= (uint64_t)m->buckets_here;
            if (outside) bucket[i] = 0;
            __builtin_memcpy(found + 2 * i, entries + bucket[i], sizeof(whole_entry));
            if (outside) found[2 * i + 1] = 0; /* no slots */
        }
    }
    EACH_VECTOR {
        const lanes one = *(lanes *)(void *)(found + 2 * i), two = *(lanes *)(void *)(found + 2 * i + WIDTH);
        const lanes first = EVERY_OTHER(one, two, EVENS), other = EVERY_OTHER(one, two, ODDS),
            slots = other & 0xFFFFFFFF;
        lanes g = (VECTOR(hash) ^ (other >> 32) * ID_SEED) * ID_SPREAD;
        g = (g ^ (g >> 32)) * ID_MIX;
        VECTOR(b->spread) = g;
        VECTOR(b->slots) = slots;
        VECTOR(b->first) = first | (lanes)(slots == 0); /* -1 where the bucket has none */
        VECTOR(b->pilot_at) = (first * 5 >> 4) + VECTOR(bucket) + ((g >> 32) * ((slots * 5 >> 4) + 1) >> 32);
    }
    EACH_ID __builtin_prefetch(pilots + b->pilot_at[i], 0, 2);
}

#include "_resolve_overlay.h"

/* Computes rows. The lookup prefetches the rows; ids kept apart from them are prefetched here. */
INLINE void place_block(const row_map *m, int kept_apart, const id_block *b, int64_t *numbers) {
    const uint8_t *pilots = (const uint8_t *)(intptr_t)m->pilots, *kept = (const uint8_t *)(intptr_t)m->ids;
    uint64_t pilot[ID_BLOCK], row[ID_BLOCK];
    EACH_ID pilot[i] = pilots[b->pilot_at[i]];
    EACH_VECTOR {
        const lanes x = (VECTOR(b->spread) ^ (VECTOR(pilot) + 1) * ID_PILOT) * ID_SLOT;
        VECTOR(row) = VECTOR(b->first) + ((x >> 32) * VECTOR(b->slots) >> 32);
    }
    if (kept_apart) EACH_ID __builtin_prefetch(kept + (int64_t)row[i] * m->id_step, 0, 2);
    if (b->n == ID_BLOCK) __builtin_memcpy(numbers, row, sizeof row);
    else for (int64_t i = 0; i < b->n; i++) numbers[i] = (int64_t)row[i];
}

INLINE void place_ids(resolving *r, int64_t until, int is_whole, int kept_apart) {
    const job *j = r->job;
    const row_map *m = j->map;
    const int64_t count = (j->n_ids + ID_BLOCK - 1) / ID_BLOCK;
    int64_t k = r->next;
    for (; k < count + PILOT_LAG && (k - PILOT_LAG) * ID_BLOCK < until; k++) {
        if (k < count) {
            const int64_t at = k * ID_BLOCK, left = j->n_ids - at;
            hash_block(m, j->ids + 8 * at, left < ID_BLOCK ? left : ID_BLOCK, is_whole,
                       &r->blocks[k % BLOCKS]);
        }
        if (k >= PILOT_LAG) {
            const int64_t at = (k - PILOT_LAG) * ID_BLOCK;
            const id_block *b = &r->blocks[(k - PILOT_LAG) % BLOCKS];
            place_block(m, kept_apart, b, j->numbers + at);
            if (!m->layer_count) continue;
            if (at % STRETCH == 0) NAME(look_ahead)(r, at);
            for (int64_t i = 0; i < b->n; i++) {
                const int64_t row = r->overlay[at % STRETCH + i];
                j->numbers[at + i] = row == NOT_OVERLAID ? j->numbers[at + i] : row;
            }
        }
    }
    r->next = k;
    r->placed = k > PILOT_LAG ? (k - PILOT_LAG) * ID_BLOCK : 0;
    if (r->placed > j->n_ids) r->placed = j->n_ids;
}

static NOINLINE void NAME(count_backfilled)(const row_map *m, const int64_t *rows, int64_t n, resolving *r) {
    const uint8_t *bits = (const uint8_t *)(intptr_t)m->backfilled;
    for (int64_t i = 0; i < n; i++)
        if (rows[i] != m->default_row && rows[i] >= 0 && rows[i] < r->job->rows)
            r->backfilled += bits[rows[i] >> 3] >> (rows[i] & 7) & 1;
}

/* Whether a row is an overlay's: neither one of the table nor -1. */
INLINE int is_overlaid(const job *j, int64_t row) { return (uint64_t)row + 1 > (uint64_t)j->rows; }

/* Whole blocks of ids from number `at` on: is the id that their row keeps theirs? */
INLINE int64_t check_blocks(resolving *r, int64_t at, int64_t until) {
    const job *j = r->job;
    const row_map *m = j->map;
    /* no row is read there */
    const uint8_t *kept = m->id_count ? (const uint8_t *)(intptr_t)m->ids : (const uint8_t *)&ID_MIX;
    const int64_t step = m->id_step;
    const uint64_t own = (uint64_t)j->rows;
    lanes found = {0};
    for (; at + ID_BLOCK <= until; at += ID_BLOCK) {
        int64_t *rows = j->numbers + at;
        const uint8_t *ids = j->ids + 8 * at;
        uint64_t there[ID_BLOCK];
        EACH_ID there[i] = (uint64_t)load_i64(kept + ((uint64_t)rows[i] < own ? rows[i] : 0) * step);
        EACH_VECTOR {
            const lanes row = VECTOR(rows), overlaid = (lanes)(row + 1 > own); /* found already */
            const lanes is = ((lanes)(VECTOR(there) == VECTOR(ids + 7 * i)) & (lanes)(row < own)) | overlaid;
            VECTOR(rows) = (row & is) | ((uint64_t)m->default_row & ~is);
            VECTOR(there) = is;
            found -= is;
        }
        if (j->found)
            EACH_ID j->found[at + i] = there[i] & 1;
        if (m->backfilled) NAME(count_backfilled)(m, rows, ID_BLOCK, r);
        r->missing += ID_BLOCK;
    }
    for (int i = 0; i < WIDTH; i++) r->missing -= (int64_t)found[i];
    return at;
}

/* The same of one id. */
INLINE void check_one(resolving *r, int64_t at) {
    const job *j = r->job;
    const row_map *m = j->map;
    int64_t *row = j->numbers + at;
    const int is = is_overlaid(j, *row)
                   || (*row >= 0 && load_i64((const uint8_t *)(intptr_t)m->ids
                                             + *row * m->id_step) == load_i64(j->ids + 8 * at));
    if (!is) *row = m->default_row;
    if (j->found) j->found[at] = (uint8_t)is;
    r->missing += !is;
    if (m->backfilled) NAME(count_backfilled)(m, row, 1, r);
}

static NOINLINE void NAME(check_ids)(resolving *r, int64_t until) {
    int64_t at = check_blocks(r, r->checked, until);
    for (; at < until; at++) check_one(r, at);
    r->checked = until;
}
/* Ids that are row numbers, but for a first one and a default row: blocks up to number `until`. */
static NOINLINE void NAME(resolve_own_rows)(resolving *r, int64_t until) {
    const job *j = r->job;
    const row_map *m = j->map;
    const int64_t count = (j->n_ids + ID_BLOCK - 1) / ID_BLOCK;
    int64_t k = r->next;
    /* counted in lanes over all blocks: a sum of lanes costs as much as a block */
    lanes lacks = {0}, late = {0};
    for (; k < count && k * ID_BLOCK < until; k++) {
        const int64_t at = k * ID_BLOCK, n = j->n_ids - at < ID_BLOCK ? j->n_ids - at : ID_BLOCK;
        int64_t *numbers = j->numbers + at, rows[ID_BLOCK];
        uint64_t id[ID_BLOCK];
        if (n == ID_BLOCK) __builtin_memcpy(id, j->ids + 8 * at, sizeof id);
        else EACH_ID id[i] = (uint64_t)(i < n ? load_i64(j->ids + 8 * (at + i)) : m->first);
        EACH_VECTOR {
            const lanes row = VECTOR(id) - (uint64_t)m->first,
                is_missing = (lanes)(row >= (uint64_t)m->id_count);
            VECTOR(rows) = (row & ~is_missing) | ((uint64_t)m->default_row & is_missing);
            lacks -= is_missing;
            late -= (lanes)(row >= (uint64_t)m->own) & ~is_missing;
        }
        for (int64_t i = n; i < ID_BLOCK; i++) { /* those beside the last id, which are all alike */
            r->missing -= rows[i] == m->default_row;
            r->backfilled -= rows[i] >= m->own && rows[i] < m->id_count;
        }
        if (n == ID_BLOCK) __builtin_memcpy(numbers, rows, sizeof rows);
        else for (int64_t i = 0; i < n; i++) numbers[i] = rows[i];
        if (j->found)
            for (int64_t i = 0; i < n; i++) j->found[at + i] = rows[i] != m->default_row;
    }
    for (int i = 0; i < WIDTH; i++) r->missing += (int64_t)lacks[i], r->backfilled += (int64_t)late[i];
    r->next = k;
    r->placed = k * ID_BLOCK < j->n_ids ? k * ID_BLOCK : j->n_ids;
    r->checked = r->placed;
}

/* The same of all of a job's ids, some of whose rows are an overlay's or hot. */
static NOINLINE void NAME(resolve_overridden_rows)(resolving *r) {
    const job *j = r->job;
    const row_map *m = j->map;
    /* else ids were checked before, if missing ones are counted at all */
    const int is_counted = !j->unfound || m->default_row >= 0 || m->own < m->id_count || m->first;
    for (int64_t from = 0; from < j->n_ids; from += STRETCH) {
        const int64_t n = j->n_ids - from < STRETCH ? j->n_ids - from : STRETCH;
        const uint8_t *ids = j->ids + 8 * from;
        int64_t *numbers = j->numbers + from, missing = 0, late = 0;
        if (!is_counted) memcpy(numbers, ids, (size_t)n * 8);
        else
            for (int64_t i = 0; i < n; i++) {
                const int64_t row = (int64_t)((uint64_t)load_i64(ids + 8 * i) - (uint64_t)m->first);
                numbers[i] = (uint64_t)row < (uint64_t)m->id_count ? row : -1;
            }
        override(m, ids, n, numbers);
        if (is_counted)
            for (int64_t i = 0; i < n; i++) {
                const int is_missing = numbers[i] == -1;
                missing += is_missing;
                late += numbers[i] >= m->own && numbers[i] < m->id_count;
                numbers[i] = is_missing ? m->default_row : numbers[i];
            }
        if (j->found)
            for (int64_t i = 0; i < n; i++) j->found[from + i] = numbers[i] != m->default_row;
        r->missing += missing, r->backfilled += late;
    }
    r->placed = r->checked = j->n_ids;
}

enum { HOT_AHEAD = 24 }; /* ids whose words come in meanwhile */

/* The number that a row has in memory, or its own where it is not hot. */
INLINE int64_t hot_place(const row_map *m, int64_t row) {
    const hot_word *words = (const hot_word *)(intptr_t)m->hot;
    const int is_marked = (uint64_t)row < (uint64_t)m->hot_rows;
    const hot_word word = words[is_marked ? row >> 6 : 0];
    const uint64_t lower = word.bits & (((uint64_t)1 << (row & 63)) - 1);
    const uint64_t slot = word.before + (uint64_t)__builtin_popcountll(lower);
    const uint64_t last = (uint64_t)m->hot_slots - 1; /* whatever a file holds */
    const int is_hot = is_marked & (int)(word.bits >> (row & 63) & 1);
    return is_hot ? m->hot_first + (int64_t)(slot < last ? slot : last) : row;
}

/* Numbers [from, until) that are hot become those of their copies: of raw ids, where a copy keeps the id. */
static NOINLINE void NAME(take_hot)(const job *j, int64_t from, int64_t until) {
    const row_map *m = j->map;
    const hot_word *words = (const hot_word *)(intptr_t)m->hot;
    const uint8_t *kept = (const uint8_t *)(intptr_t)m->ids;
    int64_t places[ID_BLOCK];
    for (; from < until; from += ID_BLOCK) {
        const int64_t left = until - from, n = left < ID_BLOCK ? left : ID_BLOCK;
        int64_t *rows = j->numbers + from;
        for (int64_t i = HOT_AHEAD; i < HOT_AHEAD + n && i < left; i++)
            __builtin_prefetch(words + ((uint64_t)rows[i] < (uint64_t)m->hot_rows ? rows[i] >> 6 : 0), 0, 3);
        for (int64_t i = 0; i < n; i++) places[i] = hot_place(m, rows[i]);
        for (int64_t i = 0; m->directory && i < n; i++)
            if (places[i] != rows[i]) __builtin_prefetch(kept + places[i] * m->id_step, 0, 3);
        for (int64_t i = 0; m->directory && i < n; i++)
            if (places[i] != rows[i]
                && load_i64(kept + places[i] * m->id_step) != load_i64(j->ids + 8 * (from + i)))
                places[i] = rows[i];
        memcpy(rows, places, (size_t)n * 8);
    }
}
#undef EACH_ID
#undef EACH_VECTOR
#undef VECTOR
#undef EVERY_OTHER
#undef EVENS
#undef ODDS
#undef WIDTH

static NOINLINE void NAME(place_whole)(resolving *r, int64_t until) { place_ids(r, until, 1, 0); }
static NOINLINE void NAME(place_kept_apart)(resolving *r, int64_t until) { place_ids(r, until, 1, 1); }
static NOINLINE void NAME(place_part)(resolving *r, int64_t until) {
    place_ids(r, until, 0, r->job->map->id_step != r->job->row_bytes);
}

/* Gives ids up to number `until`, or some further, the rows that are theirs if they are there. */
static void NAME(place)(resolving *r, int64_t until) {
    const row_map *m = r->job->map;
    const int64_t from = r->placed;
    if (from >= until) return;
    if (!m->directory && has_layers(m)) NAME(resolve_overridden_rows)(r);
    else if (!m->directory || (!m->id_count && !m->layer_count)) NAME(resolve_own_rows)(r, until);
    else if (m->bucket_ids || m->buckets_here < m->buckets) NAME(place_part)(r, until);
    else if (m->id_step == r->job->row_bytes) NAME(place_whole)(r, until);
    else NAME(place_kept_apart)(r, until);
    if (m->hot) NAME(take_hot)(r->job, from, r->placed);
}

/* Fills a job's `numbers` and `found` (if any) up to id `until`; counts ids without a row of their own. */
static void NAME(resolve)(resolving *r, int64_t until) {
    NAME(place)(r, until);
    if (r->checked < until) NAME(check_ids)(r, until);
}
