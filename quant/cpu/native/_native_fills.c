/* Jobs that fill the matrices of what follows a batch (quant/gpu/batch/follower.py).
 * size_fills(taken, block): taken: of each request None, or (sources, rows); sources: int64 [matrices, fields of
 *   MatrixPlace]; block: values of a program
 *   -> (jobs, programs, input_bytes, tensors): bytes that each request's tensors take where they are staged, each at
 *   a multiple of 16, and of each tensor (request, its byte in the inputs, its byte among these, its bytes)
 * write_fills(taken, block, jobs, programs, target): taken: (sources, moves, targets, rows, precision, inputs,
 *   outputs) each; moves: None, or those by which outputs are brought together, int64 [moves, fields of Move], which are staged as their
 *   sources say; targets: int64 [matrices], addresses; inputs: the address where tensors are staged; outputs: that of
 *   staged outputs, 0: there are none, and zeros are written
 *   target: for int64 [jobs, fields of FillField], then int32 [programs], the job of each */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include "_arguments.h"
#include "_layout.h"

typedef struct { MATRIX_FIELDS(MEMBER) } matrix;
typedef struct { FILL_FIELDS(MEMBER) } fill;
enum { STAGED_ALIGNMENT = 16 };

static int64_t staged_bytes(int64_t values) { return aligned(4 * values, STAGED_ALIGNMENT); }

/* Reads a request's matrices; 0: an error is set, and nothing is held. */
static int take_matrices(PyObject *sources, Py_buffer *to, int64_t rows, int64_t block) {
    if (PyObject_GetBuffer(sources, to, PyBUF_SIMPLE)) return 0;
    const matrix *m = to->buf;
    int is_right = to->len % (Py_ssize_t)sizeof(matrix) == 0 && (uintptr_t)m % 8 == 0 && rows >= 0 && block > 0;
    for (int64_t k = 0; is_right && k < to->len / (Py_ssize_t)sizeof(matrix); k++)
        is_right = m[k].width >= 0 && (!m[k].width || rows <= INT64_MAX / 64 / m[k].width) && m[k].at >= 0;
    if (is_right) return 1;
    PyBuffer_Release(to);
    PyErr_SetString(PyExc_ValueError, "these are no matrices, or no rows and values of a program");
    return 0;
}

static int add_item(PyObject *list, PyObject *made) {
    const int failed = !made || PyList_Append(list, made);
    Py_XDECREF(made);
    return !failed;
}

PyObject *py_size_fills(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments a;
    (void)self;
    if (!take_arguments("size_fills", "-i", args, n, &a)) return NULL;
    const int64_t block = a.n[0];
    int64_t jobs = 0, programs = 0;
    PyObject *bytes = PyList_New(0), *tensors = PyList_New(0);
    int is_right = bytes && tensors;
    const Py_ssize_t requests = is_right ? PyList_Size(args[0]) : -1;
    for (Py_ssize_t i = 0; is_right && i < requests; i++) {
        PyObject *one = PyList_GetItem(args[0], i), *sources;
        Py_buffer held;
        long long rows;
        int64_t staged = 0;
        if (one != Py_None) {
            is_right = PyArg_ParseTuple(one, "OL", &sources, &rows) && take_matrices(sources, &held, rows, block);
            if (!is_right) break;
            const matrix *m = held.buf;
            const int64_t count = held.len / (Py_ssize_t)sizeof(matrix);
            for (int64_t k = 0; is_right && k < count; k++) {
                const int64_t values = rows * m[k].width;
                programs += ceil_div(values, block);
                if (m[k].is_output) continue;
                is_right = add_item(tensors, Py_BuildValue("nLLL", i, (long long)m[k].at, (long long)staged,
                                                           (long long)(4 * values)));
                staged += staged_bytes(values);
            }
            jobs += count;
            PyBuffer_Release(&held);
        }
        is_right = is_right && add_item(bytes, PyLong_FromLongLong(staged));
    }
    if (is_right && requests >= 0) return Py_BuildValue("LLNN", (long long)jobs, (long long)programs, bytes, tensors);
    Py_XDECREF(bytes), Py_XDECREF(tensors);
    return NULL;
}

