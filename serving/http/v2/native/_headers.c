/* Matches headers of infer requests with templates of earlier ones.
 *
 * One client's headers differ in their numbers. The rest of a header, without numbers outside strings, the id
 * and spaces at the end, is its skeleton. A template (`serving.http.v2.templates`) holds a header in pieces,
 * each number's meaning, and the response's JSON in pieces. `match` walks a header along a template, checks
 * its numbers like the slow path (`serving.http.v2.request`), writes places (`quant.contract.Place`), sums
 * and the response's JSON. Whatever is wrong gives None: the slow path answers.
 *
 * skeleton(header) -> int of the skeleton, or None: the header is not simple (see `scan`)
 * spans(header, most) -> (start, end, is_id) of its numbers and id, or None: not simple, or more than `most`
 * template(words, text) -> a template; words: int64 (`read_words`); text: pieces of header and response
 * numbers(template, header) -> None, or its numbers in order as int64 bytes; the id counts as one, any value
 * match(template, body, header_bytes) -> None, or a tuple of
 *   places: bytes of int64 [features, fields of Place]; ids, vectors, row_bytes (of rows read), out_bytes;
 *   head: the response's JSON; parts: ((start, end), ...) of the output buffer behind it, None: all;
 *   inputs: None if places are offsets in the body, else the inputs with int64 ids;
 *   offsets: (place in the output buffer, kjt.offsets as bytes) or None; dense: bytes of the dense tensors'
 *   int64 offsets; rows: to score
 */
#include "_headers.h"

static const int64_t MOST_VECTOR_BYTES = (int64_t)1 << 24;

/* ---- simple headers ---- */

typedef struct { Py_ssize_t start, end; int is_id; } span;
typedef struct { span *spans; Py_ssize_t count, room, most; uint64_t hash; } found;

/* Characters of numbers: none may follow the digits in a hole, where a template's literal goes on. */
static int in_number(char c) { return is_digit(c) || c == '-' || c == '+' || c == '.' || (c | 32) == 'e'; }

