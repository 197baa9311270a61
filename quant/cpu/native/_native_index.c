/* The builder of id indexes (quant/rows/ids.py): ids are put into buckets, and each bucket gets the pilots by
 * which no two ids meet in a row.
 * Records are int64 [n, 2]: an id, and the number of its row in the source. Buckets of records lie one after
 * another.
 * count_buckets(row_map, ids, counts): adds how many of the ids each bucket has to counts, int64 [buckets];
 *   -> None, or the position of the
 *   first id that has no bucket
 * put_in_buckets(row_map, ids, sources, ends, records): appends each id, with its source, to its bucket;
 *   ends: int64 [buckets], where a
 *   bucket's next record goes
 * distinct(records, starts, first, last, keep, own, kept): of buckets [first, last) keeps each id once, the
 *   first (keep 1) or the last (2) of
 *   those that are the same, in front, and moves the others behind; kept: int64 [buckets], how many stay.
 *   keep 0: -> (id, source row, source
 *   row) of two that are the same, or None. A source from `own` on is an older version's: it stays where no
 *   other has its id
 * build(records, starts, kept, first, last, directory, pilots): finds seeds and pilots of buckets [first,
 *   last). directory has the first rows.
 *   -> None, or the number of a bucket for which none were found
 * place_rows(row_map, ids, rows, table_rows): the row that each id has if it is there, int64 [n]; what a row
 *   keeps is not looked at. A map without an index gives the default row (-1: none) of other ids; layers go first
 *   -> with the rows of the table, not 0: how many ids may lack a row of their own, or came from an older version
 * count_rows(counts, rows, found, most, step): adds step to counts, uint8, of rows, int64 [n], up to most, 127
 *   at most; bit 7 stays. Adds to found, int64 [2], the rows that are there, and those with bit 7
 * All of them release the interpreter's lock; buckets of different ranges may be handled by several threads
 * at once. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "_ids.h"
#include "_native_index.h"
#include "_native_runner.h"

/* ---- arguments ---- */

static int64_t int64s(const Py_buffer *b) { return b->len / 8; }

/* A row map of an index, out of a buffer of its fields; null: it is none. */
static const row_map *map_in(const Py_buffer *b) {
    const row_map *m = b->buf;
    return b->len == sizeof(row_map) && m->buckets >= 1 && m->buckets_here >= 1 ? m : NULL;
}

/* ---- ids into buckets ---- */

PyObject *py_count_buckets(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments all;
    (void)self;
    if (!take_arguments("count_buckets", "bbw", args, n, &all)) return NULL;
    const row_map *m = map_in(&all.b[0]);
    if (!m || int64s(&all.b[2]) != m->buckets_here) return unsound(&all, "count_buckets");
    const int64_t ids = int64s(&all.b[1]);
    int64_t *counts = all.b[2].buf, outside = -1;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < ids; i++) {
        const uint64_t id = (uint64_t)load_i64((const uint8_t *)all.b[1].buf + 8 * i),
            bucket = bucket_of(m, id, mix_id(id));
        if (bucket < (uint64_t)m->buckets_here) counts[bucket]++;
        else if (outside < 0) outside = i;
    }
    Py_END_ALLOW_THREADS
    release(&all);
    if (outside < 0) Py_RETURN_NONE;
    return PyLong_FromLongLong(outside);
}

PyObject *py_put_in_buckets(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments all;
    (void)self;
    if (!take_arguments("put_in_buckets", "bbbww", args, n, &all)) return NULL;
    const row_map *m = map_in(&all.b[0]);
    const int64_t ids = int64s(&all.b[1]), room = all.b[4].len / (int64_t)sizeof(record);
    if (!m || int64s(&all.b[2]) != ids || int64s(&all.b[3]) != m->buckets_here)
        return unsound(&all, "put_in_buckets");
    int64_t *ends = all.b[3].buf;
    record *records = all.b[4].buf;
    int fits = 1;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; fits && i < ids; i++) {
        const int64_t id = load_i64((const uint8_t *)all.b[1].buf + 8 * i);
        const uint64_t bucket = bucket_of(m, (uint64_t)id, mix_id((uint64_t)id));
        fits = bucket < (uint64_t)m->buckets_here && ends[bucket] >= 0 && ends[bucket] < room;
        if (fits) records[ends[bucket]++] = (record){id, load_i64((const uint8_t *)all.b[2].buf + 8 * i)};
    }
    Py_END_ALLOW_THREADS
    if (!fits) return unsound(&all, "put_in_buckets");
    release(&all);
    Py_RETURN_NONE;
}

