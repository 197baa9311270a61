/* Chooses what runs lookups: the widest vectors that the processor has, and prefetches that are as fast as
 * any where the rows lie. The second is measured, since no processor's name says it: of two machines, one was
 * 3 times slower with rows in L1 (few misses in flight), the other 1.2 times faster. */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "_arguments.h"
#include "_native_runner.h"
#include "_prefetch.h"

/* Rows come from L2 in some 16 cycles, a few rows' time: 8 to 24 rows ahead were alike. */
enum { NEAR_ROWS = 16, WAYS = 3 };
static const struct { const char *name; prefetching how; } ways[WAYS] = {
    {"L2", {0, 0}}, {"L2, then L1", {0, NEAR_ROWS}}, {"L1", {1, 0}}};

static const kernel *available[MOST_KERNELS], *active;
static int n_available, way; /* `way` is written while other threads read it */

void choose_kernel(void) {
    n_available = find_kernels(available);
    active = available[0];
}

runner active_runner(void) { return (runner){active, ways[__atomic_load_n(&way, __ATOMIC_RELAXED)].how}; }

/* ---- measuring ---- */

/* So many rounds, since 8 chose the slowest way once in ten: the page tables were not in the caches yet. */
enum { ROUNDS = 48, BAG = 16, BAGS = 128, IDS = BAG * BAGS };

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Draws ids, and reads each one's page beside its row: no lookup meets a page that is not mapped, none finds
 * its rows in a cache, and there are more pages than a processor remembers. */
static void draw(const job *j, int64_t count, int64_t *ids) {
    const int64_t bytes = j->rows * j->row_bytes;
    uint64_t state = (uint64_t)(1e9 * seconds()) | 1;
    for (int64_t i = 0; i < count; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        ids[i] = (int64_t)((unsigned __int128)state * (uint64_t)j->rows >> 64);
        const uintptr_t at = ((uintptr_t)j->table + (uintptr_t)(ids[i] * j->row_bytes)) ^ 2048;
        const uintptr_t beside = at - (uintptr_t)j->table;
        if (beside < (uintptr_t)bytes) (void)*(const volatile uint8_t *)(j->table + beside);
    }
}

/* The least time of a lookup with each way, in turns. */
static void measure_ways(job *j, int64_t *ids, double *least) {
    draw(j, ROUNDS * WAYS * IDS, ids);
    for (int n = 0; n < ROUNDS * WAYS; n++, ids += IDS) {
        const int w = n % WAYS;
        j->ids = (const uint8_t *)ids;
        const double start = seconds();
        ahead a = prefetch_ahead(j, j + 1, ways[w].how);
        active->lookup(j, &a);
        const double taken = seconds() - start;
        if (n < WAYS || taken < least[w]) least[w] = taken;
    }
}

/* ---- Python ---- */

PyObject *py_isas(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    PyObject *names = PyTuple_New(n_available);
    for (int i = 0; names && i < n_available; i++)
        PyTuple_SetItem(names, i, PyUnicode_FromString(available[i]->name));
    return names;
}

PyObject *py_use(PyObject *self, PyObject *name) {
    (void)self;
    for (int i = 0; i < n_available; i++)
        if (PyUnicode_CompareWithASCIIString(name, available[i]->name) == 0) {
            active = available[i];
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError,
        "instruction set %R: this processor does not run it; isas() lists what it runs", name);
}

PyObject *py_prefetches(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    PyObject *names = PyTuple_New(WAYS);
    for (int i = 0; names && i < WAYS; i++)
        PyTuple_SetItem(names, i, PyUnicode_FromString(ways[(way + i) % WAYS].name));
    return names;
}

PyObject *py_prefetch(PyObject *self, PyObject *name) {
    (void)self;
    for (int i = 0; i < WAYS; i++)
        if (PyUnicode_CompareWithASCIIString(name, ways[i].name) == 0) {
            __atomic_store_n(&way, i, __ATOMIC_RELAXED);
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "prefetch %R: there is none; prefetches() lists those there are", name);
}

PyObject *py_measure_prefetches(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    arguments all;
    double least[WAYS];
    if (!take_arguments("measure_prefetches", "iiiii", args, n, &all)) return NULL;
    const int64_t *of = all.n;
    if (of[1] < 1 || of[2] < 1 || of[3] < 1 || of[3] > 1 << 20 || of[4] < INT2 || of[4] > LAST_FORMAT
        || of[3] % BLOCK_OF(of[4]))
        return PyErr_Format(PyExc_ValueError, "measure_prefetches: no table");
    int64_t *ids = malloc((size_t)(ROUNDS * WAYS * IDS * 8 + BAGS * of[3] * 4));
    if (!ids) return PyErr_NoMemory();
    job j = {.table = (const uint8_t *)(uintptr_t)of[0], .rows = of[1], .row_bytes = of[2], .dim = of[3],
             .format = (int)of[4], .pooling = POOL_SUM, .n_ids = IDS, .fixed_length = BAG, .n_bags = BAGS,
             .out = (uint8_t *)(ids + ROUNDS * WAYS * IDS), .out_row_bytes = 4 * of[3]};
    Py_BEGIN_ALLOW_THREADS
    measure_ways(&j, ids, least);
    Py_END_ALLOW_THREADS
    free(ids);
    PyObject *times = PyDict_New();
    for (int w = 0; times && w < WAYS; w++) {
        PyObject *time = PyFloat_FromDouble(least[w] / IDS);
        if (!time || PyDict_SetItemString(times, ways[w].name, time)) Py_CLEAR(times);
        Py_XDECREF(time);
    }
    return times;
}
