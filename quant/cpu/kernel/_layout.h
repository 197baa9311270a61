/* Turns a request's lookups into jobs of the GPU's lookup kernel, for `_native_jobs.c` (one layout) and
 * `_native_batch.c` (a whole batch). Lookups that the CPU does have no job. Nothing here calls Python. */
#pragma once
#include <stdint.h>
#include "_native_jobs.h"
#include "_place.h"

#define MEMBER(name) int64_t name;
typedef struct { GPU_KIND_FIELDS(MEMBER) } kind;
typedef struct { JOB_FIELDS(MEMBER) } job;
typedef struct { MOVE_FIELDS(MEMBER) } move;
typedef struct { int64_t table, ids_at, ids, locations_at; } cached;
typedef struct { int64_t lookup, row_map, ids_at, ids, found_at; } resolved;

enum { OUT_ALIGNMENT = 16 };

typedef struct { MEASURED_FIELDS(MEMBER) } measured;
enum { HAS_LENGTHS = 1, IS_WEIGHTED = 2, IS_INDIRECT = 4 };

static inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
static inline int64_t aligned(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t item_of(const kind *k) { return k->precision ? 2 : 4; }
static inline int64_t outputs_of(const kind *k, const place *p) { return k->is_pooled ? p->bags : p->ids; }

/* The jobs of one launch while they are written. */
typedef struct { job *jobs, *is_offset; int64_t count, programs, block; int has_lengths, is_weighted,
                is_indirect; } jobs_of;

static const int64_t LARGEST = INT32_MAX;

static inline int is_sound(const kind *k, const place *p) {
    int64_t ids;
    return p->found_at >= -1 && p->found_at <= INT64_MAX - LARGEST && p->out_row_bytes >= 0
           && p->ids >= 0 && p->ids <= LARGEST && p->bags >= 0 && p->bags <= LARGEST && p->bag_length >= 0
           && (!k->is_pooled || p->lengths_at >= 0
               || (!__builtin_mul_overflow(p->bags, p->bag_length, &ids) && ids == p->ids));
}

/* The kernel can write vectors there: it writes 4 values at once if dim is a multiple of 4. */
static inline int can_be_written(const kind *k, const place *p) {
    int64_t unit = item_of(k) * (k->dim % 4 ? 1 : 4);
    return p->out_at % unit == 0 && p->out_row_bytes % unit == 0;
}

/* all_found: masks of tables that have every id, which the host fills. gathered: lookups whose rows the CPU
 * gathers, rows_bytes in all, as far as gather_bytes go. on_host: lookups that the CPU does. */
typedef struct { int64_t in_bytes, rows_bytes, out_bytes, scratch, locations, moved_in, moved_out, found, mapped,
                 all_found, gathered, gather_bytes, on_host; } sizes;

static inline void stage(sizes *s, move *moves, int64_t *at, int64_t *is_offset, int64_t source,
                         int64_t bytes) {
    s->in_bytes = aligned(s->in_bytes, 8);
    *at = s->in_bytes, *is_offset = 1;
    move *last = moves + s->moved_in - 1;
    if (s->moved_in && last->source + last->bytes == source && last->target + last->bytes == s->in_bytes)
        last->bytes += bytes;
    else if (bytes) moves[s->moved_in++] = (move){source, s->in_bytes, bytes, 1, 0, 0};
    s->in_bytes += bytes;
}

/* Room for everything that a request of `count` lookups can have. */
typedef struct { job *jobs; move *in, *out; cached *found; resolved *mapped; int64_t *gathered; } room;

static inline void add(int64_t number, const kind *k, const place *p, int is_placed, sizes *s, room *m,
                       jobs_of *to) {
    int64_t outputs = outputs_of(k, p), item = item_of(k), bytes = outputs * k->dim * item;
    job *j = to->jobs + to->count, *moves = to->is_offset + to->count;
    *moves = (job){0};
    *j = (job){.table = k->table, .rows = k->rows, .row_bytes = k->row_bytes, .dim = k->dim,
               .format = k->row_format,
               .mean = k->mean, .ids = p->ids, .lengths_at = -1, .bag_length = p->bag_length,
                   .vectors = outputs,
               .weights_at = -1, .precision = k->precision, .first_program = to->programs,
                   .starts_at = s->scratch,
               .hbm_rows = k->hbm_rows, .locations_at = -1, .hbm_share = k->hbm_share, .out_step = k->dim};
    moves->out_at = moves->first_program = moves->starts_at = 1;
    if (k->is_gathered && p->ids && p->ids * k->row_bytes <= s->gather_bytes - s->rows_bytes) {
        m->gathered[s->gathered++] = number;
        j->table = s->rows_bytes, moves->table = 1;
        j->rows = p->ids, j->ids_at = -1, j->hbm_rows = j->hbm_share = 0;
        s->rows_bytes += p->ids * k->row_bytes;
    } else stage(s, m->in, &j->ids_at, &moves->ids_at, p->ids_at, 8 * p->ids);
    if (k->cache_table >= 0) {
        m->found[s->found++] = (cached){k->cache_table, j->ids_at, p->ids, s->locations};
        j->locations_at = s->locations, moves->locations_at = 1;
        s->locations += 4 * p->ids;
    }
    if (k->is_pooled && p->lengths_at >= 0) {
        stage(s, m->in, &j->lengths_at, &moves->lengths_at, p->lengths_at, 4 * p->bags);
        s->scratch += p->bags + 2;
        to->has_lengths = 1;
    }
    if (k->is_pooled && p->weights_at >= 0) {
        stage(s, m->in, &j->weights_at, &moves->weights_at, p->weights_at, 4 * p->ids);
        to->is_weighted = 1;
    }
    to->is_indirect |= j->locations_at >= 0 || j->hbm_share > 0;
    if (is_placed) {
        j->out_at = p->out_at;
        if (p->out_row_bytes) j->out_step = p->out_row_bytes / item;
    } else {
        j->out_at = s->out_bytes;
        s->out_bytes += aligned(bytes, OUT_ALIGNMENT);
        int64_t row = k->dim * item;
        if (bytes && p->out_row_bytes)
            m->out[s->moved_out++] = (move){j->out_at, p->out_at, row, outputs, row, p->out_row_bytes};
        else if (bytes) m->out[s->moved_out++] = (move){j->out_at, p->out_at, bytes, 1, 0, 0};
    }
    int64_t mask_at = -1;
    if (p->found_at >= 0 && !k->row_map) s->all_found++;
    else if (p->found_at >= 0 && is_placed) mask_at = p->found_at;
    else if (p->found_at >= 0) {
        mask_at = s->out_bytes, s->out_bytes += aligned(p->ids, OUT_ALIGNMENT);
        if (p->ids) m->out[s->moved_out++] = (move){mask_at, p->found_at, p->ids, 1, 0, 0};
    }
    if (k->row_map) m->mapped[s->mapped++] = (resolved){number, k->row_map, j->ids_at, p->ids, mask_at};
    to->programs += (outputs * k->columns + to->block - 1) / to->block;
    to->count++;
}

/* Whether vectors and masks go straight to where the caller wants them. Masks that the host fills do not. */
static inline int is_direct(const kind *kinds, const place *p, int64_t count, int *is_placed) {
    int64_t at = 0;
    int packed = 1, apart = 0, writable = 1, all_found = 0, on_host = 0;
    for (int64_t i = 0; i < count; i++) {
        const kind *k = kinds + p[i].kind;
        on_host |= !k->is_on_device;
        int64_t bytes = outputs_of(k, p + i) * k->dim * item_of(k);
        packed &= !bytes || (p[i].out_at == at && !p[i].out_row_bytes);
        apart |= p[i].out_row_bytes > 0;
        writable &= can_be_written(k, p + i);
        all_found |= p[i].found_at >= 0 && !k->row_map;
        at += aligned(bytes, OUT_ALIGNMENT);
    }
    *is_placed = !all_found && !on_host && (packed || (apart && writable));
    return *is_placed;
}

/* A request's lookups, laid out. end: where the last vector or mask ends in the caller's output buffer. */
typedef struct { jobs_of pooled, unpooled; sizes sizes; int64_t end; int is_direct; } laid_out;

/* Whether these lookups, of `of_kinds` kinds, can be laid out. */
static inline int are_sound(const kind *kinds, int64_t of_kinds, const place *p, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (p[i].kind < 0 || p[i].kind >= of_kinds || !is_sound(kinds + p[i].kind, p + i)) return 0;
    return 1;
}

/* Lays out lookups that are sound, in room for as many. gather_bytes: of rows that the CPU gathers at most. */
static inline void lay_out_in(room *m, const kind *kinds, const place *p, int64_t count, int64_t pooled_block,
                              int64_t unpooled_block, int64_t gather_bytes, laid_out *to) {
    int64_t each = count + 1;
    int is_placed;
    *to = (laid_out){.pooled = {.jobs = m->jobs, .is_offset = m->jobs + each, .block = pooled_block},
                     .unpooled = {.jobs = m->jobs + 2 * each, .is_offset = m->jobs + 3 * each,
                                  .block = unpooled_block},
                     .sizes = {.gather_bytes = gather_bytes}};
    to->is_direct = is_direct(kinds, p, count, &is_placed);
    for (int64_t i = 0; i < count; i++) {
        const kind *k = kinds + p[i].kind;
        int64_t outputs = outputs_of(k, p + i), row = k->dim * item_of(k);
        int64_t last = outputs ? p[i].out_at + (outputs - 1) * (p[i].out_row_bytes ? p[i].out_row_bytes
                                                                : row) + row : 0;
        if (last > to->end) to->end = last;
        if (p[i].found_at >= 0 && p[i].found_at + p[i].ids > to->end) to->end = p[i].found_at + p[i].ids;
        if (k->is_on_device) add(i, k, p + i, is_placed, &to->sizes, m, k->is_pooled ? &to->pooled : &to->unpooled);
        else to->sizes.on_host++;
    }
    if (is_placed) to->sizes.out_bytes = aligned(to->end, OUT_ALIGNMENT);
}

/* The job of each program of a launch, numbered from `first` on. */
static inline void write_programs(const jobs_of *jobs, int32_t first, int32_t *to) {
    for (int64_t k = 0; k < jobs->count; k++) {
        int64_t end = k + 1 < jobs->count ? jobs->jobs[k + 1].first_program : jobs->programs;
        for (int64_t program = jobs->jobs[k].first_program; program < end; program++)
            to[program] = first + (int32_t)k;
    }
}

/* Whether `rows` parts of `bytes` bytes, `step` apart, lie in a buffer at `at`. */
void free_room(room *m);
int make_room(room *m, int64_t count); /* 0: there is none, and Python's error says so */
/* Copies parts of one buffer to another; 0: one of them does not lie in its buffer. */
int copy_parts(const move *moves, int64_t count, const Py_buffer *source, const Py_buffer *target, int64_t base);
