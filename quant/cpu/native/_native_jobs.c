/* A request's lookups as jobs of the GPU's lookup kernel, and copies of many small parts at once.
 * totals(kinds, places) -> (ids, bags, columns of vectors of the pooled lookups, ids of tables whose rows may be
 *   gathered)
 * measure(kinds, places, out_bytes, bytes of rows that the CPU gathers at most, blocks of pooled columns, of
 *   unpooled ones, of ids that the cache finds, that become row numbers) -> None: more than a launch can be, or
 *   bags that are not the ids, which Python refuses; else the request's sizes, as MEASURED_FIELDS, then its
 *   places, as bytes
 * lay_out(kinds, what measure made of them) -> (moves_in, moves_out, resolved, gathered): moves_in, moves_out:
 *   fields of `move`; resolved, gathered: lookups whose ids become row numbers, and whose rows the CPU gathers;
 *   all int64, as bytes
 * move_all(moves, source, target): copies parts of a buffer to another */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <string.h>
#include "_arguments.h"
#include "_native_batch.h"

typedef struct { const kind *kinds; const place *places; int64_t of_kinds, count; } request;

/* Reads a request of two buffers; 0: an error is set. */
static int read_request(const arguments *a, request *r) {
    *r = (request){a->b[0].buf, a->b[1].buf, a->b[0].len / (int64_t)sizeof(kind),
                   a->b[1].len / (int64_t)sizeof(place)};
    if (a->b[1].len % (Py_ssize_t)sizeof(place) == 0) return 1;
    PyErr_Format(PyExc_ValueError, "%zd bytes are no places of %zu bytes each", a->b[1].len, sizeof(place));
    return 0;
}

PyObject *py_totals(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments a;
    request r;
    int64_t ids = 0, bags = 0, columns = 0, gathered = 0;
    if (!take_arguments("totals", "bb", args, n, &a)) return NULL;
    if (!read_request(&a, &r)) return release(&a), NULL;
    const place *p = r.places;
    for (int64_t i = 0; i < r.count; i++) {
        if (p[i].kind < 0 || p[i].kind >= r.of_kinds) continue; /* `measure` leaves it to Python */
        const kind *k = r.kinds + p[i].kind;
        if (k->is_gathered) gathered += p[i].ids;
        if (k->is_pooled) ids += p[i].ids, bags += p[i].bags, columns += p[i].bags * k->columns;
    }
    release(&a);
    return Py_BuildValue("LLLL", (long long)ids, (long long)bags, (long long)columns, (long long)gathered);
}

static PyObject *bytes_of(const void *from, int64_t count, size_t size) {
    return PyBytes_FromStringAndSize(from, count * (int64_t)size);
}

void free_room(room *m) {
    PyMem_Free(m->jobs), PyMem_Free(m->in), PyMem_Free(m->out), PyMem_Free(m->found), PyMem_Free(m->mapped),
        PyMem_Free(m->gathered);
}

int make_room(room *m, int64_t count) {
    size_t n = (size_t)count + 1;
    *m = (room){PyMem_Malloc(4 * n * sizeof(job)), PyMem_Malloc(3 * n * sizeof(move)),
                PyMem_Malloc(2 * n * sizeof(move)),
                PyMem_Malloc(n * sizeof(cached)), PyMem_Malloc(n * sizeof(resolved)),
                PyMem_Malloc(2 * n * sizeof(int64_t))};
    if (m->jobs && m->in && m->out && m->found && m->mapped && m->gathered) return 1;
    free_room(m);
    PyErr_NoMemory();
    return 0;
}

PyObject *py_lay_out(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    asked a;
    room m;
    PyObject *result = NULL;
    if (n != 2) return PyErr_Format(PyExc_TypeError, "lay_out takes 2 arguments, got %zd", n);
    if (!take_measured(args[0], args[1], &a))
        return PyErr_Format(PyExc_TypeError, "expected kinds, and what measure made of them");
    if (!make_room(&m, a.count)) return NULL;
    laid_out laid;
    lay_out_again(&m, &a, &laid);
    const sizes *s = &laid.sizes;
    int64_t *numbers = m.gathered + s->gathered;
    for (int64_t i = 0; i < s->mapped; i++) numbers[i] = m.mapped[i].lookup;
    PyObject *in = bytes_of(m.in, s->moved_in, sizeof(move)), *out = bytes_of(m.out, s->moved_out, sizeof(move)),
        *mapped = bytes_of(numbers, s->mapped, sizeof(int64_t)),
        *gathered = bytes_of(m.gathered, s->gathered, sizeof(int64_t));
    if (in && out && mapped && gathered) result = Py_BuildValue("OOOO", in, out, mapped, gathered);
    Py_XDECREF(in), Py_XDECREF(out), Py_XDECREF(mapped), Py_XDECREF(gathered);
    free_room(&m);
    return result;
}

