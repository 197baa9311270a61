/* The formats of rows, shared by every instruction set. Values are those of quant/row_format.py. */
#pragma once
#include <stdint.h>

enum format {
    INT2 = 0, INT4 = 1, INT8 = 2, FP8 = 3, FP16 = 4, FP32 = 5, E4M3 = 6, E4M3_BLOCK32 = 7, NVFP4 = 8,
    LAST_FORMAT = NVFP4, BF16 = 9 /* as a source only */
};
/* POOL_PACKED: of a kind alone; rows are copied as they are packed. */
enum precision { AS_FP32 = 0, AS_FP16 = 1, AS_BF16 = 2 };
enum pooling { POOL_NONE = 0, POOL_SUM = 1, POOL_MEAN = 2, POOL_PACKED = 3 };

/* Where the scales of an NVFP4 row of `dim` values lie: the row's, then those of blocks. */
#define NVFP4_SCALE(dim) ((dim) / 2)
#define NVFP4_SCALES(dim) (NVFP4_SCALE(dim) + 4)

/* The bytes of a row of `dim` values, scales and bias included, without what it is padded with. */
#define USED_BYTES(format, dim) \
    ((format) <= INT8 ? 4 + (dim) * (2 << (format)) / 8 : (format) == FP8 ? (dim) : (format) == FP16 \
     ? 2 * (dim) : (format) == FP32 ? 4 * (dim) : (format) == E4M3 ? 4 + (dim) : (format) == E4M3_BLOCK32 \
     ? (dim) + (dim) / 32 : NVFP4_SCALES(dim) + (dim) / 16)
/* The bytes of a row that is quantized: values one after another, or a row of a format that has scales. */
#define SOURCE_BYTES(source, dim) ((source) == BF16 ? 2 * (dim) : USED_BYTES(source, dim))
/* A row holds whole blocks of so many values, each with its scale. */
#define BLOCK_OF(format) ((format) == E4M3_BLOCK32 ? 32 : (format) == NVFP4 ? 16 : 1)

/* One lookup in one table. Addresses are absolute. */
typedef struct {
    const uint8_t *table; /* [rows, row_bytes] */
    int64_t rows, row_bytes, dim;
    int format, pooling;
    const uint8_t *ids; /* int64 [n_ids], any alignment */
    int64_t n_ids;
    const uint8_t *lengths; /* int32 [n_bags], any alignment; null: every bag has fixed_length ids */
    int64_t fixed_length, n_bags;
    const uint8_t *weights; /* fp32 [n_ids], any alignment, or null */
    uint8_t *out;           /* [n_bags or n_ids] rows of out_row_bytes */
    int64_t out_row_bytes;
    int precision; /* of the vectors: enum precision */
    int is_away;   /* 1: no row of the table itself may be read, and ids are refused unless all are layers' */
    int is_gather; /* 1: rows are copied as they are packed; format, dim and pooling are not read */
    const struct row_map *map; /* how ids become row numbers (_ids.h), or null: they are row numbers */
    uint8_t *found;            /* [n_ids]: whether the table has the id, 1 or 0; or null */
    int64_t *numbers;          /* [n_ids], of a job that has a map: where its row numbers go */
    int64_t beyond;            /* how many ids behind these may be prefetched: more of the same job */
    /* [2], of a job that has a map: ids that are missing and that are backfilled are added to it; null:
     * nobody checked its ids */
    int64_t *unfound;
} job;

/* Bytes of one value of a job's vectors. */
static inline int64_t value_bytes(const job *j) { return j->precision == AS_FP32 ? 4 : 2; }

/* How many vectors a job writes. */
static inline int64_t bags_of(const job *j) { return j->pooling == POOL_NONE ? j->n_ids : j->n_bags; }

/* How rows are prefetched: far ahead into L1 or L2, and those that are `near` rows ahead into L1 again; 0: they
 * are not. */
typedef struct { int into_l1; int64_t near; } prefetching;

/* How far rows are prefetched: `a` is some rows ahead of the lookup, in the same job or in a later one. */
typedef struct {
    const job *job, *end; /* the jobs of this thread; none is left at `end` */
    int64_t id;           /* of `job`: the next to be prefetched */
    prefetching how;
} ahead;

/* What one instruction set offers. */
struct resolving;
typedef struct {
    const char *name;
    /* Pools a job's bags (unpooled: copies rows). Prefetches the next row of `a` for each one read. */
    void (*lookup)(const job *j, ahead *a);
    /* Packs rows; returns the first row that cannot be packed, or -1. */
    int64_t (*quantize)(int format, int source, const uint8_t *values, int64_t rows, int64_t dim,
                        uint8_t *out, int64_t row_bytes, float *scratch);
    /* Resolve ids of a job with a map up to `until` (_resolve.h): find their places; check them. */
    void (*place)(struct resolving *r, int64_t until), (*resolve)(struct resolving *r, int64_t until);
} kernel;

/* Writes the kernels that this processor runs, fastest first, to `found`; returns how many. */
enum { MOST_KERNELS = 3 };
int find_kernels(const kernel **found);

/* What runs lookups, and how it prefetches rows. */
typedef struct { const kernel *kernel; prefetching how; } runner;

static inline int64_t load_i64(const uint8_t *p) { int64_t x; __builtin_memcpy(&x, p, 8); return x; }
static inline int32_t load_i32(const uint8_t *p) { int32_t x; __builtin_memcpy(&x, p, 4); return x; }
static inline float load_f32(const uint8_t *p) { float x; __builtin_memcpy(&x, p, 4); return x; }
