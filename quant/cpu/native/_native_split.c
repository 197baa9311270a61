/* split_ids(ids, ends, buckets, bucket_ids, distinct, at, counts): the different ids of a lookup, those of one
 *   owner one after another. ids, distinct, at: int64 [n]; ends: int64 [owners], the row number or bucket after
 *   the last of each; buckets, 0: ids are row numbers; bucket_ids: as in a row map; counts: int64 [owners + 1],
 *   ids of each owner, then of those without one. at: the place of each id among the different ones
 *   -> how many there are
 * It releases the interpreter's lock. */
#include <stdlib.h>
#include <sys/random.h>
#include "_ids.h"
#include "_native_index.h"

typedef struct {
    const uint8_t *ids;
    const int64_t *ends;
    int64_t n, owners;
    row_map buckets; /* of which the number and size of the buckets are read */
    uint64_t key;
    int64_t *distinct, *at, *counts;
} splitting;

/* The owner of an id; `owners`: none. */
static int64_t owner_of(const splitting *s, int64_t id) {
    uint64_t unit = (uint64_t)id;
    if (s->buckets.buckets) unit = bucket_of(&s->buckets, (uint64_t)id, mix_id((uint64_t)id));
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
    if (!found && getrandom(&found, sizeof found, 0) != (ssize_t)sizeof found) found = (uintptr_t)&found | 1;
    return found;
}

/* table: [mask + 1] zeros. owners, places: [n], by the order in which different ids first come. */
static int64_t split_ids(const splitting *s, uint32_t *table, uint64_t mask, int64_t *owners, int64_t *places) {
    int64_t different = 0;
    for (int64_t i = 0; i < s->n; i++) {
        const int64_t id = load_i64(s->ids + 8 * i);
        uint64_t slot = mix_id((uint64_t)id ^ s->key) >> 32 & mask;
        while (table[slot] && s->distinct[table[slot] - 1] != id) slot = (slot + 1) & mask;
        if (!table[slot]) {
            s->distinct[different] = id;
            owners[different] = owner_of(s, id);
            s->counts[owners[different]]++;
            table[slot] = (uint32_t)++different;
        }
        s->at[i] = table[slot] - 1;
    }
    int64_t start = 0;
    for (int64_t owner = 0; owner <= s->owners; owner++) {
        const int64_t count = s->counts[owner];
        s->counts[owner] = start, start += count;
    }
    for (int64_t n = 0; n < different; n++) places[n] = s->counts[owners[n]]++;
    for (int64_t i = 0; i < s->n; i++) s->at[i] = places[s->at[i]];
    for (int64_t n = 0; n < different; n++) owners[places[n]] = s->distinct[n];
    for (int64_t n = 0; n < different; n++) s->distinct[n] = owners[n];
    for (int64_t owner = s->owners; owner > 0; owner--) s->counts[owner] -= s->counts[owner - 1];
    return different;
}

PyObject *py_split_ids(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (n != 7) return PyErr_Format(PyExc_TypeError, "split_ids takes 7 arguments, got %zd", n);
    const long long buckets = PyLong_AsLongLong(args[2]), bucket_ids = PyLong_AsLongLong(args[3]);
    PyObject *const of[5] = {args[0], args[1], args[4], args[5], args[6]};
    buffers all;
    if (PyErr_Occurred() || !take(of, 5, 28, &all)) return NULL;
    const Py_buffer *b = all.b;
    splitting s = {.ids = b[0].buf, .ends = b[1].buf, .n = b[0].len / 8, .owners = b[1].len / 8,
                   .buckets = {.buckets = buckets, .bucket_ids = bucket_ids}, .key = secret(), .distinct = b[2].buf,
                   .at = b[3].buf, .counts = b[4].buf};
    if (s.n >= UINT32_MAX / 4 || s.owners < 1 || b[2].len != b[0].len || b[3].len != b[0].len
        || b[4].len != b[1].len + 8 || buckets < 0 || buckets & (buckets - 1) || bucket_ids < 0)
        return unsound(&all, "split_ids");
    uint64_t slots = 64;
    while (slots < 2 * (uint64_t)s.n) slots *= 2;
    int64_t *memory = calloc(slots * sizeof(uint32_t) + 2 * (size_t)s.n * sizeof(int64_t), 1), different = 0;
    if (!memory) {
        release(&all);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    for (int64_t owner = 0; owner <= s.owners; owner++) s.counts[owner] = 0;
    different = split_ids(&s, (uint32_t *)(memory + 2 * s.n), slots - 1, memory, memory + s.n);
    Py_END_ALLOW_THREADS
    free(memory);
    release(&all);
    return PyLong_FromLongLong(different);
}
