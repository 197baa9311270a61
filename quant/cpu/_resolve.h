/* Ids of a table become row numbers, for one instruction set (included once for each).
 *
 * Blocks of ids go through three steps, so that what a step reads was prefetched before: hashes and the places of pilots; some blocks
 * behind, row numbers; and, when the rows have come, the ids that they keep. A step's loops are plain, for the compiler's vectors.
 */
#pragma once
#include "_ids.h"

#define EACH_ID for (int64_t i = 0; i < ID_BLOCK; i++) /* of a block, be it full or not: so loops have a fixed length */

/* is_whole: the table has all of its buckets here, and they are made by the hash. */
INLINE void hash_block(const row_map *m, const uint8_t *ids, int64_t n, int is_whole, id_block *b) {
    const entry *directory = (const entry *)(intptr_t)m->directory;
    const uint8_t *pilots = (const uint8_t *)(intptr_t)m->pilots;
    const uint64_t here = (uint64_t)m->buckets_here, mask = (uint64_t)(m->buckets - 1);
    uint64_t id[ID_BLOCK], bucket[ID_BLOCK], hash[ID_BLOCK], seed[ID_BLOCK];
    if (n == ID_BLOCK) {
        __builtin_memcpy(id, ids, sizeof id);
    } else {
        EACH_ID id[i] = i < n ? (uint64_t)load_i64(ids + 8 * i) : 0;
    }
    b->n = n;
    EACH_ID hash[i] = mix_id(id[i]);
    if (is_whole) EACH_ID bucket[i] = hash[i] & mask;
    else EACH_ID bucket[i] = bucket_of(m, id[i], hash[i]);
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
        b->first[i] = b->slots[i] ? b->first[i] : -1;
    }
    EACH_ID __builtin_prefetch(pilots + b->pilot_at[i], 0, 2);
}

/* The rows themselves are prefetched by the lookup, one for each that it pools. */
INLINE void place_block(const row_map *m, int kept_apart, const id_block *b, int64_t *numbers) {
    const uint8_t *pilots = (const uint8_t *)(intptr_t)m->pilots, *kept = (const uint8_t *)(intptr_t)m->ids;
    uint64_t pilot[ID_BLOCK];
    int64_t row[ID_BLOCK];
    EACH_ID pilot[i] = pilots[b->pilot_at[i]];
    EACH_ID row[i] = b->first[i] + (int64_t)slot_of(b->spread[i], pilot[i], b->slots[i]);
    if (kept_apart) EACH_ID __builtin_prefetch(kept + row[i] * m->id_step, 0, 2);
    if (b->n == ID_BLOCK) {
        __builtin_memcpy(numbers, row, sizeof row);
    } else {
        for (int64_t i = 0; i < b->n; i++) numbers[i] = row[i];
    }
}

INLINE void place_ids(resolving *r, int64_t until, int is_whole, int kept_apart) {
    const job *j = r->job;
    const row_map *m = j->map;
    const int64_t count = (j->n_ids + ID_BLOCK - 1) / ID_BLOCK;
    int64_t k = r->next;
    for (; k < count + PILOT_LAG && (k - PILOT_LAG) * ID_BLOCK < until; k++) {
        if (k < count) {
            const int64_t at = k * ID_BLOCK, left = j->n_ids - at;
            hash_block(m, j->ids + 8 * at, left < ID_BLOCK ? left : ID_BLOCK, is_whole, &r->blocks[k % BLOCKS]);
        }
        if (k >= PILOT_LAG) place_block(m, kept_apart, &r->blocks[(k - PILOT_LAG) % BLOCKS], j->numbers + (k - PILOT_LAG) * ID_BLOCK);
    }
    r->next = k;
    r->placed = k > PILOT_LAG ? (k - PILOT_LAG) * ID_BLOCK : 0;
    if (r->placed > j->n_ids) r->placed = j->n_ids;
}

static NOINLINE void NAME(count_backfilled)(const row_map *m, const int64_t *rows, int64_t n, resolving *r) {
    const uint8_t *bits = (const uint8_t *)(intptr_t)m->backfilled;
    for (int64_t i = 0; i < n; i++)
        if (rows[i] != m->default_row && rows[i] >= 0) r->backfilled += bits[rows[i] >> 3] >> (rows[i] & 7) & 1;
}

/* `n` ids from number `at` on: is the id that their row keeps theirs? */
INLINE void check_block(resolving *r, int64_t at, int64_t n) {
    const job *j = r->job;
    const row_map *m = j->map;
    const uint8_t *kept = (const uint8_t *)(intptr_t)m->ids;
    const int64_t step = m->id_step, default_row = m->default_row;
    int64_t *rows = j->numbers + at, found[ID_BLOCK], lacks = 0;
    for (int64_t i = 0; i < n; i++) found[i] = load_i64(kept + (rows[i] < 0 ? 0 : rows[i]) * step);
    for (int64_t i = 0; i < n; i++) found[i] = (found[i] == load_i64(j->ids + 8 * (at + i))) & (rows[i] >= 0);
    for (int64_t i = 0; i < n; i++) {
        rows[i] = found[i] ? rows[i] : default_row;
        lacks += !found[i];
    }
    if (j->found)
        for (int64_t i = 0; i < n; i++) j->found[at + i] = (uint8_t)found[i];
    r->missing += lacks;
    if (m->backfilled) NAME(count_backfilled)(m, rows, n, r);
}

static NOINLINE void NAME(check_ids)(resolving *r, int64_t until) {
    int64_t at = r->checked;
    for (; at + ID_BLOCK <= until; at += ID_BLOCK) check_block(r, at, ID_BLOCK);
    if (at < until) check_block(r, at, until - at);
    r->checked = until;
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
    r->placed = r->checked = j->n_ids;
}

static NOINLINE void NAME(place_whole)(resolving *r, int64_t until) { place_ids(r, until, 1, 0); }
static NOINLINE void NAME(place_kept_apart)(resolving *r, int64_t until) { place_ids(r, until, 1, 1); }
static NOINLINE void NAME(place_part)(resolving *r, int64_t until) { place_ids(r, until, 0, r->job->map->id_step != r->job->row_bytes); }

/* Gives ids up to number `until`, or some further, the rows that are theirs if they are there. */
static void NAME(place)(resolving *r, int64_t until) {
    const row_map *m = r->job->map;
    if (r->placed >= until) return;
    if (!m->directory || !m->id_count) NAME(resolve_rows)(r);
    else if (m->bucket_ids || m->buckets_here < m->buckets) NAME(place_part)(r, until);
    else if (m->id_step == r->job->row_bytes) NAME(place_whole)(r, until);
    else NAME(place_kept_apart)(r, until);
}

/* Fills a job's `numbers`, and `found` where it is there, up to id number `until`; counts what lacks a row of its own. */
static void NAME(resolve)(resolving *r, int64_t until) {
    NAME(place)(r, until);
    if (r->checked < until) NAME(check_ids)(r, until);
}
