/* A request's lookups as jobs of the GPU's lookup kernel. `quant.gpu.layout` does the same in Python for any lookups; here are those
 * that come again and again, for which the device needs nothing but their ids. And copies of many small parts at once.
 *
 * totals(kinds, places) -> (ids, bags, columns of vectors) of the pooled lookups
 * lay_out(kinds, places, block_columns of pooled lookups, of unpooled ones) -> None: more than a launch can be, bags that are not the
 *   ids, or found masks, which Python lays out; else
 *   (in_bytes, out_bytes, written, scratch, is_direct, moves_in, moves_out, resolved, cached, pooled, unpooled):
 *   written: where the last vector ends in the caller's output buffer
 *   moves_in, moves_out: fields of `move`, int64, as bytes · resolved: (lookup, row_map, ids_at, ids), int64, as bytes
 *   cached: (table, ids_at, ids, locations_at), int64, as bytes
 *   pooled, unpooled: (jobs, is_offset, job_of_program, has_lengths, is_weighted, is_indirect); jobs and is_offset: int64
 *   [jobs, fields of a job], job_of_program: int32, as bytes
 * move(moves, source, target, source_base, target_base): copies parts of one buffer to another
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include "_native_jobs.h"

#define MEMBER(name) int64_t name;
typedef struct { GPU_KIND_FIELDS(MEMBER) } kind;
typedef struct { JOB_FIELDS(MEMBER) } job;
typedef struct { MOVE_FIELDS(MEMBER) } move;
typedef struct { int64_t ids_at, ids, lengths_at, bag_length, bags, weights_at, out_at, found_at; } place; /* as PLACE_FIELDS */
typedef struct { int64_t table, ids_at, ids, locations_at; } cached;
typedef struct { int64_t lookup, row_map, ids_at, ids; } resolved;

enum { OUT_ALIGNMENT = 16 };

