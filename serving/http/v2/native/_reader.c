/* Reads infer requests of the Open Inference Protocol V2 (`_reader.h`), and those of /v1 in two steps.
 *
 * names(words, text) -> a version's names; words: int64 (`NAMES_FIELDS`, then what they count), text: strings
 * read(names, tail, body, header_bytes, gathered, on_device) -> None: `serving.http.v2.request` reads it; or
 *   where tensors lie in regions and `gathered` is None: (regions, input runs)
 *   else (places, sizes, answer, sent_bytes, inputs, offsets, scores, elsewhere, into, has_binary, regions, id,
 *   timeout_us):
 *   tail: bytes that end the response's JSON. gathered: all tensors but those in the JSON, in order, or None.
 *   on_device: a byte for each region, 1: its tensors were not gathered
 *   places: int64 [lookups, fields of Place]; sizes: (ids, vectors, bytes of rows read, output bytes)
 *   answer: the response's JSON, or, where an output is sent as JSON, a list of (name, at, bytes, shape,
 *   is half, kind, is binary, region or -1, offset) of each output that is sent
 *   sent_bytes: of the output buffer, from its begin on, to send behind it
 *   inputs: the input buffer, or None: `body`, or `gathered`
 *   offsets: (place in the output buffer, kjt.offsets), or None
 *   scores: (the scorer's inputs, int64 [inputs, fields of MatrixPlace]; where scores go; rows; whether only
 *   they are wanted), or None
 *   elsewhere, into: int64 [runs, 5] (region, offset, bytes, at, limit) of inputs that were not gathered, and
 *   of outputs that go to regions; has_binary: an output is sent as bytes
 *   regions: the names of those that the request names
 *   id: the request's, or None; timeout_us: its parameter `timeout`, 0: none
 * read_json(text, is_score) -> None: `serving.http.v1.request` reads it; else (read, model, version or None)
 * lay_out_json(read, names) -> None, or (places, sizes, inputs, bytes of inputs, scores, whether masks are
 *   wanted, a byte for each lookup, 1: its ids came as bags)
 * floats(values, is_half) -> values as a JSON list
 * use_vectors(most) -> which instruction set floats are written with (`begin_float_text`), for tests
 * vectors(names, places, outputs) -> a JSON object as a bytearray, from the name of each place's feature to the list
 *   of its vectors */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include "_arguments.h"
#include "_float_text.h"
#include "_reader.h"

static const char NAME[] = "tableside.names";
/* Bytes of a header, and of floats that are written, from which other threads of Python run meanwhile. Fewer floats
 * are written on the event loop, which would have to wait for its turn again. */
enum { LONG_TEXT = 1 << 16, LONG_VALUES = 1 << 18 };

static void destroy(PyObject *capsule) { free_names(PyCapsule_GetPointer(capsule, NAME)); }

static PyObject *py_names(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Py_buffer words, held;
    PyObject *capsule = NULL;
    if (n != 2) return PyErr_Format(PyExc_TypeError, "names takes 2 arguments, got %zd", n);
    if (PyObject_GetBuffer(args[0], &words, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[1], &held, PyBUF_SIMPLE)) {
        PyBuffer_Release(&words);
        return NULL;
    }
    names *made = words.len % 8 ? NULL : make_names(words.buf, words.len / 8, held.buf, held.len);
    if (!made) PyErr_SetString(PyExc_ValueError, "these words are not a version's names");
    else if (!(capsule = PyCapsule_New(made, NAME, destroy))) free_names(made);
    PyBuffer_Release(&words), PyBuffer_Release(&held);
    return capsule;
}

static void end_request(request *r) {
    free(r->scan.arena), free(r->regions), free(r->tensors), free(r->wanted), free(r->parts), free(r->places);
    free(r->outputs), free(r->sent), free(r->matrices), free(r->part_of), free(r->dense_at), free(r->dense_rows);
}

static PyObject *text_of(text t) { return PyUnicode_DecodeUTF8(t.p, t.n, "strict"); }

static PyObject *region_names(const request *r) {
    PyObject *made = PyTuple_New(r->region_count);
    for (int64_t k = 0; made && k < r->region_count; k++) {
        PyObject *name = text_of(r->regions[k]);
        if (!name || PyTuple_SetItem(made, k, name)) Py_CLEAR(made);
    }
    return made;
}

