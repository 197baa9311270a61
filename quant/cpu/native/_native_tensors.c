/* Places of lookups over tensors (see `_native.pyi`), read through DLPack's exchange table, ten times
 * faster than by Python attributes and without torch's headers. Wrong tensors raise nothing; ValueError,
 * TypeError: other arguments are wrong; errors of `new` pass through. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include "_bags.h"

/* DLTensor and DLPackExchangeAPI of dlpack.h 1.3; later minor versions keep them. */
enum { DL_VERSION = 1, DL_CPU = 1, DL_INT = 0 };
typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides; /* in items; null strides: contiguous */
    uint64_t byte_offset;
} tensor;
typedef struct {
    uint32_t major, minor;
    void *previous, *allocate, *from_object, *to_object;
    /* 0, or -1 with a Python error set; the tensor keeps what `to` points to */
    int (*read)(void *object, tensor *to);
    void *stream;
} exchange;

/* Whether this is a contiguous tensor of signed integers of 32 or 64 bits on a device; items: how many. */
static int reads_integers_on(const exchange *with, PyObject *object, int32_t device_type, int32_t device_id,
                             tensor *t, int64_t *items) {
    if (with->read(object, t)) {
        PyErr_Clear(); /* the caller looks at the tensor again, and says what is wrong */
        return 0;
    }
    if (t->device_type != device_type || t->device_id != device_id || t->code != DL_INT
        || (t->bits != 64 && t->bits != 32) || t->lanes != 1)
        return 0;
    int64_t count = 1;
    int is_contiguous = 1;
    for (int32_t d = t->ndim - 1; d >= 0; d--) {
        is_contiguous &= !t->strides || t->shape[d] == 1 || t->strides[d] == count;
        if (__builtin_mul_overflow(count, t->shape[d], &count)) return 0;
    }
    *items = count;
    return (is_contiguous || !count) && (t->data || !count);
}

static int reads_integers(const exchange *with, PyObject *object, tensor *t, int64_t *items) {
    return reads_integers_on(with, object, DL_CPU, 0, t, items);
}

static int64_t address_of(const tensor *t, int64_t items, int64_t base) {
    return items ? (int64_t)((intptr_t)t->data + (intptr_t)t->byte_offset) - base : 0;
}

/* The vectors of one lookup: `new` of what the ids' shape says, and dim. */
static PyObject *new_vectors(PyObject *new, const tensor *ids, int form, int64_t bags, PyObject *dim) {
    const int32_t ndim = form == FORM_IDS ? ids->ndim : 1;
    PyObject *shape = PyTuple_New(ndim + 1), *made = NULL;
    int has_all = shape != NULL;
    for (int32_t d = 0; has_all && d < ndim; d++) {
        PyObject *size = PyLong_FromLongLong(form == FORM_IDS ? ids->shape[d] : bags);
        has_all = size && !PyTuple_SetItem(shape, d, size);
    }
    if (has_all && !PyTuple_SetItem(shape, ndim, Py_NewRef(dim))) made = PyObject_Call(new, shape, NULL);
    Py_XDECREF(shape);
    return made;
}

/* Address of usable lengths: the tensor's, or int32 ones made in `held`. 0: wrong form or sum, or (with an
 * error set) no memory. */
static int place_bags(const exchange *with, PyObject *told, int form, int64_t base, PyObject *held,
                      place *to) {
    tensor t;
    int64_t items;
    if (!reads_integers(with, told, &t, &items) || t.ndim != 1 || items < (form == FORM_ENDS)) return 0;
    to->bags = bags_told(items, form);
    if (form == FORM_LENGTHS && t.bits == 32) {
        to->lengths_at = address_of(&t, items, base);
        return 1;
    }
    const uint8_t *from = (const uint8_t *)t.data + t.byte_offset;
    if (form == FORM_OFFSETS && items == 1 && to->ids <= INT32_MAX && !item_of(from, 0, t.bits / 8)) {
        to->bag_length = to->ids;
        return 1;
    }
    PyObject *made = PyBytes_FromStringAndSize(NULL, to->bags * 4);
    if (!made) return 0;
    int32_t *lengths = (int32_t *)(void *)PyBytes_AsString(made);
    int are_good = write_lengths(from, t.bits / 8, items, to->ids, form, lengths)
        && !PyList_Append(held, made);
    to->lengths_at = (int64_t)(intptr_t)lengths - base;
    Py_DECREF(made);
    return are_good;
}

/* One feature's input, without weights. bags: null: it has none. */
typedef struct {
    int form;
    PyObject *ids, *bags;
} feature_input;

/* form: of each tuple in a caller's dict, or -1: the input is (form, ids, bags, weights). named: the type of
 * tuples (ids, offsets, lengths, weights) there. */
typedef struct {
    int form;
    PyObject *named;
} dict_forms;

