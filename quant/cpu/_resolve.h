/* Ids of a table become row numbers, for one instruction set (included once for each).
 *
 * Blocks of ids go through three steps, one block behind the other, so that what a step reads was prefetched a block ago: hashes and
 * the places of pilots, then row numbers, then the ids that the rows keep. A step's loops are plain, for the compiler's vectors.
 */
#pragma once
#include "_ids.h"

enum { ID_BLOCK = 16, PILOT_LAG = 3, ROW_LAG = 8, BLOCKS = 16 }; /* lags: blocks from one step to the next but one */

typedef struct {
    int64_t n, first[ID_BLOCK], row[ID_BLOCK];
    uint64_t id[ID_BLOCK], spread[ID_BLOCK], pilot_at[ID_BLOCK];
    uint64_t slots[ID_BLOCK]; /* of the id's bucket; 0: it has none here */
} id_block;

#define EACH_ID for (int64_t i = 0; i < ID_BLOCK; i++) /* of a block, be it full or not: so loops have a fixed length */

/* is_whole: the table has all of its buckets here, and they are made by the hash. */
INLINE void hash_block(const row_map *m, const uint8_t *ids, int64_t n, int is_whole, id_block *b) {
    const entry *directory = (const entry *)(intptr_t)m->directory;
    const uint8_t *pilots = (const uint8_t *)(intptr_t)m->pilots;
    const uint64_t here = (uint64_t)m->buckets_here, mask = (uint64_t)(m->buckets - 1);
    uint64_t bucket[ID_BLOCK], hash[ID_BLOCK], seed[ID_BLOCK];
    if (n < ID_BLOCK) __builtin_memset(b->id, 0, sizeof b->id);
    __builtin_memcpy(b->id, ids, (size_t)n * 8);
    b->n = n;
    EACH_ID hash[i] = mix_id(b->id[i]);
    if (is_whole) EACH_ID bucket[i] = hash[i] & mask;
    else EACH_ID bucket[i] = bucket_of(m, b->id[i], hash[i]);
    EACH_ID {
        const uint64_t at = is_whole || bucket[i] < here ? bucket[i] : 0;
        const entry *e = directory + at;
        const int64_t first = e->first_row, slots = e[1].first_row - first;
        seed[i] = e->seed;
        b->first[i] = first;
        b->slots[i] = is_whole || bucket[i] < here ? (uint64_t)slots : 0;
        bucket[i] = at;
    }
    EACH_ID {
        const uint64_t g = spread(hash[i], seed[i]);
        b->spread[i] = g;
        b->pilot_at[i] = pilots_before((uint64_t)b->first[i]) + bucket[i] + reduce(g, pilots_before(b->slots[i]) + 1);
        b->first[i] = b->slots[i] ? b->first[i] : 0;
    }
    EACH_ID __builtin_prefetch(pilots + b->pilot_at[i], 0, 2);
}

/* As rows of a lookup: what misses the first cache waits for few places there on most processors. */
#define PREFETCH(at) do { if (into_l1) __builtin_prefetch(at, 0, 3); else __builtin_prefetch(at, 0, 2); } while (0)

/* lines: that a row takes at most, or 0: more than have a loop of their own. */
INLINE void find_block(const row_map *m, const uint8_t *table, int64_t row_bytes, int lines, int into_l1, id_block *b) {
    const uint8_t *pilots = (const uint8_t *)(intptr_t)m->pilots, *kept = (const uint8_t *)(intptr_t)m->ids;
    uint64_t pilot[ID_BLOCK];
    EACH_ID pilot[i] = pilots[b->pilot_at[i]];
    EACH_ID b->row[i] = b->first[i] + (int64_t)slot_of(b->spread[i], pilot[i], b->slots[i]);
    if (lines) {
        EACH_ID {
            const uint8_t *row = table + b->row[i] * row_bytes;
            UNROLL for (int line = 0; line < lines; line++) PREFETCH(row + 64 * line);
        }
    } else {
        EACH_ID {
            const uint8_t *row = table + b->row[i] * row_bytes;
            for (int64_t at = 0; at < row_bytes; at += 64) PREFETCH(row + at);
            PREFETCH(row + row_bytes - 1);
        }
    }
    if (m->id_step != row_bytes) EACH_ID PREFETCH(kept + b->row[i] * m->id_step);
}
#undef PREFETCH

static NOINLINE void NAME(count_backfilled)(const row_map *m, const int64_t *rows, int64_t n, resolving *r) {
    const uint8_t *bits = (const uint8_t *)(intptr_t)m->backfilled;
    for (int64_t i = 0; i < n; i++)
        if (rows[i] != m->default_row && rows[i] >= 0) r->backfilled += bits[rows[i] >> 3] >> (rows[i] & 7) & 1;
}