/* Where tensors lie in regions. */
static PyObject *runs_of(const request *r, int64_t (*find_runs)(const request *, run *), int64_t most) {
    run *runs = malloc(((size_t)most + 1) * sizeof(run));
    if (!runs) return PyErr_NoMemory();
    int64_t count = find_runs(r, runs);
    PyObject *made = PyBytes_FromStringAndSize((const char *)runs, count * (int64_t)sizeof(run));
    free(runs);
    return made;
}

static int64_t place_of(const request *r, enum what what) {
    for (int64_t k = 0; k < r->output_count; k++)
        if (r->outputs[k].what == what) return r->outputs[k].at;
    return -1;
}

/* Where each unpooled feature's part of kjt.sequences begins, and where the last one ends, in values. */
static PyObject *offsets_of(const request *r) {
    int64_t at = 0, count = 1, offsets_at = r->is_kjt ? place_of(r, OFFSETS) : -1;
    if (offsets_at < 0) Py_RETURN_NONE;
    for (int64_t k = 0; k < r->part_count; k++) count += !r->names->features[r->places[k].kind].is_pooled;
    PyObject *made = PyBytes_FromStringAndSize(NULL, 8 * count);
    if (!made) return NULL;
    char *to = PyBytes_AsString(made);
    memcpy(to, &at, 8);
    for (int64_t k = 0; k < r->part_count; k++) {
        const feature *f = r->names->features + r->places[k].kind;
        if (f->is_pooled) continue;
        at += r->places[k].ids * f->dim;
        memcpy(to += 8, &at, 8);
    }
    return Py_BuildValue("LN", (long long)offsets_at, made);
}

static PyObject *scores_of(const request *r) {
    if (!r->has_scores) Py_RETURN_NONE;
    return Py_BuildValue("y#LLO", (const char *)r->matrices,
                         (Py_ssize_t)(r->names->n.sources * (int64_t)sizeof(matrix)),
                         (long long)place_of(r, SCORES),
                         (long long)r->rows, r->scores_alone ? Py_True : Py_False);
}

/* The outputs that are sent, for a response that has some as JSON. */
static PyObject *described(const request *r) {
    static const char *const labels[] = {"", "kjt", "kjt.sequences", "kjt.offsets", "score", "kjt.found"};
    PyObject *list = PyList_New(0);
    for (int64_t k = 0; list && k < r->sent_count; k++) {
        const sent *s = r->sent + k;
        const output *o = r->outputs + s->output;
        int has_name = o->what == VECTORS || (o->what == MASK && !r->is_kjt);
        text of = has_name ? r->names->named[o->feature] : (text){labels[o->what], 0};
        if (!has_name) of.n = (int64_t)strlen(labels[o->what]);
        PyObject *name = text_of(of), *feature = name;
        if (name && has_name && o->what == MASK) name = PyUnicode_FromFormat("%U.found", feature);
        if (name != feature) Py_DECREF(feature);
        PyObject *shape = o->second < 0 ? Py_BuildValue("(L)", (long long)o->first)
            : Py_BuildValue("LL", (long long)o->first, (long long)o->second);
        PyObject *one = Py_BuildValue("NLLNiiiiL", name, (long long)o->at, (long long)o->bytes, shape, o->is_half,
                                      (int)o->what, s->is_binary, (int)s->region, (long long)s->offset);
        if (!one || PyList_Append(list, one)) Py_CLEAR(list);
        Py_XDECREF(one);
    }
    return list;
}

static int has_binary(const request *r) {
    int found = 0;
    for (int64_t k = 0; k < r->sent_count; k++) found |= r->sent[k].is_binary;
    return found;
}

static PyObject *answer_of(const request *r, const Py_buffer *tail) {
    for (int64_t k = 0; k < r->sent_count; k++)
        if (!r->sent[k].is_binary && r->sent[k].region < 0) return described(r);
    buffer to = {0};
    write_answer(r, tail->buf, tail->len, &to);
    PyObject *made = to.failed ? PyErr_NoMemory() : PyBytes_FromStringAndSize(to.p, to.used);
    free(to.p);
    return made;
}

