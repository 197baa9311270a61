/* The Python face of the CPU kernels: argument parsing, validation, threads. No arithmetic on rows here.
 * isas() -> tuple of names, fastest first, that this processor runs
 * use(name) -> selects one of them
 * prefetches() -> tuple of names, how rows are prefetched: first the one in use
 * prefetch(name) -> selects one of them
 * measure_prefetches(table_address, rows, row_bytes, dim, format) -> {name: seconds a row}, of random rows
 * lookup(table_address, rows, row_bytes, dim, format, pooling, ids, lengths | None, weights | None, out,
 *   half, threads, row_map)
 *   lengths: int32, for pooled lookups; row_map: address of one (_ids.h), or 0
 * run(kinds, places, inputs, outputs, threads, ids | None): n lookups; kinds is int64 [kinds, fields of
 *   KIND_FIELDS], what may be read, and places int64 [n, fields of PLACE_FIELDS], which of them and where in the
 *   buffers; ids: int64 [n], addresses of ids that are read instead of those in the inputs; 0: those there
 *   Both check every id and length before any row is read. They return None, or (job, problem, position, value)
 *   for the first bad input, with problem one of BAD_ID, BAD_LENGTH (negative), BAD_SUM (value: the sum of the
 *   lengths), MISSING_ID. run: AWAY as well, where a kind is away: then found masks hold anything
 *   run returns bytes, int64 [n, 2], how many ids were missing and how many backfilled, where there were any.
 * …_FIELDS: the names of the fields, in order; whoever writes them checks its own against these
 * gather_rows() -> address of a C function void (void *request), for CUDA to call: int64 [6], see _gather.h
 * totals, lay_out, measure, move_all: see _native_jobs.c · place_batch, write_batch: see _native_batch.c ·
 * size_fills, write_fills: see _native_fills.c ·
 * lengths_of, parts_of, feature_places: see _native_bags.c
 * tensor_places, device_places, tensor_parts: see _native_tensors.c · count_buckets, put_in_buckets, distinct, build,
 * place_rows, count_rows: see _native_index.c · split_ids: see _native_split.c
 * sample_uses: see _native_uses.c
 * fill_filter, fill_marks: see _native_overlay.c
 * quantize(format, source, values, rows, dim, out, row_bytes) -> first row that cannot be represented, or -1
 * The interpreter's lock is released while rows are read or written. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <string.h>
#include "_arguments.h"
#include "_execute.h"
#include "_gather.h"
#include "_native_jobs.h"
#include "_native_runner.h"
#include "_place.h"

/* The functions of the module that take several arguments; the comments of their files say what they do. */
#define METHODS(F) \
    F(lookup) F(run) F(quantize) F(totals) F(lay_out) F(lengths_of) F(parts_of) F(feature_places) \
    F(tensor_places) F(device_places) F(tensor_parts) F(count_buckets) F(put_in_buckets) F(distinct) F(build) \
    F(place_rows) F(count_rows) F(split_ids) F(sample_uses) F(fill_filter) F(fill_marks) \
    F(measure) F(place_batch) F(write_batch) F(size_fills) F(write_fills) F(move_all) F(measure_prefetches)
#define DECLARE(name) PyObject *py_##name(PyObject *self, PyObject *const *args, Py_ssize_t n);
METHODS(DECLARE)

/* The fields of a lookup's kind. */
#define KIND_FIELDS(F) F(table) F(rows) F(row_bytes) F(dim) F(row_format) F(pooling) F(precision) F(row_map) \
    F(is_away)
