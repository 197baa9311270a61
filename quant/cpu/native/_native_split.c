/* split_ids(inputs, jobs, tables, ends, distinct, at, counts): the different ids that lookups ask of tables,
 *   table after table, and of each those of one owner one after another. jobs: int64 [jobs, 3], where the ids
 *   of a lookup lie in inputs, how many, and the number of its table, which ascends; tables: int64 [tables, 3],
 *   buckets (0: ids are row numbers), bucket_ids (as in a row map), and what is added to the places of ids;
 *   ends: int64 [tables, owners], the row number or bucket after the last of each; distinct: int64 [ids]; at:
 *   int64 [ids], the place of each, lookup after lookup, among the different ones of its table; counts: int64
 *   [tables, owners + 1], different ids of each owner, then of those without one
 *   -> how many different ids there are
 * It releases the interpreter's lock. */
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "_ids.h"
#include "_native_index.h"

typedef struct { int64_t ids_at, n, table; } asking;
typedef struct { int64_t buckets, bucket_ids, first; } asked_table;

typedef struct {
    const asked_table *table;
    const int64_t *ends;
    int64_t owners;
    int64_t *distinct, *counts;
    uint64_t key, mask;
    uint32_t *slots;            /* [mask + 1]: places in `distinct`, from 1 on; 0: none */
    int64_t *owner_of, *places; /* of the different ids, in the order in which they come first */
    int64_t different;
} splitting;

/* The owner of an id; `owners`: none. */
static int64_t owner_of(const splitting *s, int64_t id) {
    uint64_t unit = (uint64_t)id;
    if (s->table->buckets) {
        const row_map buckets = {.buckets = s->table->buckets, .bucket_ids = s->table->bucket_ids};
        unit = bucket_of(&buckets, (uint64_t)id, mix_id((uint64_t)id));
    }
    int64_t low = 0, high = s->owners;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (unit < (uint64_t)s->ends[middle]) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* Nobody outside knows it, so that no ids can be chosen that meet in a table. */
static uint64_t secret(void) {
    static uint64_t found; /* the interpreter's lock is held */
    if (found) return found;
    /* by number: the wheel is for C libraries without a function for it */
    if (syscall(SYS_getrandom, &found, sizeof found, 0) != (long)sizeof found) found = (uintptr_t)&found | 1;
    return found;
}

/* Adds a lookup's ids; at: the place of each in the order in which they come first. */
static void add_ids(splitting *s, const uint8_t *ids, int64_t n, int64_t *at) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t id = load_i64(ids + 8 * i);
        uint64_t slot = mix_id((uint64_t)id ^ s->key) >> 32 & s->mask;
        while (s->slots[slot] && s->distinct[s->slots[slot] - 1] != id) slot = (slot + 1) & s->mask;
        if (!s->slots[slot]) {
            const int64_t owner = owner_of(s, id);
            s->distinct[s->different] = id, s->owner_of[s->different] = owner;
            s->counts[owner]++;
            s->slots[slot] = (uint32_t)++s->different;
        }
        at[i] = s->slots[slot] - 1;
    }
}

/* Orders a table's ids by their owners, and the places of `n` ids with them. */
static void order_by_owner(splitting *s, int64_t *at, int64_t n) {
    int64_t start = 0;
    for (int64_t owner = 0; owner <= s->owners; owner++) {
        const int64_t count = s->counts[owner];
        s->counts[owner] = start, start += count;
    }
    for (int64_t k = 0; k < s->different; k++) s->places[k] = s->counts[s->owner_of[k]]++;
    for (int64_t i = 0; i < n; i++) at[i] = s->table->first + s->places[at[i]];
    for (int64_t k = 0; k < s->different; k++) s->owner_of[s->places[k]] = s->distinct[k];
    __builtin_memcpy(s->distinct, s->owner_of, (size_t)s->different * sizeof *s->distinct);
    for (int64_t owner = s->owners; owner > 0; owner--) s->counts[owner] -= s->counts[owner - 1];
}

