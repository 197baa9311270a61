/* A batch for the GPU's lookup kernel, of requests whose lookups come again and again: what
 * `quant.gpu.batch.merge.merge` and
 * `quant.gpu.batch.moves.move_all` do in Python, for all requests in one call. Where much is copied, other
 * threads of Python run meanwhile.
 * place_batch(requests, extra bytes of inputs of each or None, whether outputs of each stay on the device or
 *   None) ->
 *   (bases, stay_bytes, in_bytes, out_bytes, scratch, jobs, resolved, header_bytes, launches, resolve,
 *   probe):
 *   requests: of each (kinds, what `measure` made of it, what its pooled lookups share a launch by, and its
 *   unpooled ones, and more)
 *   bases: int64 [requests, BASE_FIELDS], as bytes; launches: of each (shared by, is pooled, jobs, programs,
 *   first flag,
 *   has lengths, is weighted, is indirect, jobs_at, programs_at, members: of each request (number, first
 *   flag, one after the last))
 *   resolve: (jobs_at, programs_at, programs) or None · probe: (jobs_at, blocks_at, ids, blocks) or None
 * write_batch(requests, bases, sources, target, header_at, locked, from_bytes): copies the inputs of each
 *   request to the target and
 *   writes the header there; header_at < 0: it has none. Inputs of from_bytes or more that are one part and
 *   lie in one of the ranges of
 *   memory (begin, end) of the list `locked` are left out: returns for each where it goes, its address and
 *   its bytes */
#include <string.h>
#include "_layout.h"

typedef struct { BASE_FIELDS(MEMBER) } base;
typedef struct { PROBE_FIELDS(MEMBER) } probe;
typedef struct { RESOLVE_FIELDS(MEMBER) } resolve;

enum { LONG_COPY = 256 << 10 }; /* bytes from which other threads of Python run meanwhile */

/* A request of a batch. alike: keys of the launches that its pooled and unpooled lookups share, compared
 * by identity. */
typedef struct {
    const kind *kinds;
    const measured *sizes;
    const place *places;
    int64_t count;
    PyObject *alike[2];
    int64_t group[2];
} asked;

/* Jobs that share a launch. jobs_at, programs_at: in the header. written_*: while it is written. */
typedef struct {
    PyObject *alike;
    int is_unpooled;
    int64_t jobs, programs, traits, first_flag, jobs_at, programs_at, written_jobs, written_programs;
} group;

/* What a batch has. Where nothing of a kind is read, its place in the header is -1. */
typedef struct {
    asked *requests;
    group *groups;
    int64_t count, group_count, cached, cached_ids, probe_blocks, resolved, resolve_programs, resolve_at,
        probe_at, header_bytes, most;
} batch;

static void free_batch(batch *b) { PyMem_Free(b->requests), PyMem_Free(b->groups); }

static int take_request(PyObject *tuple, asked *a) {
    if (PyTuple_Check(tuple) && PyTuple_Size(tuple) >= 4 && PyBytes_Check(PyTuple_GetItem(tuple, 0))
        && PyBytes_Check(PyTuple_GetItem(tuple, 1))) {
        PyObject *kinds = PyTuple_GetItem(tuple, 0), *sizes = PyTuple_GetItem(tuple, 1);
        const kind *k = (const void *)PyBytes_AsString(kinds);
        const measured *m = (const void *)PyBytes_AsString(sizes);
        int64_t of_kinds = PyBytes_Size(kinds) / (int64_t)sizeof(kind);
        int64_t bytes = PyBytes_Size(sizes) - (int64_t)sizeof(measured), count = bytes / (int64_t)sizeof(place);
        if (bytes >= 0 && bytes % (int64_t)sizeof(place) == 0
            && are_sound(k, of_kinds, (const void *)(m + 1), count)) {
            *a = (asked){k, m, (const void *)(m + 1), count,
                         {PyTuple_GetItem(tuple, 2), PyTuple_GetItem(tuple, 3)}, {-1, -1}};
            return 1;
        }
    }
    PyErr_SetString(PyExc_TypeError,
        "a request of a batch is kinds, what measure made of them, and what its launches are shared by");
    return 0;
}