static int64_t traits_of(const jobs_of *j) {
    return (j->has_lengths ? HAS_LENGTHS : 0) | (j->is_weighted ? IS_WEIGHTED : 0) | (j->is_indirect
        ? IS_INDIRECT : 0);
}

PyObject *py_measure(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments a;
    request r;
    PyObject *made = NULL;
    room m;
    if (!take_arguments("measure", "bbiiiiii", args, n, &a)) return NULL;
    const int64_t *numbers = a.n;
    int are_sizes = 1;
    for (int i = 0; i < 6; i++) are_sizes &= numbers[i] >= (i > 1);
    if (!are_sizes) PyErr_SetString(PyExc_ValueError, "bytes are not negative, and blocks are positive");
    else if (!read_request(&a, &r)) made = NULL;
    else if (!are_sound(r.kinds, r.of_kinds, r.places, r.count)) made = Py_NewRef(Py_None);
    else if (make_room(&m, r.count)) {
        laid_out laid;
        lay_out_in(&m, r.kinds, r.places, r.count, numbers[2], numbers[3], numbers[1], &laid);
        const sizes *s = &laid.sizes;
        int64_t asked = laid.end > numbers[0] ? laid.end : numbers[0], staged = s->out_bytes,
            whole = aligned(asked, OUT_ALIGNMENT);
        measured got = {.pooled_block = numbers[2], .unpooled_block = numbers[3], .probe_block = numbers[4],
                        .resolve_block = numbers[5], .in_bytes = s->in_bytes, .out_bytes = laid.is_direct
                            && whole > staged ? whole : staged, .asked_bytes = asked,
                        .scratch = s->scratch, .pooled_jobs = laid.pooled.count,
                            .pooled_programs = laid.pooled.programs,
                        .pooled_traits = traits_of(&laid.pooled), .unpooled_jobs = laid.unpooled.count,
                        .unpooled_programs = laid.unpooled.programs,
                            .unpooled_traits = traits_of(&laid.unpooled),
                        .cached = s->found, .resolved = s->mapped, .all_found = s->all_found,
                        .is_direct = laid.is_direct, .rows_bytes = s->rows_bytes, .gather_bytes = numbers[1],
                        .on_host = s->on_host};
        for (int64_t i = 0; i < s->found; i++)
            got.cached_ids += m.found[i].ids, got.probe_blocks += ceil_div(m.found[i].ids, numbers[4]);
        for (int64_t i = 0; i < s->mapped; i++) got.resolve_programs += ceil_div(m.mapped[i].ids, numbers[5]);
        free_room(&m);
        if ((made = PyBytes_FromStringAndSize(NULL, (int64_t)sizeof got + a.b[1].len))) {
            char *to = PyBytes_AsString(made);
            memcpy(to, &got, sizeof got), memcpy(to + sizeof got, r.places, (size_t)a.b[1].len);
        }
    }
    release(&a);
    return made;
}

int copy_parts(const move *m, int64_t count, const Py_buffer *source, const Py_buffer *target, int64_t base) {
    for (int64_t i = 0; i < count; i++) {
        int64_t from = m[i].source, to;
        if (__builtin_add_overflow(m[i].target, base, &to)
            || !lies_in(source, from, m[i].rows, m[i].source_step, m[i].bytes)
            || !lies_in(target, to, m[i].rows, m[i].target_step, m[i].bytes))
            return 0;
        for (int64_t row = 0; row < m[i].rows; row++, from += m[i].source_step, to += m[i].target_step)
            memcpy((char *)target->buf + to, (const char *)source->buf + from, (size_t)m[i].bytes);
    }
    return 1;
}

PyObject *py_move_all(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments a;
    int ok;
    if (!take_arguments("move_all", "bbw", args, n, &a)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    ok = copy_parts(a.b[0].buf, a.b[0].len / (Py_ssize_t)sizeof(move), a.b + 1, a.b + 2, 0);
    Py_END_ALLOW_THREADS
    release(&a);
    if (!ok) return PyErr_Format(PyExc_ValueError, "a part to be copied does not lie in its buffer");
    Py_RETURN_NONE;
}