static int64_t aligned(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static int64_t item_of(const kind *k) { return k->precision ? 2 : 4; }
static int64_t outputs_of(const kind *k, const place *p) { return k->is_pooled ? p->bags : p->ids; }

typedef struct { Py_buffer kinds, places; int64_t count; } request;

static int take(PyObject *const *args, request *r) {
    if (PyObject_GetBuffer(args[0], &r->kinds, PyBUF_SIMPLE)) return 0;
    if (PyObject_GetBuffer(args[1], &r->places, PyBUF_SIMPLE)) {
        PyBuffer_Release(&r->kinds);
        return 0;
    }
    r->count = r->kinds.len / (int64_t)sizeof(kind);
    if (r->places.len == r->count * (int64_t)sizeof(place)) return 1;
    PyErr_Format(PyExc_ValueError, "places of %zd bytes for %lld lookups", r->places.len, (long long)r->count);
    PyBuffer_Release(&r->kinds), PyBuffer_Release(&r->places);
    return 0;
}

static void let_go(request *r) { PyBuffer_Release(&r->kinds), PyBuffer_Release(&r->places); }

PyObject *py_totals(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    request r;
    int64_t ids = 0, bags = 0, columns = 0;
    if (n != 2) return PyErr_Format(PyExc_TypeError, "totals takes 2 arguments, got %zd", n);
    if (!take(args, &r)) return NULL;
    const kind *k = r.kinds.buf;
    const place *p = r.places.buf;
    for (int64_t i = 0; i < r.count; i++)
        if (k[i].is_pooled) ids += p[i].ids, bags += p[i].bags, columns += p[i].bags * k[i].columns;
    let_go(&r);
    return Py_BuildValue("LLL", (long long)ids, (long long)bags, (long long)columns);
}

/* The jobs of one launch while they are written. */
typedef struct { job *jobs, *is_offset; int64_t count, programs, block; int has_lengths, is_weighted, is_indirect; } jobs_of;

static const int64_t LARGEST = INT32_MAX;

static int is_sound(const kind *k, const place *p) {
    int64_t ids;
    return p->found_at < 0 && p->ids >= 0 && p->ids <= LARGEST && p->bags >= 0 && p->bags <= LARGEST && p->bag_length >= 0
           && (!k->is_pooled || p->lengths_at >= 0
               || (!__builtin_mul_overflow(p->bags, p->bag_length, &ids) && ids == p->ids));
}

/* Whether the kernel can write where the caller wants the vectors: it writes 4 values at once where a dim is a multiple of that. */
static int can_be_written(const kind *k, const place *p) {
    int64_t unit = item_of(k) * (k->dim % 4 ? 1 : 4);
    return p->out_at % unit == 0 && k->out_row_bytes % unit == 0;
}

typedef struct { int64_t in_bytes, out_bytes, scratch, locations, moved_in, moved_out, found, mapped; } sizes;

static void stage(sizes *s, move *moves, int64_t *at, int64_t *is_offset, int64_t source, int64_t bytes) {
    s->in_bytes = aligned(s->in_bytes, 8);
    *at = s->in_bytes, *is_offset = 1;
    move *last = moves + s->moved_in - 1;
    if (s->moved_in && last->source + last->bytes == source && last->target + last->bytes == s->in_bytes) last->bytes += bytes;
    else if (bytes) moves[s->moved_in++] = (move){source, s->in_bytes, bytes, 1, 0, 0};
    s->in_bytes += bytes;
}

/* Room for everything that a request of `count` lookups can have. */
typedef struct { job *jobs; move *in, *out; cached *found; resolved *mapped; } room;

static void add(int64_t number, const kind *k, const place *p, int is_placed, sizes *s, room *m, jobs_of *to) {
    int64_t outputs = outputs_of(k, p), item = item_of(k), bytes = outputs * k->dim * item;
    job *j = to->jobs + to->count, *moves = to->is_offset + to->count;
    *moves = (job){0};
    *j = (job){.table = k->table, .rows = k->rows, .row_bytes = k->row_bytes, .dim = k->dim, .format = k->row_format,
               .mean = k->mean, .ids = p->ids, .lengths_at = -1, .bag_length = p->bag_length, .vectors = outputs,
               .weights_at = -1, .precision = k->precision, .first_program = to->programs, .starts_at = s->scratch,
               .hbm_rows = k->hbm_rows, .locations_at = -1, .hbm_share = k->hbm_share, .out_step = k->dim};
    moves->out_at = moves->first_program = moves->starts_at = 1;
    stage(s, m->in, &j->ids_at, &moves->ids_at, p->ids_at, 8 * p->ids);
    if (k->row_map) m->mapped[s->mapped++] = (resolved){number, k->row_map, j->ids_at, p->ids};
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
        if (k->out_row_bytes) j->out_step = k->out_row_bytes / item;
    } else {
        j->out_at = s->out_bytes;
        s->out_bytes += aligned(bytes, OUT_ALIGNMENT);
        int64_t row = k->dim * item;
        if (bytes && k->out_row_bytes) m->out[s->moved_out++] = (move){j->out_at, p->out_at, row, outputs, row, k->out_row_bytes};
        else if (bytes) m->out[s->moved_out++] = (move){j->out_at, p->out_at, bytes, 1, 0, 0};
    }
    to->programs += (outputs * k->columns + to->block - 1) / to->block;
    to->count++;
}

static PyObject *bytes_of(const void *from, int64_t count, size_t size) {
    return PyBytes_FromStringAndSize(from, count * (int64_t)size);
}

/* A launch's jobs as Python has them. */
static PyObject *described(const jobs_of *to) {
    PyObject *jobs = bytes_of(to->jobs, to->count, sizeof(job)), *is_offset = bytes_of(to->is_offset, to->count, sizeof(job));
    PyObject *programs = PyBytes_FromStringAndSize(NULL, to->programs * 4), *made = NULL;
    if (jobs && is_offset && programs) {
        int32_t *of = (int32_t *)(void *)PyBytes_AsString(programs);
        for (int64_t k = 0; k < to->count; k++) {
            int64_t end = k + 1 < to->count ? to->jobs[k + 1].first_program : to->programs;
            for (int64_t program = to->jobs[k].first_program; program < end; program++) of[program] = (int32_t)k;
        }
        made = Py_BuildValue("OOOiii", jobs, is_offset, programs, to->has_lengths, to->is_weighted, to->is_indirect);
    }
    Py_XDECREF(jobs), Py_XDECREF(is_offset), Py_XDECREF(programs);
    return made;
}