/* Block b begins with the job's id number `at`. */
INLINE void check_block(const row_map *m, const id_block *b, int64_t at, resolving *r) {
    const uint8_t *kept = (const uint8_t *)(intptr_t)m->ids;
    const int64_t step = m->id_step, default_row = m->default_row;
    uint64_t found[ID_BLOCK];
    int64_t rows[ID_BLOCK], lacks = 0;
    EACH_ID found[i] = (uint64_t)load_i64(kept + b->row[i] * step);
    EACH_ID found[i] = (found[i] == b->id[i]) & (b->slots[i] != 0);
    EACH_ID rows[i] = found[i] ? b->row[i] : default_row;
    for (int64_t i = 0; i < b->n; i++) lacks += !found[i];
    if (r->job->found)
        for (int64_t i = 0; i < b->n; i++) r->job->found[at + i] = (uint8_t)found[i];
    __builtin_memcpy(r->job->numbers + at, rows, (size_t)b->n * 8);
    r->missing += lacks;
    if (m->backfilled) NAME(count_backfilled)(m, rows, b->n, r);
}

INLINE void resolve_index(resolving *r, int is_whole, int lines) {
    const job *j = r->job;
    const row_map *m = j->map;
    id_block blocks[BLOCKS];
    const int64_t count = (j->n_ids + ID_BLOCK - 1) / ID_BLOCK;
    for (int64_t k = 0; k < count + ROW_LAG; k++) {
        if (k >= ROW_LAG) check_block(m, &blocks[(k - ROW_LAG) % BLOCKS], (k - ROW_LAG) * ID_BLOCK, r);
        if (k >= PILOT_LAG && k - PILOT_LAG < count)
            find_block(m, j->table, j->row_bytes, lines, r->into_l1, &blocks[(k - PILOT_LAG) % BLOCKS]);
        if (k < count) {
            const int64_t at = k * ID_BLOCK, left = j->n_ids - at;
            hash_block(m, j->ids + 8 * at, left < ID_BLOCK ? left : ID_BLOCK, is_whole, &blocks[k % BLOCKS]);
        }
    }
}
#undef EACH_ID

/* Ids that are row numbers, but for a first one and a default row. */
static NOINLINE void NAME(resolve_rows)(resolving *r) {
    const job *j = r->job;
    const row_map *m = j->map;
    for (int64_t i = 0; i < j->n_ids; i++) {
        const int64_t id = load_i64(j->ids + 8 * i);
        const uint64_t row = (uint64_t)id - (uint64_t)m->first;
        const int is_there = row < (uint64_t)m->id_count && id >= m->first;
        j->numbers[i] = is_there ? (int64_t)row : m->default_row;
        r->missing += !is_there;
        r->backfilled += is_there && (int64_t)row >= m->own;
        if (j->found) j->found[i] = (uint8_t)is_there;
    }
}

static NOINLINE void NAME(resolve_1)(resolving *r) { resolve_index(r, 1, 1); }
static NOINLINE void NAME(resolve_2)(resolving *r) { resolve_index(r, 1, 2); }
static NOINLINE void NAME(resolve_3)(resolving *r) { resolve_index(r, 1, 3); }
static NOINLINE void NAME(resolve_any)(resolving *r) { resolve_index(r, 1, 0); }
static NOINLINE void NAME(resolve_part)(resolving *r) { resolve_index(r, 0, 0); }

/* Fills a job's `rows`, and `found` where it is there; adds to what is missing and what is backfilled. */
static void NAME(resolve)(const job *j, int into_l1) {
    resolving of = {j, into_l1, 0, 0}, *r = &of;
    const row_map *m = j->map;
    const int64_t row_bytes = j->row_bytes, lines = row_bytes % 64 == 16 ? row_bytes / 64 + 1 : (row_bytes + 48 + 63) / 64;
    if (!m->directory || !m->id_count) NAME(resolve_rows)(r);
    else if (m->bucket_ids || m->buckets_here < m->buckets) NAME(resolve_part)(r);
    else if (lines == 1) NAME(resolve_1)(r);
    else if (lines == 2) NAME(resolve_2)(r);
    else if (lines == 3) NAME(resolve_3)(r);
    else NAME(resolve_any)(r);
    __atomic_fetch_add(&j->unfound[0], of.missing, __ATOMIC_RELAXED);
    __atomic_fetch_add(&j->unfound[1], of.backfilled, __ATOMIC_RELAXED);
}