/* Which requests share launches: those with pooled lookups come first. */
static void find_groups(batch *b) {
    for (int is_unpooled = 0; is_unpooled < 2; is_unpooled++) {
        int64_t first = b->group_count;
        for (int64_t i = 0; i < b->count; i++) {
            asked *a = b->requests + i;
            const measured *m = a->sizes;
            int64_t jobs = is_unpooled ? m->unpooled_jobs : m->pooled_jobs, g = first;
            if (!jobs) continue;
            while (g < b->group_count && b->groups[g].alike != a->alike[is_unpooled]) g++;
            if (g == b->group_count)
                b->groups[b->group_count++] = (group){.alike = a->alike[is_unpooled],
                                                      .is_unpooled = is_unpooled};
            a->group[is_unpooled] = g;
            b->groups[g].jobs += jobs;
            b->groups[g].programs += is_unpooled ? m->unpooled_programs : m->pooled_programs;
            b->groups[g].traits |= is_unpooled ? m->unpooled_traits : m->pooled_traits;
        }
    }
}

/* Where everything of the header lies. */
static void find_places(batch *b) {
    int64_t at = 0, flag = 0;
    for (group *g = b->groups; g < b->groups + b->group_count; g++) {
        g->first_flag = flag, g->jobs_at = at, g->programs_at = at + g->jobs * (int64_t)sizeof(job);
        at = aligned(g->programs_at + 4 * g->programs, 8);
        flag += g->jobs;
    }
    b->resolve_at = b->probe_at = -1;
    if (b->resolved) {
        b->resolve_at = at;
        at = aligned(at + b->resolved * (int64_t)sizeof(resolve) + 4 * b->resolve_programs, 8);
    }
    if (b->cached) {
        b->probe_at = at;
        at += b->cached * (int64_t)sizeof(probe) + 4 * b->probe_blocks;
    }
    b->header_bytes = at;
}

static int take_batch(PyObject *list, batch *b) {
    *b = (batch){0};
    if (!PyList_Check(list)) return PyErr_SetString(PyExc_TypeError, "a batch is a list of requests"), 0;
    b->count = PyList_Size(list);
    b->requests = PyMem_Calloc((size_t)b->count + 1, sizeof(asked)),
        b->groups = PyMem_Calloc(2 * (size_t)b->count + 1, sizeof(group));
    if (!b->requests || !b->groups) return free_batch(b), PyErr_NoMemory(), 0;
    for (int64_t i = 0; i < b->count; i++) {
        if (!take_request(PyList_GetItem(list, i), b->requests + i)) return free_batch(b), 0;
        const measured *m = b->requests[i].sizes;
        b->cached += m->cached, b->cached_ids += m->cached_ids, b->probe_blocks += m->probe_blocks;
        b->resolved += m->resolved, b->resolve_programs += m->resolve_programs;
        if (b->requests[i].count > b->most) b->most = b->requests[i].count;
    }
    find_groups(b);
    find_places(b);
    return 1;
}

/* The requests of a launch, each with its flags. */
static PyObject *members_of(const batch *b, int64_t number) {
    const group *g = b->groups + number;
    PyObject *made = PyList_New(0);
    int64_t flag = g->first_flag;
    for (int64_t i = 0; made && i < b->count; i++) {
        if (b->requests[i].group[g->is_unpooled] != number) continue;
        const measured *m = b->requests[i].sizes;
        int64_t end = flag + (g->is_unpooled ? m->unpooled_jobs : m->pooled_jobs);
        PyObject *one = Py_BuildValue("LLL", (long long)i, (long long)flag, (long long)end);
        if (!one || PyList_Append(made, one)) Py_CLEAR(made);
        Py_XDECREF(one);
        flag = end;
    }
    return made;
}

static PyObject *launches_of(const batch *b) {
    PyObject *made = PyList_New(0);
    for (int64_t i = 0; made && i < b->group_count; i++) {
        const group *g = b->groups + i;
        PyObject *members = members_of(b, i);
        PyObject *one = members ? Py_BuildValue("OOLLLOOOLLN", g->alike, g->is_unpooled ? Py_False : Py_True,
                                                (long long)g->jobs,
                                                (long long)g->programs, (long long)g->first_flag,
                                                    g->traits & HAS_LENGTHS ? Py_True : Py_False,
                                                g->traits & IS_WEIGHTED ? Py_True : Py_False,
                                                    g->traits & IS_INDIRECT ? Py_True : Py_False,
                                                (long long)g->jobs_at, (long long)g->programs_at, members)
                                : NULL;
        if (!one || PyList_Append(made, one)) Py_CLEAR(made);
        Py_XDECREF(one);
    }
    return made;
}