#define MEMBER(name) int64_t name;
#define NAME(name) #name,
typedef struct { KIND_FIELDS(MEMBER) } kind_fields;
#define NAMES(fields) {#fields, (const char *const[]){fields(NAME) NULL}}
static const struct { const char *as; const char *const *names; } all_names[] = {
    NAMES(KIND_FIELDS), NAMES(PLACE_FIELDS), NAMES(ROW_MAP_FIELDS), NAMES(LAYER_FIELDS),
    NAMES(GPU_KIND_FIELDS), NAMES(JOB_FIELDS), NAMES(MOVE_FIELDS), NAMES(MEASURED_FIELDS),
    NAMES(BASE_FIELDS), NAMES(PROBE_FIELDS), NAMES(RESOLVE_FIELDS), NAMES(FILL_FIELDS),
    NAMES(MATRIX_FIELDS)};

static PyObject *py_gather_rows(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyLong_FromVoidPtr((void *)(uintptr_t)gather_rows);
}

static PyObject *answer(verdict v) {
    if (!v.problem) Py_RETURN_NONE;
    if (v.problem == NO_MEMORY) return PyErr_NoMemory();
    return Py_BuildValue("LiLL", (long long)v.job, (int)v.problem, (long long)v.position, (long long)v.value);
}

/* ---- Python ---- */

/* Whether `count` items of `size` bytes lie in a buffer at `at`; else sets ValueError. */
static int fits(const char *what, int64_t at, int64_t count, int64_t size, const Py_buffer *b) {
    return check_lies_in(what, b, at, count, size, size);
}

/* A format or pooling as an int; -1, which is none, for a number that an int would make another of. */
static int choice(int64_t value) { return value >= 0 && value < INT32_MAX ? (int)value : -1; }

/* What the kernels rely on, but for the ids and lengths themselves. */
static int is_sound(const job *j, int64_t threads) {
    int64_t total;
    if (j->rows >= 0 && j->row_bytes > 0 && j->dim > 0 && j->dim < INT32_MAX && j->format >= INT2
        && j->format <= LAST_FORMAT && j->dim % BLOCK_OF(j->format) == 0 && j->precision >= AS_FP32
        && j->precision <= AS_BF16 && j->pooling >= POOL_NONE && j->pooling <= POOL_MEAN && j->n_ids >= 0 && j->n_bags >= 0
            && j->fixed_length >= 0
        && !__builtin_mul_overflow(j->fixed_length, j->n_bags, &total) && j->out_row_bytes >= j->dim * value_bytes(j)
            && threads >= 1)
        return 1;
    PyErr_SetString(PyExc_ValueError, "a lookup's format, pooling, sizes or threads are out of range");
    return 0;
}

PyObject *py_lookup(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments a;
    PyObject *result = NULL;
    if (!take_arguments("lookup", "iiiiiiboowiii", args, n, &a)) return NULL;
    const Py_buffer *ids = a.b, *lengths = a.b + 1, *weights = a.b + 2, *out = a.b + 3;
    const int64_t threads = a.n[7];
    job j = {.table = (const uint8_t *)(intptr_t)a.n[0], .rows = a.n[1], .row_bytes = a.n[2], .dim = a.n[3],
             .format = choice(a.n[4]), .pooling = choice(a.n[5]), .ids = ids->buf, .n_ids = ids->len / 8,
             .lengths = lengths->buf, .weights = weights->buf, .out = out->buf,
             .precision = a.n[6] ? AS_FP16 : AS_FP32, .map = (const row_map *)(intptr_t)a.n[8]};
    j.out_row_bytes = j.dim * value_bytes(&j);
    j.n_bags = j.pooling == POOL_NONE ? j.n_ids : lengths->len / 4;
    if (!is_sound(&j, threads) || !fits("out", 0, j.n_bags, j.out_row_bytes, out)
        || (weights->buf && !fits("weights", 0, j.n_ids, 4, weights)))
        goto done;
    job room[1 + MAX_PARTS];
    verdict v;
    int failed = 0;
    Py_BEGIN_ALLOW_THREADS
    int64_t *rows = make_rows(&j, 1, &failed);
    v = failed ? (verdict){0, NO_MEMORY, 0, 0} : execute(active_runner(), &j, 1, threads, room);
    free(rows);
    Py_END_ALLOW_THREADS
    result = answer(v);
done:
    release(&a);
    return result;
}

