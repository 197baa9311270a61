/* The arguments that Python gives, and names for it, for all extensions. */
#pragma once
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Buffers and integers of a call, each kind in its order. */
enum { MOST_ARGUMENTS = 9 };
typedef struct { Py_buffer b[MOST_ARGUMENTS]; int64_t n[MOST_ARGUMENTS]; int held; } arguments;

static inline void release(arguments *a) {
    while (a->held) PyBuffer_Release(&a->b[--a->held]);
}

/* Takes the arguments of a function. `kinds` says of each: i: an integer; b: a buffer; w: one that is written; o: a
 * buffer or None, which has no bytes; any other: the caller's. 0: an error is set, and nothing is held. */
static inline int take_arguments(const char *name, const char *kinds, PyObject *const *args, Py_ssize_t n,
                                 arguments *a) {
    const Py_ssize_t expected = (Py_ssize_t)strlen(kinds);
    int integers = 0, failed = 0;
    a->held = 0;
    if (n != expected)
        return PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, expected, n), 0;
    for (Py_ssize_t i = 0; i < n && !failed; i++) {
        const char kind = args[i] == Py_None && kinds[i] == 'o' ? 'n' : kinds[i];
        if (kind == 'i') {
            a->n[integers] = PyLong_AsLongLong(args[i]);
            failed = a->n[integers++] == -1 && PyErr_Occurred();
        } else if (kind == 'n') {
            a->b[a->held++] = (Py_buffer){0};
        } else if (kind == 'b' || kind == 'w' || kind == 'o') {
            failed = PyObject_GetBuffer(args[i], &a->b[a->held], kind == 'w' ? PyBUF_WRITABLE : PyBUF_SIMPLE);
            a->held += !failed;
        }
    }
    if (failed) release(a);
    return !failed;
}

/* Whether `rows` parts of `bytes` bytes, `step` from one to the next, lie in a buffer at `at`. Nothing wraps. */
static inline int lies_in(const Py_buffer *b, int64_t at, int64_t rows, int64_t step, int64_t bytes) {
    int64_t end;
    return at >= 0 && rows >= 0 && step >= 0 && bytes >= 0
           && !__builtin_mul_overflow(rows > 0 ? rows - 1 : 0, step, &end) && !__builtin_add_overflow(at, end, &end)
           && !__builtin_add_overflow(end, rows > 0 ? bytes : 0, &end) && end <= b->len;
}

/* The same; else it sets ValueError. */
static inline int check_lies_in(const char *what, const Py_buffer *b, int64_t at, int64_t rows, int64_t step,
                                int64_t bytes) {
    if (lies_in(b, at, rows, step, bytes)) return 1;
    PyErr_Format(PyExc_ValueError, "%s: %lld x %lld bytes, %lld apart, at %lld do not lie in a buffer of %zd", what,
                 (long long)rows, (long long)bytes, (long long)step, (long long)at, b->len);
    return 0;
}

/* Adds a tuple of names, which a null ends, to a module. 0: an error is set. */
static inline int add_names(PyObject *module, const char *as, const char *const *names) {
    Py_ssize_t count = 0;
    while (names[count]) count++;
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++) PyTuple_SetItem(tuple, i, PyUnicode_FromString(names[i]));
    const int is_added = tuple && !PyModule_AddObjectRef(module, as, tuple);
    Py_XDECREF(tuple);
    return is_added;
}