static void free_room(room *m) {
    PyMem_Free(m->jobs), PyMem_Free(m->in), PyMem_Free(m->out), PyMem_Free(m->found), PyMem_Free(m->mapped);
}

static int make_room(room *m, int64_t count) {
    size_t n = (size_t)count + 1;
    *m = (room){PyMem_Malloc(4 * n * sizeof(job)), PyMem_Malloc(3 * n * sizeof(move)), PyMem_Malloc(n * sizeof(move)),
                PyMem_Malloc(n * sizeof(cached)), PyMem_Malloc(n * sizeof(resolved))};
    if (m->jobs && m->in && m->out && m->found && m->mapped) return 1;
    free_room(m);
    PyErr_NoMemory();
    return 0;
}

/* Whether vectors go straight to where the caller wants them. */
static int is_direct(const kind *k, const place *p, int64_t count, int *is_placed) {
    int64_t at = 0;
    int packed = 1, apart = 0, writable = 1;
    for (int64_t i = 0; i < count; i++) {
        int64_t bytes = outputs_of(k + i, p + i) * k[i].dim * item_of(k + i);
        packed &= !bytes || (p[i].out_at == at && !k[i].out_row_bytes);
        apart |= k[i].out_row_bytes > 0;
        writable &= can_be_written(k + i, p + i);
        at += aligned(bytes, OUT_ALIGNMENT);
    }
    *is_placed = packed || (apart && writable);
    return *is_placed;
}

PyObject *py_lay_out(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    request r;
    room m;
    PyObject *result = NULL;
    if (n != 4) return PyErr_Format(PyExc_TypeError, "lay_out takes 4 arguments, got %zd", n);
    int64_t blocks[2] = {PyLong_AsLongLong(args[2]), PyLong_AsLongLong(args[3])};
    if (PyErr_Occurred()) return NULL;
    if (blocks[0] < 1 || blocks[1] < 1) return PyErr_Format(PyExc_ValueError, "blocks of columns must be positive");
    if (!take(args, &r)) return NULL;
    const kind *k = r.kinds.buf;
    const place *p = r.places.buf;
    for (int64_t i = 0; i < r.count; i++)
        if (!is_sound(k + i, p + i)) {
            let_go(&r);
            Py_RETURN_NONE;
        }
    if (make_room(&m, r.count)) {
        int64_t each = r.count + 1, end = 0;
        jobs_of pooled = {.jobs = m.jobs, .is_offset = m.jobs + each, .block = blocks[0]};
        jobs_of unpooled = {.jobs = m.jobs + 2 * each, .is_offset = m.jobs + 3 * each, .block = blocks[1]};
        sizes s = {0};
        int is_placed, direct = is_direct(k, p, r.count, &is_placed);
        for (int64_t i = 0; i < r.count; i++) {
            int64_t outputs = outputs_of(k + i, p + i), row = k[i].dim * item_of(k + i);
            int64_t last = outputs ? p[i].out_at + (outputs - 1) * (k[i].out_row_bytes ? k[i].out_row_bytes : row) + row : 0;
            if (last > end) end = last;
            add(i, k + i, p + i, is_placed, &s, &m, k[i].is_pooled ? &pooled : &unpooled);
        }
        if (is_placed) s.out_bytes = aligned(end, OUT_ALIGNMENT);
        PyObject *in = bytes_of(m.in, s.moved_in, sizeof(move)), *out = bytes_of(m.out, s.moved_out, sizeof(move));
        PyObject *mapped = bytes_of(m.mapped, s.mapped, sizeof(resolved)), *found = bytes_of(m.found, s.found, sizeof(cached));
        PyObject *first = described(&pooled), *second = described(&unpooled);
        if (in && out && mapped && found && first && second)
            result = Py_BuildValue("LLLLiOOOOOO", (long long)s.in_bytes, (long long)s.out_bytes, (long long)end, (long long)s.scratch,
                                   direct, in, out, mapped, found, first, second);
        Py_XDECREF(in), Py_XDECREF(out), Py_XDECREF(mapped), Py_XDECREF(found), Py_XDECREF(first), Py_XDECREF(second);
        free_room(&m);
    }
    let_go(&r);
    return result;
}

