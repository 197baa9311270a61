/* What builds id indexes (`_native_index.c`), and what finds the rows of overlays (`_native_overlay.c`). */
#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

PyObject *py_count_buckets(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_put_in_buckets(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_distinct(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_build(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_find_rows(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_fill_filter(PyObject *self, PyObject *args);
PyObject *py_fill_marks(PyObject *self, PyObject *args);