/* ---- ids that are the same ---- */

/* Open-addressed table of positions + 1 of records; a power of two, at least twice the records. */
typedef struct { uint32_t *at; uint64_t mask, salt; } set;

static int make_set(set *s, int64_t records) {
    uint64_t size = 16;
    while (size < 2 * (uint64_t)records) size *= 2;
    s->mask = size - 1;
    /* An address that the system chose: whoever made the ids cannot know which of them meet. */
    s->salt = mix_id((uint64_t)(uintptr_t)(s->at = calloc(size, sizeof(uint32_t))));
    return s->at != NULL;
}

/* The record before number `i` that has its id, or -1; then number `i` is in the set. */
static int64_t same_id(set *s, const record *records, int64_t i) {
    uint64_t at = mix_id((uint64_t)records[i].id ^ s->salt) & s->mask;
    for (; s->at[at]; at = (at + 1) & s->mask)
        if (records[s->at[at] - 1].id == records[i].id) return (int64_t)s->at[at] - 1;
    s->at[at] = (uint32_t)(i + 1);
    return -1;
}

enum keep { KEEP_ONE = 0, KEEP_FIRST = 1, KEEP_LAST = 2 };
typedef struct { int failed; record twice; int64_t other; } twins;

/* Moves records whose id came before behind the others; the rest stays in order. Returns how many stay. */
static int64_t keep_distinct(record *records, int64_t n, int keep, int64_t own, twins *found) {
    set s;
    int64_t kept = 0, dropped = 0;
    if (n >= UINT32_MAX / 2 || !make_set(&s, n)) {
        found->failed = 2;
        return 0;
    }
    record *behind = NULL;
    for (int64_t i = 0; i < n; i++) {
        const record here = records[i];
        records[kept] = here; /* a set's records are those that were kept */
        const int64_t before = same_id(&s, records, kept);
        if (before < 0) {
            kept++;
            continue;
        }
        const int is_older = here.source >= own;
        if (keep == KEEP_ONE && !is_older) {
            *found = (twins){1, here, records[before].source};
            break;
        }
        if (!behind && !(behind = malloc((size_t)n * sizeof(record)))) {
            found->failed = 2;
            break;
        }
        behind[dropped++] = keep == KEEP_FIRST || is_older ? here : records[before];
        if (keep == KEEP_LAST && !is_older) records[before] = here;
    }
    if (dropped) memcpy(records + kept, behind, (size_t)dropped * sizeof(record));
    free(behind), free(s.at);
    return kept;
}

PyObject *py_distinct(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments all;
    (void)self;
    if (!take_arguments("distinct", "wbiiiiw", args, n, &all)) return NULL;
    const int64_t first = all.n[0], last = all.n[1], own = all.n[3], buckets = int64s(&all.b[2]),
                  room = all.b[0].len / (int64_t)sizeof(record), *starts = all.b[1].buf;
    int64_t *kept = all.b[2].buf;
    int sound = int64s(&all.b[1]) == buckets + 1 && first >= 0 && first <= last && last <= buckets;
    for (int64_t b = first; sound && b < last; b++)
        sound = starts[b] >= 0 && starts[b] <= starts[b + 1] && starts[b + 1] <= room;
    if (!sound) return unsound(&all, "distinct");
    twins found = {0};
    Py_BEGIN_ALLOW_THREADS
    for (int64_t b = first; b < last && !found.failed; b++)
        kept[b] = keep_distinct((record *)all.b[0].buf + starts[b], starts[b + 1] - starts[b], (int)all.n[2], own,
                                &found);
    Py_END_ALLOW_THREADS
    release(&all);
    if (found.failed == 2) return PyErr_NoMemory();
    if (!found.failed) Py_RETURN_NONE;
    return Py_BuildValue("LLL", (long long)found.twice.id, (long long)found.other,
                         (long long)found.twice.source);
}

/* ---- pilots of buckets ---- */