static PyObject *none_or(int there, PyObject *made) {
    if (there) return made;
    Py_XDECREF(made);
    return Py_NewRef(Py_None);
}

/* Whether item `i` of a list is true; 0 where there is no list. */
static int is_true(PyObject *list, int64_t i) {
    return list != Py_None && PyObject_IsTrue(PyList_GetItem(list, i)) == 1;
}

static int is_list_of(PyObject *list, int64_t count) {
    return list == Py_None || (PyList_Check(list) && PyList_Size(list) == count);
}

PyObject *py_place_batch(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    batch b;
    if (n != 3) return PyErr_Format(PyExc_TypeError, "place_batch takes 3 arguments, got %zd", n);
    if (!take_batch(args[0], &b)) return NULL;
    PyObject *bases = NULL, *result = NULL;
    if (!is_list_of(args[1], b.count) || !is_list_of(args[2], b.count))
        PyErr_SetString(PyExc_TypeError,
                        "extra bytes, and whether outputs stay, are lists of an item for each request");
    else bases = PyBytes_FromStringAndSize(NULL, b.count * (int64_t)sizeof(base));
    if (bases) {
        base *to = (base *)(void *)PyBytes_AsString(bases);
        int64_t inputs = 0, outputs = 0, scratch = 0, located = 0, jobs = 0, stay_bytes = 0;
        for (int wanted = 1; wanted >= 0; wanted--) { /* outputs that stay on the device come first */
            for (int64_t i = 0; i < b.count; i++)
                if (is_true(args[2], i) == wanted)
                    to[i].outputs = outputs, outputs += b.requests[i].sizes->out_bytes;
            if (wanted) stay_bytes = outputs;
        }
        for (int64_t i = 0; i < b.count; i++) {
            const measured *m = b.requests[i].sizes;
            to[i].inputs = inputs, to[i].scratch = scratch, to[i].locations = 4 * located;
            inputs += aligned(m->in_bytes, OUT_ALIGNMENT) + (args[1] == Py_None ? 0
                                                : PyLong_AsLongLong(PyList_GetItem(args[1], i)));
            scratch += m->scratch, located += m->cached_ids, jobs += m->pooled_jobs + m->unpooled_jobs;
        }
        int64_t programs_at = b.resolve_at + b.resolved * (int64_t)sizeof(resolve),
            blocks_at = b.probe_at + b.cached * (int64_t)sizeof(probe);
        if (!PyErr_Occurred())
            result = Py_BuildValue(
                "OLLLLLLLNNN", bases, (long long)stay_bytes, (long long)inputs, (long long)outputs,
                    (long long)scratch, (long long)jobs,
                (long long)b.resolved, (long long)b.header_bytes, launches_of(&b),
                none_or(b.resolved > 0, Py_BuildValue("LLL", (long long)b.resolve_at, (long long)programs_at,
                                                      (long long)b.resolve_programs)),
                none_or(b.cached > 0, Py_BuildValue("LLLL", (long long)b.probe_at, (long long)blocks_at,
                                                    (long long)b.cached_ids, (long long)b.probe_blocks)));
        Py_DECREF(bases);
    }
    free_batch(&b);
    return result;
}

/* Where the next jobs of what the cache finds, and of what makes row numbers, are written. */
typedef struct { probe *probes; int32_t *blocks; resolve *resolves; int32_t *programs; int64_t probed, block,
                resolved, program; } writing;

