/* From ids to row numbers (quant/rows/ids.py): structures and functions of the resolver and the builder. */
#pragma once
#include <stdint.h>
#include "_rows.h"

/* The fields of quant.rows.ids.NativeRowMap, int64 each. */
#define ROW_MAP_FIELDS(F) \
    F(id_count) F(default_row) F(first) F(own) F(directory) F(entries) F(pilots) F(ids) F(id_step) \
    F(buckets) F(bucket_ids) \
    F(first_bucket) F(buckets_here) F(backfilled) F(layers) F(layer_count) \
    F(hot) F(hot_first) F(hot_slots) F(hot_rows)
#define ROW_MAP_MEMBER(name) int64_t name;
typedef struct row_map { ROW_MAP_FIELDS(ROW_MAP_MEMBER) } row_map;

/* Whether some rows may be those of layers: an overlay's, or hot. */
static inline int has_layers(const row_map *m) { return m->layer_count || m->hot; }

/* A layer of an overlay, as quant/rows/overlay.py specifies it: the fields of its NativeLayer, int64 each. */
#define LAYER_FIELDS(F) \
    F(filter) F(filter_words) F(first_row) F(deleted) F(entries) F(pilots) F(ids) F(id_step) F(buckets) \
    F(slots) F(marks) F(marks_before) F(marked_slots) F(first_marked) F(marked)
typedef struct layer { LAYER_FIELDS(ROW_MAP_MEMBER) } layer;
#undef ROW_MAP_MEMBER

/* Which of 64 row numbers are hot, and how many are before them (quant/rows/hot.py). */
typedef struct { uint64_t bits, before; } hot_word;

/* An entry of a directory. The entry behind the last bucket's has the row behind its last one. */
typedef struct { int64_t first_row; uint64_t seed; } entry;

/* The same of one bucket for itself, as a resolver reads it at once. */
typedef struct { int64_t first_row; uint32_t slots, seed; } whole_entry;

static const uint64_t ID_MIX = 0xD6E8FEB86659FD93u, ID_SEED = 0x9E3779B97F4A7C15u,
    ID_SPREAD = 0xBF58476D1CE4E5B9u, ID_PILOT = 0x94D049BB133111EBu, ID_SLOT = 0xC2B2AE3D27D4EB4Fu,
                          ID_FILTER = 0x9FB21C651E98DF25u;

static inline uint64_t mix_id(uint64_t x) {
    x = (x ^ (x >> 32)) * ID_MIX;
    x = (x ^ (x >> 32)) * ID_MIX;
    return x ^ (x >> 32);
}

/* An id's hash in its bucket; the high half chooses its pilot. The xor-shift protects against chosen ids,
 * whose order a product keeps. */
static inline uint64_t spread(uint64_t hash, uint64_t seed) {
    const uint64_t g = (hash ^ seed * ID_SEED) * ID_SPREAD;
    return (g ^ (g >> 32)) * ID_MIX;
}

/* `x` of 32 bits as a number below `count`, which has 32 bits too. */
static inline uint64_t reduce(uint64_t x, uint64_t count) { return (x >> 32) * count >> 32; }

/* How many pilots come before row `slots` of a bucket, or of a table without its buckets' extra ones. */
static inline uint64_t pilots_before(uint64_t slots) { return slots * 5 >> 4; }

static inline uint64_t slot_of(uint64_t spread, uint64_t pilot, uint64_t slots) {
    return reduce((spread ^ (pilot + 1) * ID_PILOT) * ID_SLOT, slots);
}

/* The bucket of an id, counted from the first here; buckets_here or more: no bucket here. */
static inline uint64_t bucket_of(const row_map *m, uint64_t id, uint64_t hash) {
    if (!m->bucket_ids) return (hash & (uint64_t)(m->buckets - 1)) - (uint64_t)m->first_bucket;
    uint64_t bucket = id / (uint64_t)m->bucket_ids;
    return (int64_t)id < 0 || bucket >= (uint64_t)m->buckets ? UINT64_MAX
        : bucket - (uint64_t)m->first_bucket;
}

/* lag: blocks by which the second step is behind the first */
enum { ID_BLOCK = 16, PILOT_LAG = 3, BLOCKS = 4 };
enum { STRETCH = 2048 }; /* ids that an overlay is asked for at once; whole blocks */
#define NOT_OVERLAID INT64_MIN /* the number of no row, as tables begin at addresses above 0 */

/* Ids between two steps. */
typedef struct {
    int64_t n, first[ID_BLOCK];
    uint64_t spread[ID_BLOCK], pilot_at[ID_BLOCK];
    uint64_t slots[ID_BLOCK]; /* of the id's bucket; 0: it has none here */
} id_block;

/* A job whose ids become row numbers, as far as that is done. */
typedef struct resolving {
    const job *job;
    int64_t next;    /* block for the first step */
    int64_t placed;  /* ids before this one have the row that is theirs if they are there, or -1 */
    int64_t checked; /* ids before this one have their row, and are counted below where it is not their own */
    int64_t missing, backfilled;
    id_block blocks[BLOCKS];
    /* what an overlay says of the ids of the stretch that is being placed: a row, -1, or NOT_OVERLAID */
    int64_t overlay[STRETCH];
} resolving;