/* Makes a job of a lookup over the two buffers; 0 with ValueError set if it does not lie in them. */
static int bind_lookup(const kind_fields *f, const place *p, const Py_buffer *in, const Py_buffer *out,
                       int64_t threads, int64_t ids_at, job *j) {
    const uint8_t *inputs = in->buf;
    const int is_gather = f->pooling == POOL_PACKED;
    const int64_t vector_bytes = is_gather ? f->row_bytes : f->dim * (f->precision == AS_FP32 ? 4 : 2);
    *j = (job){.table = (const uint8_t *)(intptr_t)f->table, .rows = f->rows, .row_bytes = f->row_bytes,
               .dim = f->dim, .format = choice(f->row_format), .n_ids = p->ids, .n_bags = p->bags,
               .pooling = is_gather ? POOL_NONE : choice(f->pooling), .fixed_length = p->bag_length,
               .out_row_bytes = p->out_row_bytes ? p->out_row_bytes : vector_bytes,
               .precision = is_gather ? AS_FP32 : choice(f->precision), .is_gather = is_gather,
               .map = (const row_map *)(intptr_t)f->row_map, .is_away = f->is_away != 0};
    int has_lengths = p->lengths_at >= 0 && j->pooling != POOL_NONE, has_weights = p->weights_at >= 0;
    int64_t outputs = j->pooling == POOL_NONE ? j->n_ids : j->n_bags;
    if (!is_sound(j, threads) || (!ids_at && !fits("inputs (ids)", p->ids_at, p->ids, 8, in))
        || (has_lengths && !fits("inputs (lengths)", p->lengths_at, p->bags, 4, in))
        || (has_weights && !fits("inputs (weights)", p->weights_at, p->ids, 4, in))
        || (p->found_at >= 0 && !fits("outputs (found)", p->found_at, p->ids, 1, out))
        || !check_lies_in("outputs", out, p->out_at, outputs, j->out_row_bytes, vector_bytes))
        return 0;
    j->found = p->found_at >= 0 ? (uint8_t *)out->buf + p->found_at : NULL;
    j->ids = ids_at ? (const uint8_t *)(intptr_t)ids_at : inputs + p->ids_at;
    j->lengths = has_lengths ? inputs + p->lengths_at : NULL;
    j->weights = has_weights ? inputs + p->weights_at : NULL;
    j->out = (uint8_t *)out->buf + p->out_at;
    return 1;
}

/* Missing and backfilled ids of each job, int64 [count, 2]; None: there are none. of: where `make_rows`
 * keeps them. */
static PyObject *unfound(const int64_t *of, int64_t count) {
    int64_t any = 0;
    for (int64_t k = 0; of && k < 2 * count; k++) any |= of[k];
    if (!any) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)of, count * 16);
}

