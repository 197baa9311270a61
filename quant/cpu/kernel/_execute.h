/* Lookups of one call: checks every id and length, then runs the jobs, on several threads if that pays. A
 * big call is cut into parts of about equal bytes; each thread takes the next free part, so a call waits
 * at most for the last one. */
#pragma once
#include "_pool.h"
#include "_prefetch.h"
#include "_ids.h"
#include <stdlib.h>
#include <string.h>

/* Smaller calls (bytes read and written) run on the caller's thread: waking another takes longer. */
enum { SHARED_BYTES = 2 << 20, PART_BYTES = 256 << 10, PARTS_A_THREAD = 8,
      MAX_PARTS = PARTS_A_THREAD * MAX_THREADS };

enum problem { NO_PROBLEM = 0, BAD_ID = 1, BAD_LENGTH = 2, BAD_SUM = 3, MISSING_ID = 4, NO_MEMORY = 5,
               AWAY = 6 };
typedef struct { int64_t job; enum problem problem; int64_t position, value; } verdict;

/* The sign of `id | (rows - 1 - id)` is set for ids outside [0, rows), without a 64-bit comparison. */
static verdict check_ids(const job *j) {
    uint64_t last = (uint64_t)j->rows - 1, signs = 0;
    for (int64_t i = 0; i < j->n_ids; i++) {
        uint64_t id = (uint64_t)load_i64(j->ids + 8 * i);
        signs |= id | (last - id);
    }
    if (signs >> 63)
        for (int64_t i = 0; i < j->n_ids; i++)
            if ((uint64_t)load_i64(j->ids + 8 * i) >= (uint64_t)j->rows)
                return (verdict){0, BAD_ID, i, load_i64(j->ids + 8 * i)};
    return (verdict){0, NO_PROBLEM, 0, 0};
}

static verdict check_lengths(const job *j) {
    int64_t sum = 0;
    if (j->pooling == POOL_NONE) return (verdict){0, NO_PROBLEM, 0, 0};
    if (!j->lengths) {
        sum = j->fixed_length * j->n_bags;
    } else {
        int32_t sign = 0;
        for (int64_t b = 0; b < j->n_bags; b++) {
            int32_t length = load_i32(j->lengths + 4 * b);
            sign |= length;
            sum += length;
        }
        if (sign < 0)
            for (int64_t b = 0; b < j->n_bags; b++)
                if (load_i32(j->lengths + 4 * b) < 0)
                    return (verdict){0, BAD_LENGTH, b, load_i32(j->lengths + 4 * b)};
    }
    if (sum != j->n_ids) return (verdict){0, BAD_SUM, j->n_bags, sum};
    return (verdict){0, NO_PROBLEM, 0, 0};
}

/* A map that only serves its overlay or hot rows: ids are row numbers, and all others are refused before any lookup. */
static int is_plain(const row_map *m) {
    return !m->directory && !m->first && m->default_row < 0 && has_layers(m);
}

static verdict check(const job *jobs, int64_t n) {
    for (int64_t k = 0; k < n; k++) {
        if (jobs[k].is_away && !(jobs[k].map && has_layers(jobs[k].map))) return (verdict){k, AWAY, 0, 0};
        verdict v = check_lengths(jobs + k);
        if (!v.problem && (!jobs[k].map || is_plain(jobs[k].map))) v = check_ids(jobs + k);
        if (v.problem) {
            v.job = k;
            return v;
        }
    }
    return (verdict){0, NO_PROBLEM, 0, 0};
}

/* ---- ids of jobs with a map become row numbers ---- With a default row, some bags' ids become rows,
 * which prefetches these, and the bags are pooled at once. If missing ids are refused, all ids are
 * resolved first, since an error must not write anything. */

/* a call of fewer ids than that shares no pieces */
enum { IDS_AT_ONCE = 64, ROWS_AT_ONCE = 320, IDS_A_PIECE = 2048, SHARED_IDS = 16384 };

static int refuses(const job *j) { return j->map && j->map->default_row < 0 && !is_plain(j->map); }

/* All ids are resolved first if one may be refused, if a row may be away, or if only an overlay or hot rows
 * map them (faster for many at once). */
static int goes_first(const job *j) {
    return j->map && (refuses(j) || j->is_away || (!j->map->directory && has_layers(j->map)));
}

static int64_t pieces_of(const job *j) {
    return goes_first(j) ? (j->n_ids + IDS_A_PIECE - 1) / IDS_A_PIECE : 0;
}

