/* The builder of id indexes (quant/ids.py): ids are put into buckets, and each bucket gets the pilots by which no two ids meet in a row.
 *
 * Records are int64 [n, 2]: an id, and the number of its row in the source. Buckets of records lie one after another.
 *
 * count_buckets(row_map, ids, counts): adds how many of the ids each bucket has to counts, int64 [buckets]; -> None, or the position of the
 *   first id that has no bucket
 * put_in_buckets(row_map, ids, sources, ends, records): appends each id, with its source, to its bucket; ends: int64 [buckets], where a
 *   bucket's next record goes
 * distinct(records, starts, first, last, keep, own, kept): of buckets [first, last) keeps each id once, the first (keep 1) or the last (2) of
 *   those that are the same, in front, and moves the others behind; kept: int64 [buckets], how many stay. keep 0: -> (id, source row, source
 *   row) of two that are the same, or None. A source from `own` on is an older version's: it stays where no other has its id
 * build(records, starts, kept, first, last, directory, pilots): finds seeds and pilots of buckets [first, last). directory has the first rows.
 *   -> None, or the number of a bucket for which none were found
 * find_rows(row_map, ids, rows): the row that each id has if it is there, int64 [n]; what a row keeps is not looked at
 *
 * A bucket's ids are grouped by pilot. Groups are placed by size, the largest first, each with the first pilot by which all of its ids
 * find free slots. Where there is none, it takes the pilot that costs least and drives those out that are in its way; they are placed
 * anew. That is how PtrHash (Groot Koerkamp, 2025) fills tables to 98 % with pilots of one byte.
 *
 * All of them release the interpreter's lock; buckets of different ranges may be handled by several threads at once.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "_ids.h"
#include "_native_index.h"

typedef struct { int64_t id, source; } record;

enum { PILOTS = 256, SEEDS = 64, LARGEST_GROUP = 64, RECENT = 16 };

/* ---- arguments ---- */

static int64_t int64s(const Py_buffer *b) { return b->len / 8; }

/* A row map of an index, out of a buffer of its fields; null: it is none. */
static const row_map *map_in(const Py_buffer *b) {
    const row_map *m = b->buf;
    return b->len == sizeof(row_map) && m->buckets >= 1 && m->buckets_here >= 1 ? m : NULL;
}

/* ---- ids into buckets ---- */

PyObject *py_count_buckets(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    buffers all;
    (void)self;
    if (n != 3) return PyErr_Format(PyExc_TypeError, "count_buckets takes 3 arguments, got %zd", n);
    if (!take(args, 3, 4, &all)) return NULL;
    const row_map *m = map_in(&all.b[0]);
    if (!m || int64s(&all.b[2]) != m->buckets_here) return unsound(&all, "count_buckets");
    const int64_t ids = int64s(&all.b[1]);
    int64_t *counts = all.b[2].buf, outside = -1;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < ids; i++) {
        const uint64_t id = (uint64_t)load_i64((const uint8_t *)all.b[1].buf + 8 * i), bucket = bucket_of(m, id, mix_id(id));
        if (bucket < (uint64_t)m->buckets_here) counts[bucket]++;
        else if (outside < 0) outside = i;
    }
    Py_END_ALLOW_THREADS
    release(&all);
    if (outside < 0) Py_RETURN_NONE;
    return PyLong_FromLongLong(outside);
}