/* kinds, places, in, out, ids: buffers; ids without bytes: none are elsewhere. */
static PyObject *run_buffers(const Py_buffer *kinds, const Py_buffer *places, const Py_buffer *in,
                             const Py_buffer *out, int64_t threads, const Py_buffer *ids) {
    enum { FEW = 64 };
    job few[FEW], *jobs = few;
    int64_t *rows = NULL;
    int failed = 0;
    PyObject *result = NULL;
    const int64_t of_kinds = kinds->len / (int64_t)sizeof(kind_fields),
        count = places->len / (int64_t)sizeof(place);
    int64_t room = threads > 1 ? 2 * count + MAX_PARTS : count;
    if (places->len % (Py_ssize_t)sizeof(place))
        return PyErr_Format(PyExc_ValueError, "%zd bytes are no places of %zu bytes each", places->len,
                            sizeof(place));
    if (ids->buf && ids->len != 8 * count)
        return PyErr_Format(PyExc_ValueError, "%zd bytes are no addresses for %lld lookups", ids->len,
                            (long long)count);
    if (room > FEW && !(jobs = PyMem_Malloc((size_t)room * sizeof(job)))) return PyErr_NoMemory();
    for (int64_t k = 0; k < count; k++) {
        place at;
        const int64_t ids_at = ids->buf ? load_i64((const uint8_t *)ids->buf + 8 * k) : 0;
        memcpy(&at, (const char *)places->buf + k * (int64_t)sizeof at, sizeof at);
        if (at.kind < 0 || at.kind >= of_kinds) {
            PyErr_Format(PyExc_ValueError, "lookup %lld is of kind %lld; there are %lld", (long long)k,
                         (long long)at.kind, (long long)of_kinds);
            goto done;
        }
        if (!bind_lookup((const kind_fields *)kinds->buf + at.kind, &at, in, out, threads, ids_at, jobs + k))
            goto done;
    }
    verdict v;
    Py_BEGIN_ALLOW_THREADS
    rows = make_rows(jobs, count, &failed);
    v = failed ? (verdict){0, NO_MEMORY, 0, 0} : execute(active_runner(), jobs, count, threads, jobs + count);
    Py_END_ALLOW_THREADS
    result = v.problem ? answer(v) : unfound(rows, count);
done:
    free(rows);
    if (jobs != few) PyMem_Free(jobs);
    return result;
}

PyObject *py_run(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments a;
    if (!take_arguments("run", "bbbwio", args, n, &a)) return NULL;
    PyObject *result = run_buffers(a.b, a.b + 1, a.b + 2, a.b + 3, a.n[0], a.b + 4);
    release(&a);
    return result;
}

PyObject *py_quantize(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments a;
    PyObject *result = NULL;
    if (!take_arguments("quantize", "iibiiwi", args, n, &a)) return NULL;
    const int64_t *kind = a.n, *shape = a.n + 2, row_bytes = a.n[4];
    int64_t bad = -1;
    if (kind[0] < INT2 || kind[0] > LAST_FORMAT || kind[1] < FP16 || kind[1] > BF16 || shape[1] < 1
        || shape[1] > INT32_MAX || shape[1] % BLOCK_OF(kind[0]) || shape[1] % BLOCK_OF(kind[1])
        || row_bytes < USED_BYTES(kind[0], shape[1])) {
        PyErr_SetString(PyExc_ValueError, "quantize: format, source, dim or row_bytes are out of range");
        goto done;
    }
    if (!fits("values", 0, shape[0], SOURCE_BYTES(kind[1], shape[1]), a.b)
        || !fits("out", 0, shape[0], row_bytes, a.b + 1))
        goto done;
    float *scratch = PyMem_Malloc((size_t)shape[1] * 2 * sizeof(float) + 64);
    if (!scratch) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    bad = active_runner().kernel->quantize((int)kind[0], (int)kind[1], a.b[0].buf, shape[0], shape[1],
                                           a.b[1].buf, row_bytes, scratch);
    Py_END_ALLOW_THREADS
    PyMem_Free(scratch);
    result = PyLong_FromLongLong(bad);
done:
    release(&a);
    return result;
}

#define ENTRY(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL},
static PyMethodDef methods[] = {
    METHODS(ENTRY)
    {"gather_rows", py_gather_rows, METH_NOARGS, NULL},
    {"isas", py_isas, METH_NOARGS, NULL},
    {"use", py_use, METH_O, NULL},
    {"prefetches", py_prefetches, METH_NOARGS, NULL},
    {"prefetch", py_prefetch, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL,
                                    NULL};

PyMODINIT_FUNC PyInit__native(void) {
    choose_kernel();
    open_pool();
    PyObject *made = PyModule_Create(&module);
    const size_t count = sizeof all_names / sizeof *all_names;
    size_t n = 0;
    while (made && n < count && add_names(made, all_names[n].as, all_names[n].names)) n++;
    if (n == count) return made;
    Py_XDECREF(made);
    return NULL;
}