static PyObject *result_of(const request *r, const Py_buffer *tail, PyObject *inputs) {
    PyObject *parts[] = {
        PyBytes_FromStringAndSize((const char *)r->places, r->part_count * (int64_t)sizeof(place)),
        Py_BuildValue("LLLL", (long long)r->ids, (long long)r->vectors, (long long)r->row_bytes,
                      (long long)r->out_bytes),
        answer_of(r, tail), PyLong_FromLongLong(r->sent_bytes), Py_NewRef(inputs), offsets_of(r), scores_of(r),
        runs_of(r, elsewhere_runs, r->tensor_count), runs_of(r, output_runs, r->sent_count),
        PyBool_FromLong(has_binary(r)), region_names(r),
        r->id.n ? text_of(r->id) : Py_NewRef(Py_None), PyLong_FromLongLong(r->timeout_us)};
    enum { COUNT = sizeof parts / sizeof *parts };
    PyObject *made = PyTuple_New(COUNT);
    for (int k = 0; k < COUNT; k++) {
        if (!parts[k]) Py_CLEAR(made);
        if (made && parts[k]) PyTuple_SetItem(made, k, parts[k]); /* takes the reference */
        else Py_XDECREF(parts[k]);
    }
    return made;
}

/* What is read before the input buffer has room. */
static int begin(request *r) {
    if (!read_header(r)) return 0;
    return (r->region_count && !r->is_gathered) || plan_inputs(r);
}

static PyObject *read_request(request *r, const Py_buffer *tail) {
    PyThreadState *state = r->header_bytes > LONG_TEXT ? PyEval_SaveThread() : NULL;
    int is_right = begin(r);
    if (state) PyEval_RestoreThread(state);
    if (!is_right) Py_RETURN_NONE;
    if (r->region_count && !r->is_gathered) {
        PyObject *named = region_names(r), *runs = named ? runs_of(r, input_runs, r->tensor_count) : NULL;
        if (!runs) return Py_XDECREF(named), NULL;
        return Py_BuildValue("NN", named, runs);
    }
    PyObject *inputs = r->is_rebuilt ? PyBytes_FromStringAndSize(NULL, r->in_bytes) : Py_NewRef(Py_None);
    if (!inputs) return NULL;
    if (r->is_rebuilt) r->built = PyBytes_AsString(inputs);
    state = r->header_bytes > LONG_TEXT || r->in_bytes > LONG_TEXT ? PyEval_SaveThread() : NULL;
    is_right = fill_inputs(r) && place_all(r);
    if (state) PyEval_RestoreThread(state);
    PyObject *made = is_right ? result_of(r, tail, inputs) : Py_NewRef(Py_None);
    Py_DECREF(inputs);
    return made;
}

static PyObject *py_read(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    enum { TAIL, BODY, GATHERED, ON_DEVICE, BUFFERS };
    static const int at[] = {1, 2, 4, 5};
    Py_buffer b[BUFFERS] = {{0}};
    PyObject *result = NULL;
    if (n != 6) return PyErr_Format(PyExc_TypeError, "read takes 6 arguments, got %zd", n);
    const names *of = PyCapsule_GetPointer(args[0], NAME);
    int64_t header_bytes = PyLong_AsLongLong(args[3]);
    if (!of || (header_bytes == -1 && PyErr_Occurred())) return NULL;
    int held = 0;
    for (; held < BUFFERS; held++)
        if (args[at[held]] != Py_None && PyObject_GetBuffer(args[at[held]], b + held, PyBUF_SIMPLE)) goto done;
    if (!b[TAIL].obj || !b[BODY].obj || header_bytes < 0 || header_bytes > b[BODY].len
        || (b[GATHERED].obj && !b[ON_DEVICE].obj)) {
        PyErr_SetString(PyExc_ValueError, "the header is longer than the body, or an argument is missing");
        goto done;
    }
    request r = {.names = of, .header = b[BODY].buf, .header_bytes = header_bytes,
                 .body = (const char *)b[BODY].buf + header_bytes, .body_bytes = b[BODY].len - header_bytes,
                 .base = header_bytes};
    if (b[GATHERED].obj)
        r.is_gathered = 1, r.base = 0, r.body = b[GATHERED].buf, r.body_bytes = b[GATHERED].len,
        r.is_on_device = b[ON_DEVICE].buf, r.device_count = b[ON_DEVICE].len;
    result = read_request(&r, b + TAIL);
    end_request(&r);
done:
    while (held--)
        if (b[held].obj) PyBuffer_Release(b + held);
    return result;
}