PyObject *py_build(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments all;
    int64_t failed = -1;
    (void)self;
    if (!take_arguments("build", "bbbiiww", args, n, &all)) return NULL;
    const int64_t *starts = all.b[1].buf, *kept = all.b[2].buf, room = all.b[0].len / (int64_t)sizeof(record);
    const int64_t buckets = int64s(&all.b[2]), from = all.n[0], end = all.n[1];
    entry *directory = all.b[3].buf;
    int sound = int64s(&all.b[1]) == buckets + 1 && all.b[3].len == (buckets + 1) * (int64_t)sizeof(entry)
        && from >= 0 && from <= end && end <= buckets;
    for (int64_t i = from; sound && i < end; i++) {
        const int64_t slots = directory[i + 1].first_row - directory[i].first_row;
        const int64_t pilots = (int64_t)pilots_before((uint64_t)directory[i].first_row) + i;
        sound = starts[i] >= 0 && kept[i] >= 0 && kept[i] <= room - starts[i] && directory[i].first_row >= 0
            && slots >= kept[i] && slots < UINT32_MAX / 4
            && pilots + (int64_t)pilots_before((uint64_t)slots) + 1 <= all.b[4].len;
    }
    if (!sound) return unsound(&all, "build");
    int verdict = 1;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = from; i < end && verdict == 1; i++) {
        const uint64_t first = (uint64_t)directory[i].first_row,
            slots = (uint64_t)directory[i + 1].first_row - first;
        if (!kept[i]) continue;
        verdict = build_bucket((const record *)all.b[0].buf + starts[i], kept[i], slots, &directory[i].seed,
                               (uint8_t *)all.b[4].buf + pilots_before(first) + i);
        failed = i;
    }
    Py_END_ALLOW_THREADS
    release(&all);
    if (verdict < 0) return PyErr_NoMemory();
    if (verdict) Py_RETURN_NONE;
    return PyLong_FromLongLong(failed);
}

/* ---- rows ---- */

/* How many ids of a job, whose numbers are placed, may not have the row of that number as one of their own. */
static int64_t count_doubtful(const job *j) {
    const row_map *m = j->map;
    int64_t doubtful = 0;
    for (int64_t i = 0; i < j->n_ids; i++) {
        const int64_t row = j->numbers[i];
        const uint64_t at = (uint64_t)load_i64(j->ids + 8 * i) - (uint64_t)m->first;
        const int is_overlaid = (uint64_t)row + 1 > (uint64_t)j->rows;
        if (m->directory) doubtful += !is_overlaid;
        else doubtful += at >= (uint64_t)m->id_count || row == -1 || row == m->default_row
                         || (!is_overlaid && row >= m->own);
    }
    return doubtful;
}

PyObject *py_place_rows(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments all;
    int64_t doubtful = 0;
    (void)self;
    if (!take_arguments("place_rows", "bbwi", args, n, &all)) return NULL;
    const int64_t rows = all.n[0];
    const row_map *m = all.b[0].buf;
    const int is_map = all.b[0].len == sizeof *m
        && (m->directory ? m->entries && m->pilots && m->buckets >= 1 && m->buckets_here >= 1 : !m->buckets);
    const job j = {.rows = rows, .map = is_map ? m : NULL, .ids = all.b[1].buf, .n_ids = int64s(&all.b[1]),
                   .numbers = all.b[2].buf, .row_bytes = is_map ? m->id_step : 0};
    if (!is_map || int64s(&all.b[2]) != j.n_ids) return unsound(&all, "place_rows");
    const runner with = active_runner();
    Py_BEGIN_ALLOW_THREADS
    resolving r;
    r.job = &j, r.next = r.placed = r.checked = r.missing = r.backfilled = 0;
    with.kernel->place(&r, j.n_ids);
    if (rows > 0) doubtful = count_doubtful(&j);
    Py_END_ALLOW_THREADS
    release(&all);
    return PyLong_FromLongLong(doubtful);
}

PyObject *py_count_rows(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    enum { AHEAD = 24 };
    arguments all;
    (void)self;
    if (!take_arguments("count_rows", "wbwii", args, n, &all)) return NULL;
    const int64_t most = all.n[0], step = all.n[1];
    uint8_t *counts = all.b[0].buf;
    const uint8_t *rows = all.b[1].buf;
    int64_t *found = all.b[2].buf;
    const int64_t size = int64s(&all.b[1]);
    if (int64s(&all.b[2]) != 2 || most < 0 || most > 127 || step < 0 || step > most)
        return unsound(&all, "count_rows");
    const uint64_t last = (uint64_t)all.b[0].len;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < size; i++) {
        const uint64_t next = i + AHEAD < size ? (uint64_t)load_i64(rows + 8 * (i + AHEAD)) : last,
            row = (uint64_t)load_i64(rows + 8 * i);
        if (next < last) __builtin_prefetch(counts + next, 1, 1);
        if (row >= last) continue;
        const uint8_t count = counts[row];
        found[0]++, found[1] += count >> 7;
        if ((count & 127) <= most - step) counts[row] = (uint8_t)(count + step);
    }
    Py_END_ALLOW_THREADS
    release(&all);
    Py_RETURN_NONE;
}