/* 0: another input. */
static int read_input(PyObject *given, dict_forms of, feature_input *to) {
    const int told = of.form;
    if (told >= 0 && (PyObject *)Py_TYPE(given) == of.named) {
        PyObject *offsets = PyTuple_GetItem(given, 1), *lengths = PyTuple_GetItem(given, 2);
        if (told == FORM_IDS || (offsets == Py_None) == (lengths == Py_None)
            || PyTuple_GetItem(given, 3) != Py_None)
            return 0;
        *to = lengths == Py_None ? (feature_input){told, PyTuple_GetItem(given, 0), offsets}
                                 : (feature_input){FORM_LENGTHS, PyTuple_GetItem(given, 0), lengths};
        return 1;
    }
    if (told >= 0) {
        *to = (feature_input){told == FORM_IDS ? FORM_IDS : FORM_FIXED, given, NULL};
        if (!PyTuple_CheckExact(given)) return 1;
        if (told == FORM_IDS || PyTuple_Size(given) != 2) return 0;
        *to = (feature_input){told, PyTuple_GetItem(given, 0), PyTuple_GetItem(given, 1)};
        return 1;
    }
    if (!PyTuple_Check(given) || PyTuple_Size(given) != 4 || PyTuple_GetItem(given, 3) != Py_None) return 0;
    const long form = PyLong_AsLong(PyTuple_GetItem(given, 0));
    PyObject *bags = PyTuple_GetItem(given, 2);
    if (form < FORM_IDS || form > FORM_ENDS || (bags == Py_None) != (form < FORM_LENGTHS)) return 0;
    *to = (feature_input){(int)form, PyTuple_GetItem(given, 1), bags};
    return 1;
}

/* The place of one input, and its vectors. 0: wrong form, or an error is set. */
static int place_one(const exchange *with, PyObject *given, dict_forms of, PyObject *dim, PyObject *new,
                     int64_t base, PyObject *outputs, PyObject *held, place *to) {
    tensor ids, out;
    feature_input input;
    if (!read_input(given, of, &input)) return 0;
    const int form = input.form;
    *to = (place){.lengths_at = -1, .weights_at = -1, .found_at = -1};
    if (!reads_integers(with, input.ids, &ids, &to->ids) || ids.bits != 64) return 0;
    to->ids_at = address_of(&ids, to->ids, base);
    to->bags = to->ids;
    if (form == FORM_FIXED) {
        if (ids.ndim != 2) return 0;
        to->bags = ids.shape[0], to->bag_length = ids.shape[1];
    } else if (form != FORM_IDS && (ids.ndim != 1 || !place_bags(with, input.bags, form, base, held, to)))
        return 0;
    PyObject *vectors = new_vectors(new, &ids, form, to->bags, dim);
    if (!vectors) return 0;
    const int is_read = !with->read(vectors, &out) && !PyList_Append(outputs, vectors);
    to->out_at = is_read ? address_of(&out, to->bags, base) : 0;
    Py_DECREF(vectors);
    return is_read;
}

PyObject *py_tensor_places(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 7) return PyErr_Format(PyExc_TypeError, "tensor_places takes 7 arguments, got %zd", n);
    if (args[0] == Py_None) Py_RETURN_NONE;
    PyObject *given = args[1], *dims = args[2];
    const exchange *with = PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
    const int64_t base = PyLong_AsLongLong(args[4]);
    const dict_forms of = {(int)PyLong_AsLong(args[5]), args[6]};
    if (!with || PyErr_Occurred()) return NULL;
    const Py_ssize_t count = PyTuple_Size(dims), lookups = PySequence_Size(given);
    if (count < 0 || lookups < 0) return NULL;
    if (with->major != DL_VERSION || !with->read || lookups != count) Py_RETURN_NONE;
    PyObject *result = NULL, *outputs = PyList_New(0), *held = PyList_New(0);
    PyObject *places = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(place));
    Py_ssize_t placed = 0;
    if (outputs && held && places) {
        place *to = (place *)(void *)PyBytes_AsString(places);
        for (int is_placed = 1; is_placed && placed < count; placed += is_placed) {
            PyObject *one = PySequence_GetItem(given, placed);
            is_placed = one && place_one(with, one, of, PyTuple_GetItem(dims, placed), args[3], base,
                                         outputs, held, to + placed);
            Py_XDECREF(one);
            if (is_placed) to[placed].kind = placed;
        }
        if (placed == count) result = PyTuple_Pack(3, places, outputs, held);
        else if (!PyErr_Occurred()) result = Py_NewRef(Py_None);
    }
    Py_XDECREF(outputs), Py_XDECREF(held), Py_XDECREF(places);
    return result;
}

/* A feature's tensors on a device, as kernels take them. */
typedef struct { int64_t ids_at, offsets_at, weights_at, asked_at, ids; } device_place;
typedef struct { int64_t offset_bytes, offsets, bag_length, vectors, is_weighted; } device_shape;

