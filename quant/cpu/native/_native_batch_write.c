/* Writes a batch (`_native_batch.h`). Where much is copied, other threads of Python run meanwhile.
 * write_batch(requests, bases, sources, target, header_at, rows_at, locked, from_bytes): copies the inputs of each
 *   request to the target and writes the header there; header_at < 0: it has none. A source is a buffer, or
 *   (moves, buffer): other moves than the request's; no sources: nothing is copied. rows_at: device address of the
 *   rows that the CPU gathers. Inputs of from_bytes or more that are one part and lie in one of the ranges of
 *   memory (begin, end) of the list `locked` are left out: returns for each where it goes, its address and its
 *   bytes */
#include <string.h>
#include "_arguments.h"
#include "_native_batch.h"

enum { LONG_COPY = 256 << 10 }; /* bytes from which other threads of Python run meanwhile */

/* Where the next jobs of what the cache finds, and of what makes row numbers, are written. */
typedef struct { probe *probes; int32_t *blocks; resolve *resolves; int32_t *programs; int64_t probed, block,
                resolved, program; } writing;

static void write_jobs(const jobs_of *from, const base *at, int64_t rows_at, group *g, char *header) {
    job *to = (job *)(void *)(header + g->jobs_at) + g->written_jobs;
    int32_t *programs = (int32_t *)(void *)(header + g->programs_at) + g->written_programs;
    write_programs(from, (int32_t)g->written_jobs, programs);
    for (int64_t i = 0; i < from->count; i++) {
        job j = from->jobs[i];
        j.out_at += at->outputs, j.starts_at += at->scratch, j.first_program += g->written_programs;
        if (from->is_offset[i].table) j.table += rows_at + at->rows;
        if (j.ids_at >= 0) j.ids_at += at->inputs;
        if (j.lengths_at >= 0) j.lengths_at += at->inputs;
        if (j.weights_at >= 0) j.weights_at += at->inputs;
        if (j.locations_at >= 0) j.locations_at += at->locations;
        to[i] = j;
    }
    g->written_jobs += from->count, g->written_programs += from->programs;
    /* up to a multiple of 8 bytes */
    if (g->written_jobs == g->jobs && g->programs % 2) programs[from->programs] = 0;
}

static void write_others(const room *m, const laid_out *laid, const measured *sizes, const base *at,
                         writing *w) {
    for (int64_t i = 0; i < laid->sizes.mapped; i++, w->resolved++) {
        const resolved *r = m->mapped + i;
        int64_t programs = ceil_div(r->ids, sizes->resolve_block), ids_at = r->ids_at + at->inputs;
        w->resolves[w->resolved] = (resolve){.row_map = r->row_map, .ids_at = ids_at, .target_at = ids_at,
                                             .ids = r->ids,
                                             .found_at = r->found_at < 0 ? -1 : r->found_at + at->outputs,
                                             .first_program = w->program};
        while (programs--) w->programs[w->program++] = (int32_t)w->resolved;
    }
    for (int64_t i = 0; i < laid->sizes.found; i++, w->probed++) {
        const cached *c = m->found + i;
        int64_t blocks = ceil_div(c->ids, sizes->probe_block);
        w->probes[w->probed] = (probe){.table = c->table, .ids_at = c->ids_at + at->inputs, .ids = c->ids,
                                       .locations_at = c->locations_at + at->locations,
                                           .first_block = w->block};
        while (blocks--) w->blocks[w->block++] = (int32_t)w->probed;
    }
}

/* A part of memory that a device copies from by itself, and a copy that is left to it. */
typedef struct { int64_t begin, end; } range;
typedef struct { int64_t target, address, bytes; } left_out;

/* A request's inputs. moves: from there, where they are not the request's own. */
typedef struct { Py_buffer bytes, moves; } source;

/* What is written of a batch, and to where. left: as many as requests; left_count: of them. */
typedef struct {
    const base *bases;
    const source *sources; /* NULL: nothing is copied */
    const Py_buffer *target;
    const range *locked;
    left_out *left;
    int64_t header_at, rows_at, locked_count, from_bytes, left_count;
} output;