/* Whether jobs lie in the inputs, name tables in ascending order, and have `ids` ids together. */
static int are_sound(const asking *jobs, int64_t count, int64_t tables, int64_t ids, int64_t bytes) {
    int64_t table = 0, left = ids;
    for (int64_t k = 0; k < count; k++) {
        const asking *j = &jobs[k];
        if (j->table < table || j->table >= tables || j->n < 0 || j->n > left || j->ids_at < 0
            || j->ids_at > bytes || 8 * j->n > bytes - j->ids_at)
            return 0;
        table = j->table, left -= j->n;
    }
    return !left;
}

PyObject *py_split_ids(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    buffers inputs, all;
    if (n != 7) return PyErr_Format(PyExc_TypeError, "split_ids takes 7 arguments, got %zd", n);
    if (!take(args, 1, 0, &inputs)) return NULL;
    if (!take(args + 1, 6, 56, &all)) {
        release(&inputs);
        return NULL;
    }
    const Py_buffer *b = all.b;
    const asking *jobs = b[0].buf;
    const asked_table *tables = b[1].buf;
    const int64_t count = b[0].len / (int64_t)sizeof *jobs, of_tables = b[1].len / (int64_t)sizeof *tables,
                  ids = b[3].len / 8, owners = of_tables ? b[2].len / 8 / of_tables : 0;
    int sound = of_tables && owners > 0 && b[2].len == 8 * of_tables * owners && b[4].len == b[3].len
        && b[5].len == 8 * of_tables * (owners + 1) && ids < UINT32_MAX / 4
        && are_sound(jobs, count, of_tables, ids, inputs.b[0].len);
    int64_t most = 0;
    for (int64_t k = 0, of = 0; sound && k < count; k++) {
        of = (k && jobs[k].table == jobs[k - 1].table ? of : 0) + jobs[k].n;
        most = of > most ? of : most;
    }
    for (int64_t t = 0; sound && t < of_tables; t++)
        sound = tables[t].buckets >= 0 && !(tables[t].buckets & (tables[t].buckets - 1))
            && tables[t].bucket_ids >= 0;
    if (!sound) {
        release(&inputs);
        return unsound(&all, "split_ids");
    }
    uint64_t slots = 64;
    while (slots < 2 * (uint64_t)most) slots *= 2;
    int64_t *memory = malloc(slots * sizeof(uint32_t) + 2 * (size_t)most * sizeof(int64_t)), total = 0;
    if (!memory) {
        release(&inputs), release(&all);
        return PyErr_NoMemory();
    }
    const uint64_t key = secret();
    Py_BEGIN_ALLOW_THREADS
    int64_t *at = b[4].buf;
    const asking *job = jobs, *end = jobs + count;
    for (int64_t t = 0; t < of_tables; t++) {
        int64_t n_ids = 0;
        for (const asking *j = job; j < end && j->table == t; j++) n_ids += j->n;
        uint64_t size = 64;
        while (size < 2 * (uint64_t)n_ids) size *= 2;
        splitting s = {.table = &tables[t], .ends = (const int64_t *)b[2].buf + t * owners,
                       .owners = owners, .distinct = (int64_t *)b[3].buf + total,
                       .counts = (int64_t *)b[5].buf + t * (owners + 1), .key = key, .mask = size - 1,
                       .slots = (uint32_t *)(memory + 2 * most), .owner_of = memory, .places = memory + most};
        for (int64_t owner = 0; owner <= owners; owner++) s.counts[owner] = 0;
        __builtin_memset(s.slots, 0, size * sizeof *s.slots);
        int64_t *const from = at;
        for (; job < end && job->table == t; job++) {
            add_ids(&s, (const uint8_t *)inputs.b[0].buf + job->ids_at, job->n, at);
            at += job->n;
        }
        order_by_owner(&s, from, n_ids);
        total += s.different;
    }
    Py_END_ALLOW_THREADS
    free(memory);
    release(&inputs), release(&all);
    return PyLong_FromLongLong(total);
}