static void count_unfound(const resolving *r) {
    if (r->missing) __atomic_fetch_add(&r->job->unfound[0], r->missing, __ATOMIC_RELAXED);
    if (r->backfilled) __atomic_fetch_add(&r->job->unfound[1], r->backfilled, __ATOMIC_RELAXED);
}

static void begin(resolving *r, const job *j) {
    r->job = j, r->next = r->placed = r->checked = r->missing = r->backfilled = 0;
}

typedef struct { runner with; const job *jobs; } resolution;

/* Writes the row numbers of a job whose rows are away, and counts it as missing unless all are layers'. */
static void place_in_layers(runner with, resolving *r) {
    const job *j = r->job;
    const row_map *m = j->map;
    /* bit 63: a number lies in [-1, rows); differences, as SSE2 compares no int64 */
    uint64_t lacking = 0;
    with.kernel->place(r, j->n_ids);
    for (int64_t i = 0; i < j->n_ids; i++) {
        const uint64_t row = (uint64_t)j->numbers[i];
        lacking |= ~((row + 1) | ((uint64_t)j->rows - 1 - row));
    }
    if (m->directory) r->missing = 0;
    r->missing += (int64_t)(lacking >> 63);
}

/* Piece number `k` of a job. */
static void resolve_piece_of(runner with, const job *j, int64_t k) {
    job part = *j;
    const int64_t from = k * IDS_A_PIECE, left = j->n_ids - from;
    part.ids += 8 * from, part.numbers += from, part.n_ids = left < IDS_A_PIECE ? left : IDS_A_PIECE;
    if (part.found) part.found += from;
    resolving r;
    begin(&r, &part);
    if (!j->is_away) with.kernel->resolve(&r, part.n_ids);
    else if (!__atomic_load_n(&j->unfound[0], __ATOMIC_RELAXED)) place_in_layers(with, &r);
    count_unfound(&r);
}

/* Piece number `piece` over all jobs that go first. */
static void resolve_piece(const void *argument, int piece) {
    const resolution *all = argument;
    const job *j = all->jobs;
    int64_t k = piece;
    for (; k >= pieces_of(j); j++) k -= pieces_of(j);
    resolve_piece_of(all->with, j, k);
}

/* Jobs that go first get their row numbers. The verdict is of the first id that has none. */
static verdict resolve_ids(runner with, job *jobs, int64_t n, int64_t threads) {
    int64_t ids = 0, pieces = 0;
    for (int64_t k = 0; k < n; k++) {
        if (goes_first(jobs + k)) ids += jobs[k].n_ids, pieces += pieces_of(jobs + k);
        else if (!jobs[k].map && jobs[k].found) memset(jobs[k].found, 1, (size_t)jobs[k].n_ids);
    }
    if (pieces > INT32_MAX) return (verdict){0, NO_MEMORY, 0, ids};
    resolution all = {with, jobs};
    if (threads > 1 && ids >= SHARED_IDS) run_parts((int)pieces, (int)threads, resolve_piece, &all);
    else
        for (int64_t k = 0; pieces && k < n; k++)
            for (int64_t piece = 0; piece < pieces_of(jobs + k); piece++) {
                resolve_piece_of(with, jobs + k, piece);
                if (jobs[k].is_away && jobs[k].unfound[0]) return (verdict){k, AWAY, 0, 0};
            }
    for (int64_t k = 0; k < n; k++) {
        job *j = jobs + k;
        int64_t at = 0;
        if (!goes_first(j)) continue;
        if (j->is_away && j->unfound[0]) return (verdict){k, AWAY, 0, 0};
        if (j->is_away && j->found) memset(j->found, 1, (size_t)j->n_ids);
        if (refuses(j) && j->unfound[0]) {
            while (j->numbers[at] != -1) at++;
            return (verdict){k, MISSING_ID, at, load_i64(j->ids + 8 * at)};
        }
        j->ids = (const uint8_t *)j->numbers, j->map = NULL;
    }
    return (verdict){0, NO_PROBLEM, 0, 0};
}

/* Memory for row numbers and counts of all jobs with a map. Null: none is needed, or (failed set) there is
 * none. */
