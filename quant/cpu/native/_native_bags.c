/* Bags as lookups take them: lengths from integer lengths or offsets, and places of features with adjacent
 * bags (see `_native.pyi`). */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include "_arguments.h"
#include "_bags.h"

PyObject *py_lengths_of(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments a;
    PyObject *made = NULL, *result = NULL;
    if (!take_arguments("lengths_of", "biiiii", args, n, &a)) return NULL;
    const int64_t at = a.n[0], bytes = a.n[1], items = a.n[2], ids = a.n[3], form = a.n[4];
    if ((bytes != 4 && bytes != 8) || ids < 0 || form < FORM_LENGTHS || form > FORM_ENDS
        || items < (form == FORM_ENDS))
        PyErr_Format(PyExc_ValueError, "%lld items of %lld bytes for %lld ids, or the form %lld, are out of range",
                     (long long)items, (long long)bytes, (long long)ids, (long long)form);
    else if (check_lies_in("lengths", a.b, at, items, bytes, bytes)
             && (made = PyBytes_FromStringAndSize(NULL, bags_told(items, (int)form) * 4))) {
        int32_t *lengths = (int32_t *)(void *)PyBytes_AsString(made);
        if (write_lengths((const uint8_t *)a.b->buf + at, (int)bytes, items, ids, (int)form, lengths))
            result = Py_BuildValue("OL", made, (long long)(intptr_t)lengths);
        else result = Py_NewRef(Py_None);
    }
    Py_XDECREF(made);
    release(&a);
    return result;
}

PyObject *py_parts_of(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments a;
    int64_t items = 0, largest;
    PyObject *made = NULL;
    if (!take_arguments("parts_of", "biiii", args, n, &a)) return NULL;
    const int64_t at = a.n[0], features = a.n[1], bags = a.n[2], ids = a.n[3];
    if (features < 1 || bags < 0 || ids < 0 || __builtin_mul_overflow(features, bags, &items)
        || __builtin_mul_overflow(features, 16, &largest))
        PyErr_Format(PyExc_ValueError, "%lld features of %lld bags and %lld ids are out of range",
                     (long long)features, (long long)bags, (long long)ids);
    else if (check_lies_in("lengths", a.b, at, items, 4, 4) && (made = PyBytes_FromStringAndSize(NULL, features * 16))
             && !write_parts((const uint8_t *)a.b->buf + at, features, bags, ids,
                             (int64_t *)(void *)PyBytes_AsString(made))) {
        Py_DECREF(made);
        made = Py_NewRef(Py_None);
    }
    release(&a);
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
    arguments a;
    PyObject *made = NULL;
    if (!take_arguments("feature_places", "b.biiiiii", args, n, &a)) return NULL;
    PyObject *order = args[1] == Py_None ? NULL : args[1];
    const int64_t features = a.b[0].len / 16, lookups = a.b[1].len / 8;
    if (order && !PyList_Check(order))
        PyErr_Format(PyExc_TypeError, "order is %R; expected a list of int, or None", order);
    else if ((order ? PyList_Size(order) : features) != lookups)
        PyErr_Format(PyExc_ValueError, "%lld features for %lld lookups",
                     (long long)(order ? PyList_Size(order) : features), (long long)lookups);
    else if ((made = PyBytes_FromStringAndSize(NULL, lookups * (int64_t)sizeof(place)))
             && !write_places((place *)(void *)PyBytes_AsString(made), a.b[0].buf, features, order,
                              a.b[1].buf, lookups, a.n)) {
        Py_DECREF(made);
        made = NULL;
    }
    release(&a);
    return made;
}
