/* Functions that build id indexes (`_native_index.c`, `_native_pilots.c`) and overlay filters
 * (`_native_overlay.c`), split ids by owner (`_native_split.c`), and sample uses (`_native_uses.c`). */
#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include "_arguments.h"

typedef struct { int64_t id, source; } record;

/* Finds a seed and pilots for a bucket of n ids; 1: found, 0: not found, -1: no memory. */
int build_bucket(const record *records, int64_t n, uint64_t slots, uint64_t *seed, uint8_t *pilots);

static inline PyObject *unsound(arguments *all, const char *what) {
    release(all);
    return PyErr_Format(PyExc_ValueError, "%s: the buffers do not belong together", what);
}

PyObject *py_count_buckets(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_put_in_buckets(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_distinct(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_build(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_place_rows(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_in_layers(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_count_rows(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_split_ids(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_sample_uses(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_fill_filter(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_fill_marks(PyObject *self, PyObject *const *args, Py_ssize_t n);