PyObject *py_put_in_buckets(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    buffers all;
    (void)self;
    if (n != 5) return PyErr_Format(PyExc_TypeError, "put_in_buckets takes 5 arguments, got %zd", n);
    if (!take(args, 5, 24, &all)) return NULL;
    const row_map *m = map_in(&all.b[0]);
    const int64_t ids = int64s(&all.b[1]), room = all.b[4].len / (int64_t)sizeof(record);
    if (!m || int64s(&all.b[2]) != ids || int64s(&all.b[3]) != m->buckets_here) return unsound(&all, "put_in_buckets");
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

/* Positions + 1 of records in an open-addressed table of a power of two, twice as large as there are records. */
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
    buffers all;
    int64_t given[4];
    (void)self;
    if (n != 7) return PyErr_Format(PyExc_TypeError, "distinct takes 7 arguments, got %zd", n);
    for (int i = 0; i < 4; i++)
        if ((given[i] = PyLong_AsLongLong(args[2 + i])) == -1 && PyErr_Occurred()) return NULL;
    PyObject *const of[] = {args[0], args[1], args[6]};
    if (!take(of, 3, 5, &all)) return NULL;
    const int64_t *starts = all.b[1].buf, buckets = int64s(&all.b[2]), room = all.b[0].len / (int64_t)sizeof(record);
    int64_t *kept = all.b[2].buf;
    int sound = int64s(&all.b[1]) == buckets + 1 && given[0] >= 0 && given[0] <= given[1] && given[1] <= buckets;
    for (int64_t b = given[0]; sound && b < given[1]; b++) sound = starts[b] >= 0 && starts[b] <= starts[b + 1] && starts[b + 1] <= room;
    if (!sound) return unsound(&all, "distinct");
    twins found = {0};
    Py_BEGIN_ALLOW_THREADS
    for (int64_t b = given[0]; b < given[1] && !found.failed; b++)
        kept[b] = keep_distinct((record *)all.b[0].buf + starts[b], starts[b + 1] - starts[b], (int)given[2], given[3], &found);
    Py_END_ALLOW_THREADS
    release(&all);
    if (found.failed == 2) return PyErr_NoMemory();
    if (!found.failed) Py_RETURN_NONE;
    return Py_BuildValue("LLL", (long long)found.twice.id, (long long)found.other, (long long)found.twice.source);
}

/* ---- pilots of a bucket ---- */

/* A bucket while its pilots are sought. Group g has ids [start[g], start[g + 1]) of `spreads`. */
typedef struct {
    uint64_t slots, groups;
    uint64_t *spreads;
    uint32_t *start, *order; /* order: groups by size, the largest first */
    uint32_t *owner;         /* of each slot: its group + 1, or 0 */
    uint64_t *taken;         /* a bit for each slot, which are in fewer lines of the cache than the owners */
    uint32_t *stack;         /* groups that were driven out */
    uint8_t *pilots;
    uint64_t turn; /* where the search for a pilot begins */
} bucket;

static uint32_t size_of(const bucket *b, uint32_t group) { return b->start[group + 1] - b->start[group]; }

/* The slots of a group with a pilot; 0: two of its ids meet. */
static int slots_with(const bucket *b, uint32_t group, uint64_t pilot, uint32_t *slots) {
    const uint64_t *spreads = b->spreads + b->start[group];
    const uint32_t size = size_of(b, group);
    for (uint32_t i = 0; i < size; i++) {
        slots[i] = (uint32_t)slot_of(spreads[i], pilot, b->slots);
        for (uint32_t k = 0; k < i; k++)
            if (slots[k] == slots[i]) return 0;
    }
    return 1;
}

/* What it costs to take these slots: the squares of the sizes of the groups that have them. */
static uint64_t cost_of(const bucket *b, const uint32_t *slots, uint32_t size, uint64_t limit) {
    uint64_t cost = 0;
    for (uint32_t i = 0; i < size && cost < limit; i++) {
        const uint32_t owner = b->owner[slots[i]];
        if (owner) cost += (uint64_t)size_of(b, owner - 1) * size_of(b, owner - 1);
    }
    return cost;
}

static void take_slots(bucket *b, uint32_t group, const uint32_t *slots) {
    for (uint32_t i = 0; i < size_of(b, group); i++) {
        b->owner[slots[i]] = group + 1;
        b->taken[slots[i] / 64] |= (uint64_t)1 << slots[i] % 64;
    }
}

static void free_slots(bucket *b, uint32_t group) {
    uint32_t slots[LARGEST_GROUP];
    slots_with(b, group, b->pilots[group], slots);
    for (uint32_t i = 0; i < size_of(b, group); i++) {
        b->owner[slots[i]] = 0;
        b->taken[slots[i] / 64] &= ~((uint64_t)1 << slots[i] % 64);
    }
}

/* The first pilot by which all ids of a group find free slots; PILOTS: none. */
static uint64_t free_pilot(const bucket *b, uint32_t group, uint32_t *slots) {
    const uint64_t *spreads = b->spreads + b->start[group];
    const uint32_t size = size_of(b, group);
    for (uint64_t i = 0; i < PILOTS; i++) {
        const uint64_t pilot = (b->turn + i) % PILOTS;
        uint32_t k = 0;
        for (; k < size; k++) {
            slots[k] = (uint32_t)slot_of(spreads[k], pilot, b->slots);
            if (b->taken[slots[k] / 64] >> slots[k] % 64 & 1) break;
        }
        if (k == size && slots_with(b, group, pilot, slots)) return pilot;
    }
    return PILOTS;
}