/* ---- /v1 ---- */

static const char JSON_NAME[] = "tableside.json_request";

/* body: the text. held: the inputs. */
typedef struct { json_request j; PyObject *body, *held; } held_json;

static void end_json(held_json *h) {
    end_request(&h->j.r);
    free(h->j.owners), free(h->j.lengths);
    Py_XDECREF(h->body), Py_XDECREF(h->held);
    free(h);
}

static void destroy_json(PyObject *capsule) { end_json(PyCapsule_GetPointer(capsule, JSON_NAME)); }

static PyObject *py_read_json(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    char *bytes;
    Py_ssize_t size;
    if (n != 2) return PyErr_Format(PyExc_TypeError, "read_json takes 2 arguments, got %zd", n);
    if (PyBytes_AsStringAndSize(args[0], &bytes, &size)) return NULL;
    held_json *h = calloc(1, sizeof(held_json));
    if (!h) return PyErr_NoMemory();
    h->body = Py_NewRef(args[0]);
    if (!(h->held = PyBytes_FromStringAndSize(NULL, INPUTS_PER_BYTE * size + 64))) return end_json(h), NULL;
    h->j.inputs = PyBytes_AsString(h->held), h->j.is_score = PyObject_IsTrue(args[1]);
    h->j.r.header = bytes, h->j.r.header_bytes = size;
    PyThreadState *state = size > LONG_TEXT ? PyEval_SaveThread() : NULL;
    int is_right = read_json(&h->j);
    if (state) PyEval_RestoreThread(state);
    if (!is_right) {
        end_json(h);
        Py_RETURN_NONE;
    }
    PyObject *capsule = PyCapsule_New(h, JSON_NAME, destroy_json), *model = text_of(h->j.model);
    if (!capsule) end_json(h);
    if (!capsule || !model) return Py_XDECREF(capsule), Py_XDECREF(model), NULL;
    if (h->j.version.kind == INTEGER) return Py_BuildValue("NNL", capsule, model, (long long)h->j.version.integer);
    return Py_BuildValue("NNO", capsule, model, Py_None);
}

/* Of each lookup: 1, if its ids came as bags. */
static PyObject *are_bags(const request *r) {
    PyObject *made = PyBytes_FromStringAndSize(NULL, r->part_count);
    char *to = made ? PyBytes_AsString(made) : NULL;
    for (int64_t k = 0; to && k < r->part_count; k++) to[k] = r->tensors[r->parts[k].ids].is_bags;
    return made;
}

static PyObject *py_lay_out_json(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    if (n != 2) return PyErr_Format(PyExc_TypeError, "lay_out_json takes 2 arguments, got %zd", n);
    held_json *h = PyCapsule_GetPointer(args[0], JSON_NAME);
    const names *of = h ? PyCapsule_GetPointer(args[1], NAME) : NULL;
    if (!of) return NULL;
    const request *r = &h->j.r;
    if (!lay_out_json(&h->j, of)) Py_RETURN_NONE;
    return Py_BuildValue("y#(LLLL)OLNNN", (const char *)r->places, (Py_ssize_t)(r->part_count * (int64_t)sizeof(place)),
                         (long long)r->ids, (long long)r->vectors, (long long)r->row_bytes, (long long)r->out_bytes,
                         h->held, (long long)h->j.used, scores_of(r), PyBool_FromLong(r->wants_masks), are_bags(r));
}

/* ---- floats as JSON ---- */

static PyObject *py_use_vectors(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments a;
    if (!take_arguments("use_vectors", "i", args, n, &a)) return NULL;
    return PyLong_FromLong(begin_float_text((int)a.n[0]));
}