/* What one input has on a device. 0: kernels cannot take it as it is. */
static int place_on_device(const exchange *with, PyObject *given, dict_forms of, int32_t type, int32_t id,
                           device_place *to, device_shape *shape) {
    tensor ids, bags;
    feature_input input;
    int64_t items;
    if (!read_input(given, of, &input) || input.form == FORM_LENGTHS) return 0;
    if (!reads_integers_on(with, input.ids, type, id, &ids, &items) || ids.bits != 64 || items > INT32_MAX)
        return 0;
    const int64_t ids_at = address_of(&ids, items, 0);
    *to = (device_place){ids_at, -1, -1, ids_at, items};
    *shape = (device_shape){.vectors = items};
    if (input.form == FORM_IDS) return 1;
    if (input.form == FORM_FIXED) {
        if (ids.ndim != 2) return 0;
        shape->vectors = ids.shape[0], shape->bag_length = ids.shape[1];
        return 1;
    }
    if (ids.ndim != 1 || !reads_integers_on(with, input.bags, type, id, &bags, &items) || bags.ndim != 1)
        return 0;
    to->offsets_at = address_of(&bags, items, 0);
    shape->offset_bytes = bags.bits / 8, shape->offsets = items, shape->vectors = bags_told(items, input.form);
    return shape->vectors > 0 || (!shape->vectors && !to->ids);
}

PyObject *py_device_places(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 6) return PyErr_Format(PyExc_TypeError, "device_places takes 6 arguments, got %zd", n);
    if (args[0] == Py_None) Py_RETURN_NONE;
    const exchange *with = PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
    const long type = PyLong_AsLong(args[2]), id = PyLong_AsLong(args[3]);
    const dict_forms of = {(int)PyLong_AsLong(args[4]), args[5]};
    const Py_ssize_t count = PySequence_Size(args[1]);
    if (!with || PyErr_Occurred()) return NULL;
    if (with->major != DL_VERSION || !with->read) Py_RETURN_NONE;
    PyObject *places = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(device_place));
    PyObject *shapes = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(device_shape)), *result = NULL;
    Py_ssize_t placed = 0;
    int64_t ids = 0;
    for (int is_placed = places && shapes; is_placed && placed < count; placed += is_placed) {
        device_place *place = (device_place *)(void *)PyBytes_AsString(places) + placed;
        PyObject *one = PySequence_GetItem(args[1], placed);
        is_placed = one && place_on_device(with, one, of, (int32_t)type, (int32_t)id, place,
                                           (device_shape *)(void *)PyBytes_AsString(shapes) + placed);
        if (is_placed) ids += place->ids;
        Py_XDECREF(one);
    }
    if (!PyErr_Occurred())
        result = placed == count ? Py_BuildValue("OOL", places, shapes, (long long)ids) : Py_NewRef(Py_None);
    Py_XDECREF(places), Py_XDECREF(shapes);
    return result;
}

/* int32 lengths: the tensor's own, with `holder` the tensor, or converted ones. 0: wrong lengths, or an
 * error is set. holder: gets a reference. */
static int find_lengths(const tensor *t, int64_t items, int64_t ids, PyObject *object, PyObject **holder,
                        const uint8_t **lengths) {
    *lengths = (const uint8_t *)t->data + t->byte_offset; /* of no items it may be null */
    if (t->bits == 32) {
        *holder = Py_NewRef(object);
        return 1;
    }
    if (!(*holder = PyBytes_FromStringAndSize(NULL, items * 4))) return 0;
    int32_t *made = (int32_t *)(void *)PyBytes_AsString(*holder);
    const int are_good = write_lengths(*lengths, 8, items, ids, FORM_LENGTHS, made);
    *lengths = (const uint8_t *)made;
    return are_good;
}

PyObject *py_tensor_parts(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    tensor ids, told;
    int64_t count, items;
    if (n != 5) return PyErr_Format(PyExc_TypeError, "tensor_parts takes 5 arguments, got %zd", n);
    if (args[0] == Py_None) Py_RETURN_NONE;
    const exchange *with = PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
    const int64_t features = PyLong_AsLongLong(args[3]), base = PyLong_AsLongLong(args[4]);
    if (!with || PyErr_Occurred()) return NULL;
    if (with->major != DL_VERSION || !with->read || features < 1 || features > INT32_MAX
        || !reads_integers(with, args[1], &ids, &count)
        || ids.bits != 64 || !reads_integers(with, args[2], &told, &items) || told.ndim != 1
            || items % features)
        Py_RETURN_NONE;
    PyObject *holder = NULL, *result = NULL, *parts = PyBytes_FromStringAndSize(NULL, features * 16);
    const uint8_t *lengths;
    if (parts && find_lengths(&told, items, count, args[2], &holder, &lengths)
        && write_parts(lengths, features, items / features, count,
                       (int64_t *)(void *)PyBytes_AsString(parts)))
        result = Py_BuildValue("OLLLO", holder, (long long)address_of(&ids, count, base),
                               (long long)(items ? (int64_t)(intptr_t)lengths - base : 0),
                                   (long long)(items / features), parts);
    else if (!PyErr_Occurred()) result = Py_NewRef(Py_None);
    Py_XDECREF(holder), Py_XDECREF(parts);
    return result;
}