static int was_placed_lately(const uint32_t *recent, uint32_t group) {
    for (int i = 0; i < RECENT; i++)
        if (recent[i] == group + 1) return 1;
    return 0;
}

/* Gives a group the pilot that costs least. Returns how many groups it drove out, which are on the stack then; -1: none will do. */
static int64_t place(bucket *b, uint32_t group, int64_t stacked, const uint32_t *recent) {
    uint32_t slots[LARGEST_GROUP], best[LARGEST_GROUP];
    uint64_t least = UINT64_MAX, pilot = 0;
    const uint32_t size = size_of(b, group);
    if ((pilot = free_pilot(b, group, slots)) < PILOTS) {
        take_slots(b, group, slots);
        b->pilots[group] = (uint8_t)pilot;
        return 0;
    }
    for (uint64_t i = 0; i < PILOTS; i++) {
        const uint64_t p = (b->turn + i) % PILOTS;
        if (!slots_with(b, group, p, slots)) continue;
        uint64_t cost = cost_of(b, slots, size, least);
        if (cost >= least) continue;
        for (uint32_t k = 0; cost && k < size; k++)
            if (b->owner[slots[k]] && was_placed_lately(recent, b->owner[slots[k]] - 1)) cost = least; /* no going round in circles */
        if (cost >= least) continue;
        least = cost, pilot = p;
        memcpy(best, slots, size * sizeof *slots);
    }
    if (least == UINT64_MAX) return -1;
    int64_t driven = 0;
    for (uint32_t i = 0; i < size; i++) {
        const uint32_t owner = b->owner[best[i]];
        if (!owner || owner == group + 1) continue;
        b->stack[stacked + driven++] = owner - 1;
        free_slots(b, owner - 1);
    }
    take_slots(b, group, best);
    b->pilots[group] = (uint8_t)pilot;
    return driven;
}

/* Places all groups; 0: this seed will not do. */
static int place_all(bucket *b) {
    uint32_t recent[RECENT] = {0};
    int64_t budget = 32 * (int64_t)b->groups + 4096;
    b->turn = 0;
    for (uint64_t n = 0; n < b->groups; n++) {
        int64_t stacked = 1;
        b->stack[0] = b->order[n];
        if (!size_of(b, b->stack[0])) return 1; /* and all that follow are empty */
        while (stacked) {
            const uint32_t group = b->stack[--stacked];
            const int64_t driven = place(b, group, stacked, recent);
            if (driven < 0 || stacked + driven > (int64_t)b->groups) return 0;
            if (driven) {
                if ((budget -= driven) < 0) return 0;
                recent[b->turn % RECENT] = group + 1;
                b->turn++;
            }
            stacked += driven;
        }
    }
    return 1;
}

/* Groups the ids of a bucket by pilot, and the groups by size; 0: a group is too large. */
static int group_ids(bucket *b, const record *records, int64_t n, uint64_t seed) {
    uint32_t sizes[LARGEST_GROUP + 2] = {0};
    memset(b->start, 0, (b->groups + 2) * sizeof *b->start);
    for (int64_t i = 0; i < n; i++) b->start[reduce(spread(mix_id((uint64_t)records[i].id), seed), b->groups) + 2]++;
    for (uint64_t g = 0; g < b->groups; g++) {
        if (b->start[g + 2] > LARGEST_GROUP) return 0;
        sizes[LARGEST_GROUP - b->start[g + 2] + 1]++;
        b->start[g + 2] += b->start[g + 1];
    }
    for (int64_t i = 0; i < n; i++) {
        const uint64_t g = spread(mix_id((uint64_t)records[i].id), seed);
        b->spreads[b->start[reduce(g, b->groups) + 1]++] = g;
    }
    for (int size = 1; size <= LARGEST_GROUP; size++) sizes[size] += sizes[size - 1];
    for (uint64_t g = 0; g < b->groups; g++) b->order[sizes[LARGEST_GROUP - size_of(b, (uint32_t)g)]++] = (uint32_t)g;
    return 1;
}