static PyObject *py_floats(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments a;
    PyObject *made = NULL;
    if (!take_arguments("floats", "bi", args, n, &a)) return NULL;
    const int is_half = a.n[0] != 0;
    const int64_t count = a.b[0].len / (is_half ? 2 : 4);
    char *begin = malloc((size_t)count * FLOAT_BYTES + SPARE_BYTES), *to = begin;
    if (begin) {
        PyThreadState *state = a.b[0].len > LONG_VALUES ? PyEval_SaveThread() : NULL;
        *to++ = '[';
        to = write_floats(a.b[0].buf, is_half, count, to);
        *to++ = ']';
        if (state) PyEval_RestoreThread(state);
        made = PyBytes_FromStringAndSize(begin, to - begin);
    } else PyErr_NoMemory();
    free(begin);
    release(&a);
    return made;
}

/* Where the vectors of a place lie, and how many; 0: they do not lie in the outputs. */
static int find_vectors(const names *of, const place *p, const Py_buffer *outputs, vectors *found) {
    if (p->kind < 0 || p->kind >= of->n.features) return 0;
    const feature *f = of->features + p->kind;
    const int64_t count = f->is_pooled ? p->bags : p->ids, step = f->dim * (f->is_half ? 2 : 4);
    *found = (vectors){of->label[p->kind], (const uint8_t *)outputs->buf + p->out_at, count, f->dim, (int)f->is_half};
    return step > 0 && lies_in(outputs, p->out_at, count, step, step);
}

static PyObject *py_vectors(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments a;
    PyObject *made = NULL;
    if (!take_arguments("vectors", "-bb", args, n, &a)) return NULL;
    const names *of = PyCapsule_GetPointer(args[0], NAME);
    const int64_t count = a.b[0].len / (int64_t)sizeof(place);
    vectors *found = malloc((size_t)(count + 1) * sizeof *found);
    int64_t room = SPARE_BYTES;
    for (int64_t k = 0; of && found && k < count; k++) {
        place p;
        memcpy(&p, (const char *)a.b[0].buf + k * (int64_t)sizeof p, sizeof p);
        if (!find_vectors(of, &p, a.b + 1, found + k)) {
            PyErr_Format(PyExc_ValueError, "the vectors of place %lld do not lie in the outputs", (long long)k);
            goto done;
        }
        room += VECTORS_BYTES(found[k]);
    }
    if (of && !found) PyErr_NoMemory();
    if (of && found && (made = PyByteArray_FromStringAndSize(NULL, room))) {
        char *begin = PyByteArray_AsString(made);
        PyThreadState *state = a.b[1].len > LONG_VALUES ? PyEval_SaveThread() : NULL;
        const int64_t bytes = write_vectors(found, count, begin) - begin;
        if (state) PyEval_RestoreThread(state);
        if (PyByteArray_Resize(made, bytes)) Py_CLEAR(made);
    }
done:
    free(found);
    release(&a);
    return made;
}

static PyMethodDef methods[] = {
    {"names", (PyCFunction)(void (*)(void))py_names, METH_FASTCALL, NULL},
    {"read", (PyCFunction)(void (*)(void))py_read, METH_FASTCALL, NULL},
    {"read_json", (PyCFunction)(void (*)(void))py_read_json, METH_FASTCALL, NULL},
    {"lay_out_json", (PyCFunction)(void (*)(void))py_lay_out_json, METH_FASTCALL, NULL},
    {"floats", (PyCFunction)(void (*)(void))py_floats, METH_FASTCALL, NULL},
    {"use_vectors", (PyCFunction)(void (*)(void))py_use_vectors, METH_FASTCALL, NULL},
    {"vectors", (PyCFunction)(void (*)(void))py_vectors, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_reader", NULL, -1, methods, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit__reader(void) {
    PyObject *made = PyModule_Create(&module);
    begin_float_text(2);
#define FIELD_NAME(name) #name,
    static const char *const fields[] = {PLACE_FIELDS(FIELD_NAME) NULL};
    if (made && (!add_names(made, "PLACE_FIELDS", fields)
                 || PyModule_AddIntConstant(made, "INPUTS_PER_BYTE", INPUTS_PER_BYTE)))
        Py_CLEAR(made);
    return made;
}