static int is_locked(const output *to, int64_t address, int64_t bytes) {
    for (int64_t i = 0; i < to->locked_count; i++)
        if (address >= to->locked[i].begin && address + bytes <= to->locked[i].end) return 1;
    return 0;
}

static int64_t address_of(const Py_buffer *b) { return (int64_t)(intptr_t)b->buf; }

/* Whether a request's inputs are left to the device. */
static int leave_out(const room *m, const laid_out *laid, int64_t number, output *to) {
    const Py_buffer *source = &to->sources[number].bytes;
    const move *only = m->in;
    if (laid->sizes.moved_in != 1 || only->bytes < to->from_bytes
        || !lies_in(source, only->source, 1, 0, only->bytes)
        || !is_locked(to, address_of(source) + only->source, only->bytes))
        return 0;
    to->left[to->left_count++] = (left_out){to->bases[number].inputs, address_of(source) + only->source,
                                            only->bytes};
    return 1;
}

static int copy_inputs(const room *m, const laid_out *laid, int64_t number, output *to) {
    const source *from = to->sources + number;
    int64_t base = to->bases[number].inputs;
    if (from->moves.buf)
        return copy_parts(from->moves.buf, from->moves.len / (int64_t)sizeof(move), &from->bytes, to->target, base);
    return leave_out(m, laid, number, to)
           || copy_parts(m->in, laid->sizes.moved_in, &from->bytes, to->target, base);
}

/* Copies inputs and writes the header, if any; 0: a part lies outside its buffer. Touches no Python
 * object. */
static int write_all(batch *b, room *m, output *to) {
    char *header = to->header_at < 0 ? NULL : (char *)to->target->buf + to->header_at;
    writing w = {0};
    if (header && b->resolved) {
        w.resolves = (resolve *)(void *)(header + b->resolve_at),
            w.programs = (int32_t *)(void *)(w.resolves + b->resolved);
        if (b->resolve_programs % 2) w.programs[b->resolve_programs] = 0;
    }
    if (header && b->cached)
        w.probes = (probe *)(void *)(header + b->probe_at),
            w.blocks = (int32_t *)(void *)(w.probes + b->cached);
    for (int64_t i = 0; i < b->count; i++) {
        const asked *a = b->requests + i;
        const base *at = to->bases + i;
        laid_out laid;
        lay_out_again(m, a, &laid);
        if (header) {
            if (laid.pooled.count) write_jobs(&laid.pooled, at, to->rows_at, b->groups + a->group[0], header);
            if (laid.unpooled.count) write_jobs(&laid.unpooled, at, to->rows_at, b->groups + a->group[1], header);
            write_others(m, &laid, a->sizes, at, &w);
        }
        if (to->sources && !copy_inputs(m, &laid, i, to)) return 0;
    }
    return 1;
}

static int take_ranges(PyObject *list, range *to) {
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++) {
        PyObject *one = PyList_GetItem(list, i);
        if (!PyTuple_Check(one) || PyTuple_Size(one) != 2)
            return PyErr_SetString(PyExc_TypeError, "a range of memory is its begin and its end"), 0;
        to[i].begin = PyLong_AsLongLong(PyTuple_GetItem(one, 0)),
            to[i].end = PyLong_AsLongLong(PyTuple_GetItem(one, 1));
        if (PyErr_Occurred()) return 0;
    }
    return 1;
}

static PyObject *list_of(const left_out *left, int64_t count) {
    PyObject *made = PyList_New(count);
    for (int64_t i = 0; made && i < count; i++) {
        PyObject *one = Py_BuildValue("LLL", (long long)left[i].target, (long long)left[i].address,
                                      (long long)left[i].bytes);
        if (!one || PyList_SetItem(made, i, one)) Py_CLEAR(made);
    }
    return made;
}

