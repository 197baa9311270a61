/* Bags as lookups take them (`_native_bags.c`), and tensors where they lie (`_native_tensors.c`). */
#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

PyObject *py_lengths_of(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_parts_of(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_feature_places(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_tensor_places(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_device_places(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_tensor_parts(PyObject *self, PyObject *const *args, Py_ssize_t n);