/* Finds a seed and pilots for a bucket of n ids; 1: found, 0: not found, -1: no memory. */
static int build_bucket(const record *records, int64_t n, uint64_t slots, uint64_t *seed, uint8_t *pilots) {
    bucket b = {.slots = slots, .groups = pilots_before(slots) + 1, .pilots = pilots};
    const uint64_t words = slots / 64 + 1;
    uint8_t *memory = malloc(((size_t)n + words) * 8 + (b.groups * 3 + slots + 8) * sizeof(uint32_t));
    if (!memory) return -1;
    b.spreads = (uint64_t *)(void *)memory;
    b.taken = b.spreads + n;
    b.start = (uint32_t *)(void *)(b.taken + words);
    b.order = b.start + b.groups + 2;
    b.stack = b.order + b.groups;
    b.owner = b.stack + b.groups + 1;
    int found = 0;
    for (*seed = 0; *seed < SEEDS && !found; *seed += !found) {
        memset(b.owner, 0, slots * sizeof *b.owner);
        memset(b.taken, 0, words * sizeof *b.taken);
        memset(pilots, 0, b.groups);
        found = group_ids(&b, records, n, *seed) && place_all(&b);
    }
    free(memory);
    return found;
}

PyObject *py_build(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    buffers all;
    int64_t range[2], failed = -1;
    (void)self;
    if (n != 7) return PyErr_Format(PyExc_TypeError, "build takes 7 arguments, got %zd", n);
    for (int i = 0; i < 2; i++)
        if ((range[i] = PyLong_AsLongLong(args[3 + i])) == -1 && PyErr_Occurred()) return NULL;
    PyObject *const of[] = {args[0], args[1], args[2], args[5], args[6]};
    if (!take(of, 5, 24, &all)) return NULL;
    const int64_t *starts = all.b[1].buf, *kept = all.b[2].buf, room = all.b[0].len / (int64_t)sizeof(record);
    const int64_t buckets = int64s(&all.b[2]);
    entry *directory = all.b[3].buf;
    int sound = int64s(&all.b[1]) == buckets + 1 && all.b[3].len == (buckets + 1) * (int64_t)sizeof(entry) && range[0] >= 0
                && range[0] <= range[1] && range[1] <= buckets;
    for (int64_t i = range[0]; sound && i < range[1]; i++) {
        const int64_t slots = directory[i + 1].first_row - directory[i].first_row;
        const int64_t pilots = (int64_t)pilots_before((uint64_t)directory[i].first_row) + i;
        sound = starts[i] >= 0 && kept[i] >= 0 && kept[i] <= room - starts[i] && directory[i].first_row >= 0 && slots >= kept[i]
                && slots < UINT32_MAX / 4 && pilots + (int64_t)pilots_before((uint64_t)slots) + 1 <= all.b[4].len;
    }
    if (!sound) return unsound(&all, "build");
    int verdict = 1;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = range[0]; i < range[1] && verdict == 1; i++) {
        const uint64_t first = (uint64_t)directory[i].first_row, slots = (uint64_t)directory[i + 1].first_row - first;
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

PyObject *py_find_rows(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    buffers all;
    (void)self;
    if (n != 3) return PyErr_Format(PyExc_TypeError, "find_rows takes 3 arguments, got %zd", n);
    if (!take(args, 3, 4, &all)) return NULL;
    const row_map *m = map_in(&all.b[0]);
    const int64_t ids = int64s(&all.b[1]);
    if (!m || !m->directory || !m->pilots || int64s(&all.b[2]) != ids) return unsound(&all, "find_rows");
    const entry *directory = (const entry *)(intptr_t)m->directory;
    const uint8_t *pilots = (const uint8_t *)(intptr_t)m->pilots;
    int64_t *rows = all.b[2].buf;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < ids; i++) {
        const uint64_t id = (uint64_t)load_i64((const uint8_t *)all.b[1].buf + 8 * i), hash = mix_id(id), at = bucket_of(m, id, hash);
        rows[i] = -1;
        if (at >= (uint64_t)m->buckets_here) continue;
        const uint64_t first = (uint64_t)directory[at].first_row, slots = (uint64_t)directory[at + 1].first_row - first;
        if (!slots) continue;
        const uint64_t g = spread(hash, directory[at].seed), pilot = pilots[pilots_before(first) + at + reduce(g, pilots_before(slots) + 1)];
        rows[i] = (int64_t)(first + slot_of(g, pilot, slots));
    }
    Py_END_ALLOW_THREADS
    release(&all);
    Py_RETURN_NONE;
}