/* Whether `rows` parts of `bytes` bytes, `step` apart, lie in a buffer at `at`. */
static int lies_in(const Py_buffer *b, int64_t at, int64_t rows, int64_t step, int64_t bytes) {
    int64_t last, end;
    return at >= 0 && rows >= 0 && bytes >= 0 && step >= 0
           && (!rows || (!__builtin_mul_overflow(rows - 1, step, &last) && !__builtin_add_overflow(at, last, &last)
                         && !__builtin_add_overflow(last, bytes, &end) && end <= b->len));
}

/* Copies parts of one buffer to another; 0: one of them does not lie in its buffer. */
static int copy_parts(const Py_buffer *moves, const Py_buffer *source, const Py_buffer *target, int64_t source_base, int64_t target_base) {
    const move *m = moves->buf;
    for (int64_t i = 0; i < moves->len / (int64_t)sizeof(move); i++) {
        int64_t from, to;
        if (__builtin_add_overflow(m[i].source, source_base, &from) || __builtin_add_overflow(m[i].target, target_base, &to)
            || !lies_in(source, from, m[i].rows, m[i].source_step, m[i].bytes)
            || !lies_in(target, to, m[i].rows, m[i].target_step, m[i].bytes))
            return 0;
        for (int64_t row = 0; row < m[i].rows; row++, from += m[i].source_step, to += m[i].target_step)
            memcpy((char *)target->buf + to, (const char *)source->buf + from, (size_t)m[i].bytes);
    }
    return 1;
}

PyObject *py_move(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Py_buffer b[3] = {{0}};
    int held = 0, ok = 1;
    if (n != 5) return PyErr_Format(PyExc_TypeError, "move takes 5 arguments, got %zd", n);
    int64_t source_base = PyLong_AsLongLong(args[3]), target_base = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    while (held < 3 && !PyObject_GetBuffer(args[held], b + held, held == 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE)) held++;
    if (held == 3) {
        ok = copy_parts(b, b + 1, b + 2, source_base, target_base);
        if (!ok) PyErr_SetString(PyExc_ValueError, "a part to be copied does not lie in its buffer");
    }
    ok = ok && held == 3;
    while (held--) PyBuffer_Release(b + held);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

/* One of the buffers that are copied from: its moves, and what is added to where its parts go. */
typedef struct { Py_buffer moves, source; int64_t base; } part;

static int take_part(PyObject *tuple, part *p) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 3) return PyErr_SetString(PyExc_TypeError, "a part is moves, source and base"), 0;
    p->base = PyLong_AsLongLong(PyTuple_GetItem(tuple, 2));
    if (PyErr_Occurred() || PyObject_GetBuffer(PyTuple_GetItem(tuple, 0), &p->moves, PyBUF_SIMPLE)) return 0;
    if (!PyObject_GetBuffer(PyTuple_GetItem(tuple, 1), &p->source, PyBUF_SIMPLE)) return 1;
    PyBuffer_Release(&p->moves);
    return 0;
}

PyObject *py_move_all(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 2 || !PyList_Check(args[0])) return PyErr_Format(PyExc_TypeError, "move_all takes a list of parts and a target");
    Py_ssize_t count = PyList_Size(args[0]), held = 0;
    Py_buffer target;
    if (PyObject_GetBuffer(args[1], &target, PyBUF_WRITABLE)) return NULL;
    part *parts = PyMem_Calloc((size_t)count + 1, sizeof(part));
    if (!parts) PyErr_NoMemory();
    while (parts && held < count && take_part(PyList_GetItem(args[0], held), parts + held)) held++;
    int ok = parts && held == count;
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; ok && i < count; i++) ok = copy_parts(&parts[i].moves, &parts[i].source, &target, 0, parts[i].base);
        Py_END_ALLOW_THREADS
        if (!ok) PyErr_SetString(PyExc_ValueError, "a part to be copied does not lie in its buffer");
    }
    while (held--) PyBuffer_Release(&parts[held].moves), PyBuffer_Release(&parts[held].source);
    PyMem_Free(parts);
    PyBuffer_Release(&target);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}