/* Where a vector of the outputs is staged. last: of the moves, the one that was found before. */
static int64_t staged_at(const move *moves, int64_t count, int64_t at, int64_t *last) {
    int64_t best = -1;
    for (int64_t k = *last + 1; best < 0 && k < count; k++)
        if (moves[k].target == at) best = k;
    for (int64_t k = 0; best < 0 && k <= *last; k++)
        if (moves[k].target == at) best = k;
    if (best < 0)
        for (int64_t k = 0; k < count; k++)
            if (best < 0 || (moves[k].target <= at && (moves[k].target > moves[best].target || moves[best].target > at)))
                best = k;
    if (best < 0) return 0; /* no vector has a value */
    *last = best;
    return at - moves[best].target + moves[best].source;
}

typedef struct { fill *jobs; int32_t *programs; int64_t job, program, most_jobs, most_programs; } filling;

static int write_one(PyObject *one, int64_t block, filling *to) {
    PyObject *sources, *moves, *targets;
    long long rows, precision, inputs, outputs;
    arguments a;
    Py_buffer held;
    if (!PyArg_ParseTuple(one, "OOOLLLL", &sources, &moves, &targets, &rows, &precision, &inputs, &outputs)
        || !take_matrices(sources, &held, rows, block))
        return 0;
    PyObject *both[] = {moves, targets};
    if (!take_arguments("write_fills", "ob", both, 2, &a)) return PyBuffer_Release(&held), 0;
    const matrix *m = held.buf;
    const int64_t count = held.len / (Py_ssize_t)sizeof(matrix), *of_targets = a.b[1].buf;
    int64_t staged = inputs, last = -1, is_right = a.b[1].len == 8 * count && count <= to->most_jobs - to->job;
    for (int64_t k = 0; is_right && k < count; k++) {
        const int64_t values = rows * m[k].width;
        fill *job = to->jobs + to->job;
        *job = (fill){.is_half = m[k].is_half, .values = values, .width = m[k].width, .target = of_targets[k],
                      .first_program = to->program, .precision = precision};
        /* vectors that the host brings together lie one after another here */
        job->step = moves == Py_None ? m[k].row_bytes / (m[k].is_half ? 2 : 4) : m[k].width;
        if (!m[k].is_output) job->source = staged, staged += staged_bytes(values);
        else if (outputs)
            job->source = outputs + (moves == Py_None ? m[k].at
                                     : staged_at(a.b[0].buf, a.b[0].len / (Py_ssize_t)sizeof(move), m[k].at, &last));
        const int64_t programs = ceil_div(values, block);
        is_right = programs <= to->most_programs - to->program;
        for (int64_t p = 0; is_right && p < programs; p++) to->programs[to->program++] = (int32_t)to->job;
        to->job++;
    }
    PyBuffer_Release(&held), release(&a);
    if (!is_right) PyErr_SetString(PyExc_ValueError, "write_fills: there are not as many targets, or too little room");
    return (int)is_right;
}

PyObject *py_write_fills(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments a;
    (void)self;
    if (!take_arguments("write_fills", "-iiiw", args, n, &a)) return NULL;
    const int64_t jobs = a.n[1], programs = a.n[2];
    filling to = {.jobs = a.b[0].buf, .most_jobs = jobs, .most_programs = programs};
    int is_right = jobs >= 0 && programs >= 0 && (uintptr_t)to.jobs % 8 == 0 && jobs <= a.b[0].len / (int64_t)sizeof(fill)
                   && programs <= (a.b[0].len - jobs * (int64_t)sizeof(fill)) / 4;
    if (!is_right) PyErr_SetString(PyExc_ValueError, "write_fills: the jobs do not fit where they are to be written");
    to.programs = is_right ? (int32_t *)(void *)(to.jobs + jobs) : NULL;
    const Py_ssize_t requests = is_right ? PyList_Size(args[0]) : -1;
    for (Py_ssize_t i = 0; is_right && i < requests; i++) is_right = write_one(PyList_GetItem(args[0], i), a.n[0], &to);
    release(&a);
    if (!is_right || requests < 0) return NULL;
    Py_RETURN_NONE;
}