static int64_t *make_rows(job *jobs, int64_t n, int *failed) {
    int64_t ids = 0, maps = 0, *memory;
    for (int64_t k = 0; k < n; k++)
        if (jobs[k].map) ids += jobs[k].n_ids, maps++;
    if (!maps) return NULL;
    if (!(memory = malloc((size_t)(ids + 2 * n) * 8))) {
        *failed = 1;
        return NULL;
    }
    memset(memory, 0, (size_t)(2 * n) * 8);
    int64_t *rows = memory + 2 * n;
    for (int64_t k = 0; k < n; k++) {
        if (!jobs[k].map) continue;
        jobs[k].unfound = memory + 2 * k, jobs[k].numbers = rows;
        rows += jobs[k].n_ids;
    }
    return memory;
}

/* Copies rows unchanged; the one behind the last, which a map may give for missing ids, is zeros. Float
 * registers would change the bytes of a signaling NaN. */
static void copy_rows(const job *j, ahead *a) {
    const int64_t last = j->n_ids + j->beyond, lead = a->job == j ? a->id : last;
    const int64_t until = last - lead < j->n_ids ? last - lead : j->n_ids;
    uint8_t *out = j->out;
    for (int64_t id = 0; id < j->n_ids; id++, out += j->out_row_bytes) {
        if (id < until)
            prefetch_row(j->table, j->row_bytes, j->row_bytes, j->ids + 8 * (id + lead), a->how.into_l1);
        else prefetch_later(a, j, 1);
        if (id + 1 == until && a->job == j) a->id += until;
        const int64_t row = load_i64(j->ids + 8 * id);
        if (row != j->rows) __builtin_memcpy(out, j->table + row * j->row_bytes, (size_t)j->row_bytes);
        else __builtin_memset(out, 0, (size_t)j->row_bytes);
    }
}

static void look_up(runner with, const job *j, ahead *a) {
    if (j->is_gather) copy_rows(j, a);
    else with.kernel->lookup(j, a);
}

/* Takes the first `bags` bags, of `ids` ids, off a job. */
static job split(job *rest, int64_t bags, int64_t ids) {
    job head = *rest;
    int64_t outputs = rest->pooling == POOL_NONE ? ids : bags;
    head.n_ids = ids, head.n_bags = outputs;
    rest->n_ids -= ids, rest->n_bags -= outputs;
    rest->ids += 8 * ids, rest->out += outputs * rest->out_row_bytes;
    if (rest->lengths) rest->lengths += 4 * bags;
    if (rest->weights) rest->weights += 4 * ids;
    if (rest->map) rest->numbers += ids;
    if (rest->map && rest->found) rest->found += ids;
    return head;
}

/* Takes whole bags off a job until they have `wanted` ids. */
static job split_ids(job *rest, int64_t wanted) {
    int64_t bags = 0, ids = 0;
    if (rest->pooling == POOL_NONE) return split(rest, wanted, wanted);
    if (!rest->lengths) {
        bags = (wanted + rest->fixed_length - 1) / rest->fixed_length;
        return split(rest, bags, bags * rest->fixed_length);
    }
    while (ids < wanted) ids += load_i32(rest->lengths + 4 * bags++);
    return split(rest, bags, ids);
}

/* Runs jobs [j, end) with unresolved ids, some bags at a time: places ids, prefetches rows, checks ids,
 * pools. parts[0] is being pooled; parts[1] is the next job, whose first rows are prefetched meanwhile. */
static void run_mapped(runner with, const job *j, const job *end) {
    resolving states[2], *here = states, *after = states + 1;
    int64_t lead = 0; /* rows that are prefetched and not pooled */
    begin(here, j);
    for (; j < end; j++) {
        job rest = *j, parts[2];
        const int64_t row_ids = 1 + AHEAD_BYTES / (j->row_bytes + 48),
            at_once = j->map->directory ? IDS_AT_ONCE : ROWS_AT_ONCE;
        int is_last = 0, has_next = j + 1 < end;
        if (has_next) begin(after, j + 1);
        while (!is_last) {
            is_last = rest.n_ids <= at_once;
            parts[0] = is_last ? rest : split_ids(&rest, at_once);
            /* Rows come in while those before them are pooled, all of which are checked first. */
            const int64_t first = parts[0].numbers - j->numbers, until = first + parts[0].n_ids;
            /* ids that are row numbers need no row */
            const int64_t ahead_ids = j->map->directory ? parts[0].n_ids + row_ids : row_ids;
            const int64_t wanted = until + ahead_ids;
            with.kernel->place(here, wanted < j->n_ids ? wanted : j->n_ids);
            parts[0].ids = (const uint8_t *)parts[0].numbers, parts[0].beyond = here->placed - until;
            const int64_t placed = parts[0].n_ids + parts[0].beyond;
            ahead a = {parts, parts + 1, lead, with.how};
            if (has_next && here->placed == j->n_ids) {
                with.kernel->place(after, after->job->n_ids < ahead_ids ? after->job->n_ids : ahead_ids);
                parts[1] = *after->job;
                parts[1].ids = (const uint8_t *)parts[1].numbers, parts[1].n_ids = after->placed;
                a.end++;
                if (lead >= placed) a.job++, a.id = lead - placed;
            }
            if (lead < ahead_ids) prefetch_rows(&a, ahead_ids - lead);
            with.kernel->resolve(here, until);
            look_up(with, parts, &a);
            lead = a.job == parts ? a.id : a.job == a.end ? placed + (a.end > parts + 1 ? parts[1].n_ids : 0)
                : placed + a.id;
            lead -= parts[0].n_ids;
        }
        count_unfound(here);
        resolving *done = here;
        here = after, after = done;
    }
}