/* Writes the batch. Few bytes are copied sooner than another thread gives Python's lock back. */
static int write_to(batch *b, room *m, output *to) {
    int64_t bytes = 0;
    for (int64_t i = 0; to->sources && i < b->count; i++)
        if (!is_locked(to, address_of(&to->sources[i].bytes), to->sources[i].bytes.len))
            bytes += b->requests[i].sizes->in_bytes;
    PyThreadState *state = bytes > LONG_COPY ? PyEval_SaveThread() : NULL;
    int ok = write_all(b, m, to);
    if (state) PyEval_RestoreThread(state);
    if (!ok) PyErr_SetString(PyExc_ValueError, "a part to be copied does not lie in its buffer");
    return ok;
}

static void let_go(source *from) {
    PyBuffer_Release(&from->bytes);
    if (from->moves.buf) PyBuffer_Release(&from->moves);
}

static int take_source(PyObject *one, source *to) {
    *to = (source){0};
    if (!PyTuple_Check(one)) return !PyObject_GetBuffer(one, &to->bytes, PyBUF_SIMPLE);
    if (PyTuple_Size(one) != 2) return PyErr_SetString(PyExc_TypeError, "a source is moves and a buffer"), 0;
    if (PyObject_GetBuffer(PyTuple_GetItem(one, 1), &to->bytes, PyBUF_SIMPLE)) return 0;
    if (!PyObject_GetBuffer(PyTuple_GetItem(one, 0), &to->moves, PyBUF_SIMPLE)) return 1;
    PyBuffer_Release(&to->bytes);
    return 0;
}

PyObject *py_write_batch(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    batch b;
    room m;
    Py_buffer target;
    source *sources = NULL;
    range *locked = NULL;
    left_out *left = NULL;
    PyObject *made = NULL;
    int64_t held = 0;
    if (n != 8) return PyErr_Format(PyExc_TypeError, "write_batch takes 8 arguments, got %zd", n);
    int64_t header_at = PyLong_AsLongLong(args[4]), rows_at = PyLong_AsLongLong(args[5]),
        from_bytes = PyLong_AsLongLong(args[7]);
    int is_copied = args[2] != Py_None;
    if (PyErr_Occurred() || !take_batch(args[0], &b)) return NULL;
    if (PyObject_GetBuffer(args[3], &target, PyBUF_WRITABLE)) return free_batch(&b), NULL;
    if (!PyBytes_Check(args[1]) || PyBytes_Size(args[1]) != b.count * (int64_t)sizeof(base)
        || (is_copied && (!PyList_Check(args[2]) || PyList_Size(args[2]) != b.count)) || !PyList_Check(args[6]))
        PyErr_SetString(PyExc_TypeError,
            "bases are bytes, sources a list of a buffer for each request, and ranges of memory a list");
    else if (header_at >= 0 && (header_at % 8 || header_at > target.len - b.header_bytes))
        PyErr_SetString(PyExc_ValueError,
                        "the header of a batch does not lie in its buffer, at a multiple of 8 bytes");
    else {
        sources = PyMem_Calloc((size_t)b.count + 1, sizeof(source)),
            left = PyMem_Malloc(((size_t)b.count + 1) * sizeof(left_out));
        locked = PyMem_Malloc(((size_t)PyList_Size(args[6]) + 1) * sizeof(range));
        if (!sources || !left || !locked) PyErr_NoMemory();
        else if (take_ranges(args[6], locked)) {
            while (is_copied && held < b.count && take_source(PyList_GetItem(args[2], held), sources + held))
                held++;
            if ((!is_copied || held == b.count) && make_room(&m, b.most)) {
                output to = {(const base *)(const void *)PyBytes_AsString(args[1]), is_copied ? sources : NULL,
                             &target, locked, left, header_at, rows_at, PyList_Size(args[6]), from_bytes, 0};
                if (write_to(&b, &m, &to)) made = list_of(left, to.left_count);
                free_room(&m);
            }
            while (held--) let_go(sources + held);
        }
    }
    PyMem_Free(sources), PyMem_Free(left), PyMem_Free(locked);
    PyBuffer_Release(&target);
    free_batch(&b);
    return made;
}
