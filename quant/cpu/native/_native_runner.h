/* What runs lookups in this process: an instruction set's kernel, and how rows are prefetched. */
#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include "_rows.h"

void choose_kernel(void);
runner active_runner(void);

PyObject *py_isas(PyObject *self, PyObject *unused);
PyObject *py_use(PyObject *self, PyObject *name);
PyObject *py_prefetches(PyObject *self, PyObject *unused);
PyObject *py_prefetch(PyObject *self, PyObject *name);