static void run_jobs(runner with, const job *jobs, const job *end) {
    while (jobs < end) {
        const job *stop = jobs;
        while (stop < end && !stop->map) stop++;
        ahead a = prefetch_ahead(jobs, stop, with.how);
        for (; jobs < stop; jobs++) {
            look_up(with, jobs, &a);
        }
        while (stop < end && stop->map) stop++;
        run_mapped(with, jobs, stop);
        jobs = stop;
    }
}

/* Bytes that a job reads and writes an id, shared cache lines included. The output stride does not count:
 * with one vector it may be anything. */
static int64_t bytes_an_id(const job *j) {
    const int64_t vector = j->is_gather ? j->row_bytes : j->dim * value_bytes(j);
    return j->row_bytes + 48 + (j->map ? 64 : 0) + (j->pooling == POOL_NONE ? vector : 0);
}

/* Jobs cut into parts of about as many bytes each: part p is pieces [first[p], first[p + 1]). */
typedef struct { runner with; job *pieces; int64_t first[MAX_PARTS + 1]; } parts_of;

/* `to->pieces` has room for n + parts jobs. */
static void cut(const job *jobs, int64_t n, int64_t bytes, int parts, parts_of *to) {
    int64_t made = 0, before = 0; /* bytes of the pieces made */
    int part = 0;
    to->first[0] = 0;
    for (int64_t k = 0; k < n; k++) {
        job rest = jobs[k];
        const int64_t each = bytes_an_id(&rest);
        while (part + 1 < parts) {
            int64_t wanted = (bytes / parts * (part + 1) - before) / each;
            if (wanted >= rest.n_ids) break;
            if (wanted > 0) {
                to->pieces[made++] = split_ids(&rest, wanted);
                before += to->pieces[made - 1].n_ids * each;
            }
            to->first[++part] = made;
        }
        if (bags_of(&rest)) to->pieces[made++] = rest;
        before += rest.n_ids * each;
    }
    while (part < parts) to->first[++part] = made;
}

static void run_part_of(const void *argument, int part) {
    const parts_of *p = argument;
    run_jobs(p->with, p->pieces + p->first[part], p->pieces + p->first[part + 1]);
}

/* room: for n + MAX_PARTS jobs, where threads > 1. */
static void run_all(runner with, const job *jobs, int64_t n, int64_t threads, job *room) {
    int64_t bytes = 0, parts;
    for (int64_t k = 0; k < n; k++) bytes += jobs[k].n_ids * bytes_an_id(jobs + k);
    parts = bytes / PART_BYTES < threads * PARTS_A_THREAD ? bytes / PART_BYTES : threads * PARTS_A_THREAD;
    if (threads == 1 || bytes < SHARED_BYTES) {
        run_jobs(with, jobs, jobs + n);
        return;
    }
    parts_of p = {.with = with, .pieces = room};
    cut(jobs, n, bytes, (int)parts, &p);
    run_parts((int)parts, (int)threads, run_part_of, &p);
}

/* Checks and runs jobs prepared by `make_rows` on up to `threads` threads. room: n + MAX_PARTS jobs if
 * threads > 1. */
static verdict execute(runner with, job *jobs, int64_t n, int64_t threads, job *room) {
    verdict v = check(jobs, n);
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (!v.problem) v = resolve_ids(with, jobs, n, threads);
    if (!v.problem && n) run_all(with, jobs, n, threads, room);
    return v;
}
