/* What the builders of id indexes share (`_native_index.c`, `_native_pilots.c`), and other routines on buffers of ids. */
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