static uint64_t mixed(uint64_t hash, const char *p, Py_ssize_t n) {
    for (; n > 0; p += 8, n -= 8) {
        uint64_t word = 0;
        memcpy(&word, p, (size_t)(n < 8 ? n : 8));
        hash = (hash ^ word ^ (uint64_t)(n < 8 ? n : 8) << 60) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return hash;
}

static int add_span(found *f, Py_ssize_t start, Py_ssize_t end, int is_id) {
    if (f->room == 0) return 1; /* only the hash is wanted */
    if (f->count == f->most) return 0;
    if (f->count == f->room) {
        span *grown = PyMem_Realloc(f->spans, (size_t)f->room * 2 * sizeof(span));
        if (!grown) return 0;
        f->spans = grown, f->room *= 2;
    }
    f->spans[f->count++] = (span){start, end, is_id};
    return 1;
}

/* The end of a plain number at `at`; -1: it is signed, a fraction, long, or has leading zeros. */
static Py_ssize_t plain_number(const char *text, Py_ssize_t at, Py_ssize_t size) {
    Py_ssize_t end = at;
    while (end < size && is_digit(text[end])) end++;
    if (end == at || end - at > MOST_DIGITS || (text[at] == '0' && end - at > 1)) return -1;
    return end < size && in_number(text[end]) ? -1 : end;
}

/* The end of a string, `at` behind its opening quote; -1: it has an escape or a control character. */
static Py_ssize_t plain_string(const char *text, Py_ssize_t at, Py_ssize_t size) {
    for (; at < size; at++) {
        if (text[at] == '"') return at + 1;
        if (text[at] == '\\' || (unsigned char)text[at] < 0x20) return -1;
    }
    return -1;
}

static int is_ascii(const char *text, Py_ssize_t at, Py_ssize_t end) {
    unsigned char all = 0;
    for (; at < end; at++) all |= (unsigned char)text[at];
    return all < 0x80;
}

/* Finds a header's numbers and id. 0: it has escapes, other numbers or two ids, or memory is full. It need
 * not be JSON: the template's maker checks that. */
static int scan(const char *text, Py_ssize_t size, found *f) {
    Py_ssize_t literal = 0, depth = 0;
    while (size && is_space(text[size - 1])) size--; /* padding */
    int has_id = 0, is_id_next = 0;
    for (Py_ssize_t at = 0; at < size;) {
        char c = text[at];
        if (c == '"') {
            Py_ssize_t end = plain_string(text, at + 1, size);
            if (end < 0) return 0;
            if (is_id_next && end - at > 2) {
                if (has_id++ || !is_ascii(text, at + 1, end - 1)) return 0;
                f->hash = mixed(f->hash, text + literal, at + 1 - literal);
                if (!add_span(f, at + 1, end - 1, 1)) return 0;
                literal = end - 1;
            }
            Py_ssize_t next = end;
            while (next < size && is_space(text[next])) next++;
            is_id_next = depth == 1 && end - at == 4 && !memcmp(text + at, "\"id\"", 4);
            is_id_next = is_id_next && next < size && text[next] == ':';
            if (is_id_next) end = next + 1;
            while (is_id_next && end < size && is_space(text[end])) end++;
            is_id_next = is_id_next && end < size && text[end] == '"';
            at = end;
        } else if (is_digit(c) || c == '-') {
            Py_ssize_t end = plain_number(text, at, size);
            if (end < 0) return 0;
            f->hash = mixed(f->hash, text + literal, at - literal);
            if (!add_span(f, at, end, 0)) return 0;
            literal = at = end;
        } else {
            depth += (c == '{' || c == '[') - (c == '}' || c == ']');
            at++;
        }
    }
    f->hash = mixed(f->hash, text + literal, size - literal);
    return 1;
}

static PyObject *py_skeleton(PyObject *self, PyObject *header) {
    Py_buffer b;
    found f = {.hash = 1};
    if (PyObject_GetBuffer(header, &b, PyBUF_SIMPLE)) return NULL;
    int simple = scan(b.buf, b.len, &f);
    PyBuffer_Release(&b);
    if (!simple) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(f.hash);
}

static PyObject *py_spans(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Py_buffer b;
    found f = {.room = 256, .hash = 1};
    PyObject *list = NULL;
    if (n != 2) return PyErr_Format(PyExc_TypeError, "spans takes 2 arguments, got %zd", n);
    if ((f.most = PyLong_AsSsize_t(args[1])) == -1 && PyErr_Occurred()) return NULL;
    if (PyObject_GetBuffer(args[0], &b, PyBUF_SIMPLE)) return NULL;
    if (!(f.spans = PyMem_Malloc((size_t)f.room * sizeof(span)))) {
        PyBuffer_Release(&b);
        return PyErr_NoMemory();
    }
    int simple = scan(b.buf, b.len, &f);
    PyBuffer_Release(&b);
    if (simple) list = PyList_New(f.count);
    for (Py_ssize_t k = 0; list && k < f.count; k++) {
        PyObject *one = Py_BuildValue("nni", f.spans[k].start, f.spans[k].end, f.spans[k].is_id);
        if (!one || PyList_SetItem(list, k, one)) Py_CLEAR(list);
    }
    PyMem_Free(f.spans);
    if (!simple) Py_RETURN_NONE;
    return list;
}

/* ---- templates ---- */

static void free_template(template *t) {
    if (!t) return;
    PyMem_Free(t->words), PyMem_Free(t->text), PyMem_Free(t->numbers), PyMem_Free(t->laid);
    PyMem_Free(t->outputs), PyMem_Free(t->dense_at), PyMem_Free(t->dense_rows), PyMem_Free(t);
}

static void destroy(PyObject *capsule) { free_template(PyCapsule_GetPointer(capsule, NAME)); }

static int within(int64_t value, int64_t end) { return value >= 0 && value < end; }

/* Points into the words; 0 where they are not a template's. After this nothing of them is out of range. */
static int read_words(template *t, int64_t count, int64_t text_bytes) {
    const int64_t head = (int64_t)(sizeof(counts) / 8), most = (int64_t)1 << 32;
    if (count < head) return 0;
    memcpy(&t->n, t->words, sizeof(counts));
    const counts *n = &t->n;
    for (int64_t k = 0; k < head; k++)
        if (k != 1 && k != 9 && !within(t->words[k], most)) return 0;
    if ((n->has_offsets && !n->unpooled_item) || n->id_hole < -1 || n->id_hole >= n->holes) return 0;
    if (n->most_out_bytes < 0 || n->features < 1) return 0;
    const int64_t *p = t->words + head;
    t->literals = p, p += n->holes + 1;
    t->tensors = (const tensor *)p, p += n->tensors * 8;
    t->features = (const feature *)p, p += n->features * 3;
    t->sources = p, p += n->sources;
    t->parts = p, p += n->parts;
    t->told = (const telling *)p, p += n->told * 2;
    t->answers = p, p += n->told + 1;
    if (p - t->words != count) return 0;
    int64_t header_bytes = 0;
    for (int64_t k = 0; k <= n->holes; k++) {
        if (!within(t->literals[k], most)) return 0;
        header_bytes += t->literals[k];
    }
    for (int64_t k = 0; k <= n->told; k++) {
        if (!within(t->answers[k], most)) return 0;
        t->answer_bytes += t->answers[k];
    }
    if (header_bytes + t->answer_bytes != text_bytes) return 0;
    t->answer = t->text + header_bytes;
    for (int64_t k = 0; k < n->tensors; k++) {
        const tensor *x = t->tensors + k;
        int64_t owners = x->role <= WEIGHTS ? n->features : x->role == DENSE ? n->dense : 1;
        int is_2d = x->role == IDS || x->role == DENSE || x->role == KJT_LENGTHS;
        if (!within(x->role, ROLES) || !within(x->owner, owners) || (x->item != 4 && x->item != 8)) return 0;
        if ((x->dims != 1 && x->dims != 2) || (is_2d && x->dims == 1)) return 0;
        if (x->role == LENGTHS && x->dims != 1) return 0;
        if (!within(x->first_hole, n->holes) || !within(x->size_hole, n->holes)) return 0;
        if (x->dims == 2 && !within(x->second_hole, n->holes)) return 0;
    }
    for (int64_t k = 0; k < n->features; k++) {
        const feature *x = t->features + k;
        if (!within(x->vector_bytes, MOST_VECTOR_BYTES) || !within(x->row_bytes, MOST_VECTOR_BYTES)) return 0;
    }
    for (int64_t k = 0; k < n->sources; k++) {
        int64_t from = t->sources[k];
        if (!(from < 0 ? within(-1 - from, n->dense) : within(from, n->features))) return 0;
    }
    for (int64_t k = 0; k < n->parts; k++)
        if (!within(t->parts[k], n->features + 4)) return 0;
    for (int64_t k = 0; k < n->told; k++)
        if (!within(t->told[k].what, TOLD) || !within(t->told[k].output, n->features + 4)
            || (t->told[k].what == ID && n->id_hole < 0))
            return 0;
    return 1;
}

static void *copied(const void *from, Py_ssize_t size) {
    void *to = PyMem_Malloc((size_t)(size ? size : 1));
    if (to) memcpy(to, from, (size_t)size);
    return to;
}

static void *several(int64_t count, size_t size) { return PyMem_Calloc((size_t)(count + 1), size); }

static PyObject *py_template(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Py_buffer words, text;
    PyObject *capsule = NULL;
    if (n != 2) return PyErr_Format(PyExc_TypeError, "template takes 2 arguments, got %zd", n);
    if (PyObject_GetBuffer(args[0], &words, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[1], &text, PyBUF_SIMPLE)) {
        PyBuffer_Release(&words);
        return NULL;
    }
    template *t = PyMem_Calloc(1, sizeof(template));
    if (t) t->words = copied(words.buf, words.len), t->text = copied(text.buf, text.len);
    if (!t || !t->words || !t->text) {
        PyErr_NoMemory();
    } else if (words.len % 8 || !read_words(t, words.len / 8, text.len)) {
        PyErr_SetString(PyExc_ValueError, "these words are not a template's");
    } else {
        t->numbers = several(t->n.holes, 8), t->laid = several(t->n.features, sizeof(laid));
        t->outputs = several(t->n.features + 4, sizeof(output));
        t->dense_at = several(t->n.dense, 8), t->dense_rows = several(t->n.dense, 8);
        if (!t->numbers || !t->laid || !t->outputs || !t->dense_at || !t->dense_rows) PyErr_NoMemory();
        else capsule = PyCapsule_New(t, NAME, destroy);
    }
    if (!capsule) free_template(t);
    PyBuffer_Release(&words), PyBuffer_Release(&text);
    return capsule;
}

static PyMethodDef methods[] = {
    {"skeleton", py_skeleton, METH_O, NULL},
    {"spans", (PyCFunction)(void (*)(void))py_spans, METH_FASTCALL, NULL},
    {"template", (PyCFunction)(void (*)(void))py_template, METH_FASTCALL, NULL},
    {"numbers", (PyCFunction)(void (*)(void))py_numbers, METH_FASTCALL, NULL},
    {"match", (PyCFunction)(void (*)(void))py_match, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_headers", NULL, -1, methods, 0, 0, 0, 0};

PyMODINIT_FUNC PyInit__headers(void) { return PyModule_Create(&module); }
