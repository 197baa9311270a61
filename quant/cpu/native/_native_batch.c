/* Where everything of a batch lies (`_native_batch.h`).
 * place_batch(requests, extra bytes of inputs of each or None, whether outputs of each stay on the device or
 *   None) -> (bases, stay_bytes, in_bytes, out_bytes, scratch, rows_bytes, jobs, resolved, header_bytes,
 *   launches, resolve, probe):
 *   bases: int64 [requests, BASE_FIELDS], as bytes
 *   launches: of each (shared by, is pooled, jobs, programs, first flag, has lengths, is weighted, is indirect,
 *   jobs_at, programs_at, members: of each request (number, first flag, one after the last))
 *   resolve: (jobs_at, programs_at, programs) or None; probe: (jobs_at, blocks_at, blocks, ids) or None */
#include "_native_batch.h"

void free_batch(batch *b) { PyMem_Free(b->requests), PyMem_Free(b->groups); }

int take_measured(PyObject *kinds, PyObject *sizes, asked *a) {
    if (!PyBytes_Check(kinds) || !PyBytes_Check(sizes)) return 0;
    const kind *k = (const void *)PyBytes_AsString(kinds);
    const measured *m = (const void *)PyBytes_AsString(sizes);
    int64_t of_kinds = PyBytes_Size(kinds) / (int64_t)sizeof(kind);
    int64_t bytes = PyBytes_Size(sizes) - (int64_t)sizeof(measured), count = bytes / (int64_t)sizeof(place);
    *a = (asked){k, m, (const void *)(m + 1), count, {NULL, NULL}, {-1, -1}};
    return bytes >= 0 && bytes % (int64_t)sizeof(place) == 0 && are_sound(k, of_kinds, a->places, count);
}

static int take_request(PyObject *tuple, asked *a) {
    if (PyTuple_Check(tuple) && PyTuple_Size(tuple) >= 4
        && take_measured(PyTuple_GetItem(tuple, 0), PyTuple_GetItem(tuple, 1), a)) {
        a->alike[0] = PyTuple_GetItem(tuple, 2), a->alike[1] = PyTuple_GetItem(tuple, 3);
        return 1;
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

int take_batch(PyObject *list, batch *b) {
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
        int64_t inputs = 0, outputs = 0, scratch = 0, rows = 0, located = 0, jobs = 0, stay_bytes = 0;
        for (int wanted = 1; wanted >= 0; wanted--) { /* outputs that stay on the device come first */
            for (int64_t i = 0; i < b.count; i++)
                if (is_true(args[2], i) == wanted)
                    to[i].outputs = outputs, outputs += b.requests[i].sizes->out_bytes;
            if (wanted) stay_bytes = outputs;
        }
        for (int64_t i = 0; i < b.count; i++) {
            const measured *m = b.requests[i].sizes;
            to[i].inputs = inputs, to[i].scratch = scratch, to[i].rows = rows, to[i].locations = 4 * located;
            inputs += aligned(m->in_bytes, OUT_ALIGNMENT) + (args[1] == Py_None ? 0
                                                : PyLong_AsLongLong(PyList_GetItem(args[1], i)));
            scratch += m->scratch, rows += m->rows_bytes, located += m->cached_ids, jobs += m->pooled_jobs + m->unpooled_jobs;
        }
        int64_t programs_at = b.resolve_at + b.resolved * (int64_t)sizeof(resolve),
            blocks_at = b.probe_at + b.cached * (int64_t)sizeof(probe);
        if (!PyErr_Occurred())
            result = Py_BuildValue(
                "OLLLLLLLLNNN", bases, (long long)stay_bytes, (long long)inputs, (long long)outputs,
                    (long long)scratch, (long long)rows, (long long)jobs,
                (long long)b.resolved, (long long)b.header_bytes, launches_of(&b),
                none_or(b.resolved > 0, Py_BuildValue("LLL", (long long)b.resolve_at, (long long)programs_at,
                                                      (long long)b.resolve_programs)),
                none_or(b.cached > 0, Py_BuildValue("LLLL", (long long)b.probe_at, (long long)blocks_at,
                                                    (long long)b.probe_blocks, (long long)b.cached_ids)));
        Py_DECREF(bases);
    }
    free_batch(&b);
    return result;
}