static void write_jobs(const jobs_of *from, const base *at, group *g, char *header) {
    job *to = (job *)(void *)(header + g->jobs_at) + g->written_jobs;
    int32_t *programs = (int32_t *)(void *)(header + g->programs_at) + g->written_programs;
    write_programs(from, (int32_t)g->written_jobs, programs);
    for (int64_t i = 0; i < from->count; i++) {
        job j = from->jobs[i];
        j.ids_at += at->inputs, j.out_at += at->outputs, j.starts_at += at->scratch,
            j.first_program += g->written_programs;
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
                                             .ids = r->ids, .found_at = -1, .first_program = w->program};
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

/* What is written of a batch, and to where. left: as many as requests; left_count: of them. */
typedef struct {
    const base *bases;
    const Py_buffer *sources, *target;
    const range *locked;
    left_out *left;
    int64_t header_at, locked_count, from_bytes, left_count;
} output;

static int is_locked(const output *to, int64_t address, int64_t bytes) {
    for (int64_t i = 0; i < to->locked_count; i++)
        if (address >= to->locked[i].begin && address + bytes <= to->locked[i].end) return 1;
    return 0;
}

static int64_t address_of(const Py_buffer *b) { return (int64_t)(intptr_t)b->buf; }

/* Whether a request's inputs are left to the device. */
static int leave_out(const room *m, const laid_out *laid, int64_t number, output *to) {
    const Py_buffer *source = to->sources + number;
    const move *only = m->in;
    if (laid->sizes.moved_in != 1 || only->bytes < to->from_bytes
        || !lies_in(source, only->source, 1, 0, only->bytes)
        || !is_locked(to, address_of(source) + only->source, only->bytes))
        return 0;
    to->left[to->left_count++] = (left_out){to->bases[number].inputs, address_of(source) + only->source,
                                            only->bytes};
    return 1;
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
        lay_out_in(m, a->kinds, a->places, a->count, a->sizes->pooled_block, a->sizes->unpooled_block, &laid);
        if (header) {
            if (laid.pooled.count) write_jobs(&laid.pooled, at, b->groups + a->group[0], header);
            if (laid.unpooled.count) write_jobs(&laid.unpooled, at, b->groups + a->group[1], header);
            write_others(m, &laid, a->sizes, at, &w);
        }
        if (!leave_out(m, &laid, i, to)
            && !copy_parts(m->in, laid.sizes.moved_in, to->sources + i, to->target, 0, at->inputs)) return 0;
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
    for (int64_t i = 0; i < b->count; i++)
        if (!is_locked(to, address_of(to->sources + i), to->sources[i].len))
            bytes += b->requests[i].sizes->in_bytes;
    PyThreadState *state = bytes > LONG_COPY ? PyEval_SaveThread() : NULL;
    int ok = write_all(b, m, to);
    if (state) PyEval_RestoreThread(state);
    if (!ok) PyErr_SetString(PyExc_ValueError, "a part to be copied does not lie in its buffer");
    return ok;
}

PyObject *py_write_batch(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    batch b;
    room m;
    Py_buffer target, *sources = NULL;
    range *locked = NULL;
    left_out *left = NULL;
    PyObject *made = NULL;
    int64_t held = 0;
    if (n != 7) return PyErr_Format(PyExc_TypeError, "write_batch takes 7 arguments, got %zd", n);
    int64_t header_at = PyLong_AsLongLong(args[4]), from_bytes = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred() || !take_batch(args[0], &b)) return NULL;
    if (PyObject_GetBuffer(args[3], &target, PyBUF_WRITABLE)) return free_batch(&b), NULL;
    if (!PyBytes_Check(args[1]) || PyBytes_Size(args[1]) != b.count * (int64_t)sizeof(base)
        || !PyList_Check(args[2])
        || PyList_Size(args[2]) != b.count || !PyList_Check(args[5]))
        PyErr_SetString(PyExc_TypeError,
            "bases are bytes, sources a list of a buffer for each request, and ranges of memory a list");
    else if (header_at >= 0 && (header_at % 8 || header_at > target.len - b.header_bytes))
        PyErr_SetString(PyExc_ValueError,
                        "the header of a batch does not lie in its buffer, at a multiple of 8 bytes");
    else {
        sources = PyMem_Calloc((size_t)b.count + 1, sizeof(Py_buffer)),
            left = PyMem_Malloc(((size_t)b.count + 1) * sizeof(left_out));
        locked = PyMem_Malloc(((size_t)PyList_Size(args[5]) + 1) * sizeof(range));
        if (!sources || !left || !locked) PyErr_NoMemory();
        else if (take_ranges(args[5], locked)) {
            while (held < b.count && !PyObject_GetBuffer(PyList_GetItem(args[2], held), sources + held,
                                                         PyBUF_SIMPLE)) held++;
            if (held == b.count && make_room(&m, b.most)) {
                output to = {(const base *)(const void *)PyBytes_AsString(args[1]), sources, &target, locked,
                             left, header_at, PyList_Size(args[5]), from_bytes, 0};
                if (write_to(&b, &m, &to)) made = list_of(left, to.left_count);
                free_room(&m);
            }
            while (held--) PyBuffer_Release(sources + held);
        }
    }
    PyMem_Free(sources), PyMem_Free(left), PyMem_Free(locked);
    PyBuffer_Release(&target);
    free_batch(&b);
    return made;
}
