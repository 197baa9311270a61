/* Bags as lookups take them: lengths from integer lengths or offsets, and places of features with adjacent
 * bags (see `_native.pyi`). */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include "_bags.h"
#include "_native_bags.h"

static int numbers(PyObject *const *args, int n, int64_t *values) {
    for (int i = 0; i < n; i++) {
        values[i] = PyLong_AsLongLong(args[i]);
        if (values[i] == -1 && PyErr_Occurred()) return 0;
    }
    return 1;
}

/* Whether `count` items of `size` bytes lie in a buffer at `at`; else sets ValueError. Nothing wraps. */
static int lie_in(const Py_buffer *b, int64_t at, int64_t count, int64_t size) {
    int64_t bytes, end;
    if (at >= 0 && count >= 0 && !__builtin_mul_overflow(count, size, &bytes)
        && !__builtin_add_overflow(at, bytes, &end)
        && end <= b->len)
        return 1;
    PyErr_Format(PyExc_ValueError, "%lld x %lld bytes at %lld do not lie in a buffer of %zd",
                 (long long)count, (long long)size, (long long)at, b->len);
    return 0;
}

PyObject *py_lengths_of(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    int64_t v[5];
    Py_buffer memory;
    PyObject *made = NULL, *result = NULL;
    if (n != 6) return PyErr_Format(PyExc_TypeError, "lengths_of takes 6 arguments, got %zd", n);
    if (!numbers(args + 1, 5, v)) return NULL;
    const int64_t at = v[0], bytes = v[1], items = v[2], ids = v[3], form = v[4];
    if ((bytes != 4 && bytes != 8) || ids < 0 || form < FORM_LENGTHS || form > FORM_ENDS
        || items < (form == FORM_ENDS))
        return PyErr_Format(PyExc_ValueError,
                            "%lld items of %lld bytes for %lld ids, or the form %lld, are out of range",
                            (long long)items, (long long)bytes, (long long)ids, (long long)form);
    if (PyObject_GetBuffer(args[0], &memory, PyBUF_SIMPLE)) return NULL;
    if (lie_in(&memory, at, items, bytes)
        && (made = PyBytes_FromStringAndSize(NULL, bags_told(items, (int)form) * 4))) {
        int32_t *lengths = (int32_t *)(void *)PyBytes_AsString(made);
        if (write_lengths((const uint8_t *)memory.buf + at, (int)bytes, items, ids, (int)form, lengths))
            result = Py_BuildValue("OL", made, (long long)(intptr_t)lengths);
        else result = Py_NewRef(Py_None);
    }
    Py_XDECREF(made);
    PyBuffer_Release(&memory);
    return result;
}

PyObject *py_parts_of(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    int64_t v[4], items = 0, largest;
    Py_buffer memory;
    PyObject *made = NULL;
    if (n != 5) return PyErr_Format(PyExc_TypeError, "parts_of takes 5 arguments, got %zd", n);
    if (!numbers(args + 1, 4, v)) return NULL;
    const int64_t at = v[0], features = v[1], bags = v[2], ids = v[3];
    if (features < 1 || bags < 0 || ids < 0 || __builtin_mul_overflow(features, bags, &items)
        || __builtin_mul_overflow(features, 16, &largest))
        return PyErr_Format(PyExc_ValueError, "%lld features of %lld bags and %lld ids are out of range",
                            (long long)features, (long long)bags, (long long)ids);
    if (PyObject_GetBuffer(args[0], &memory, PyBUF_SIMPLE)) return NULL;
    if (!lie_in(&memory, at, items, 4) || !(made = PyBytes_FromStringAndSize(NULL, features * 16))) goto done;
    if (!write_parts((const uint8_t *)memory.buf + at, features, bags, ids,
                     (int64_t *)(void *)PyBytes_AsString(made))) {
        Py_DECREF(made);
        made = Py_NewRef(Py_None);
    }
done:
    PyBuffer_Release(&memory);
    return made;
}

/* a + b * c, which wraps: what is no address in the end lies in no buffer, and `run` refuses it. */
static int64_t from_base(int64_t a, int64_t b, int64_t c) {
    return (int64_t)((uint64_t)a + (uint64_t)b * (uint64_t)c);
}

/* order: index of each lookup's feature, or null: the same order. 0: ValueError is set. */
static int write_places(place *to, const uint8_t *parts, int64_t features, PyObject *order,
                        const uint8_t *columns, int64_t lookups, const int64_t *v) {
    const int64_t ids_at = v[0], lengths_at = v[1], bags = v[2], weights_at = v[3], out_at = v[4], step = v[5];
    for (int64_t k = 0; k < lookups; k++) {
        int64_t f = order ? PyLong_AsLongLong(PyList_GetItem(order, k)) : k;
        if (f < 0 || f >= features) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "there is no feature %lld of %lld", (long long)f,
                             (long long)features);
            return 0;
        }
        const int64_t start = load_i64(parts + 8 * f);
        to[k] = (place){.kind = k, .ids_at = from_base(ids_at, start, 8), .ids = load_i64(parts + 8 * (features + f)),
                        .lengths_at = from_base(lengths_at, from_base(0, bags, 4), f), .bags = bags,
                        .weights_at = weights_at < 0 ? -1 : from_base(weights_at, start, 4),
                        .out_at = bags ? from_base(out_at, load_i64(columns + 8 * k), 1) : 0,
                        .out_row_bytes = step, .found_at = -1};
    }
    return 1;
}

PyObject *py_feature_places(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    int64_t v[6];
    Py_buffer parts, columns;
    PyObject *made = NULL;
    if (n != 9) return PyErr_Format(PyExc_TypeError, "feature_places takes 9 arguments, got %zd", n);
    PyObject *order = args[1] == Py_None ? NULL : args[1];
    if (order && !PyList_Check(order))
        return PyErr_Format(PyExc_TypeError, "order is %R; expected a list of int, or None", order);
    if (!numbers(args + 3, 6, v)) return NULL;
    if (PyObject_GetBuffer(args[0], &parts, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[2], &columns, PyBUF_SIMPLE)) {
        PyBuffer_Release(&parts);
        return NULL;
    }
    const int64_t features = parts.len / 16, lookups = columns.len / 8;
    if ((order ? PyList_Size(order) : features) != lookups)
        PyErr_Format(PyExc_ValueError, "%lld features for %lld lookups",
                     (long long)(order ? PyList_Size(order) : features), (long long)lookups);
    else if ((made = PyBytes_FromStringAndSize(NULL, lookups * (int64_t)sizeof(place)))
             && !write_places((place *)(void *)PyBytes_AsString(made), parts.buf, features, order,
                              columns.buf, lookups, v)) {
        Py_DECREF(made);
        made = NULL;
    }
    PyBuffer_Release(&parts), PyBuffer_Release(&columns);
    return made;
}
