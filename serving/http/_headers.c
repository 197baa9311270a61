/* Headers of infer requests, understood by comparing them with one that was understood before.
 *
 * Headers of one client differ in their numbers: lengths, so shapes, so sizes. All but the numbers outside strings, the
 * request's id, and spaces at the end, is a header's skeleton. A template is made of the first header of a skeleton (`serving.http.templates`): its
 * bytes in pieces, what each number means, and the response's JSON in pieces. `match` walks a header and a template side by
 * side, takes the numbers out, checks them as the slow path does (`serving.http.v2_request`), and writes where each feature's
 * inputs and vectors are (`quant.contract.Place`), the sums that are counted, and the response's JSON.
 * Where anything is not as it should be it says None, and the slow path answers, or says what is wrong.
 *
 * skeleton(header) -> int that headers of one skeleton share, or None: the header is not simple (see `scan`)
 * spans(header, most) -> list of (start, end, is_id) of its numbers and its id, or None: also where they are more than `most`
 * template(words, text) -> a template; words: int64, see `read_words`; text: the pieces of header and response
 * numbers(template, header) -> None, or the header's numbers, int64 as bytes, in order; the id counts as one, of any value
 * match(template, body, header_bytes) -> None, or (places, ids, vectors, row_bytes, out_bytes, head, parts, inputs, offsets,
 *   dense, rows):
 *   places: int64 [features, fields of Place], as bytes · row_bytes: of the rows that are read · out_bytes: of the output buffer
 *   head: the response's JSON · parts: ((start, end), ...) of the output buffer that follow it; None: all of it
 *   inputs: None: the places are offsets in the body; else they are offsets in these bytes, where int32 ids became int64
 *   offsets: (where in the output buffer, kjt.offsets as bytes), or None · dense: int64 offsets of the scorer's dense tensors, as bytes · rows: that are scored
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { MOST_DIGITS = 18 };
static const int64_t LARGEST_DIMENSION = (int64_t)1 << 40, LARGEST_LENGTH = INT32_MAX, MOST_BYTES = (int64_t)1 << 50;
static const int64_t MOST_VECTOR_BYTES = (int64_t)1 << 24;

/* ---- simple headers ---- */

typedef struct { Py_ssize_t start, end; int is_id; } span;
typedef struct { span *spans; Py_ssize_t count, room, most; uint64_t hash; } found;

static int is_digit(char c) { return c >= '0' && c <= '9'; }
static int is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
/* What may stand in a number. A template's literal goes on behind a hole, so none of these may follow the digits there. */
static int in_number(char c) { return is_digit(c) || c == '-' || c == '+' || c == '.' || c == 'e' || c == 'E'; }

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

/* Behind the digits of a plain number that starts at `at`; -1 where it is signed, has a fraction, leading zeros, or is long. */
static Py_ssize_t plain_number(const char *text, Py_ssize_t at, Py_ssize_t size) {
    Py_ssize_t end = at;
    while (end < size && is_digit(text[end])) end++;
    if (end == at || end - at > MOST_DIGITS || (text[at] == '0' && end - at > 1)) return -1;
    return end < size && in_number(text[end]) ? -1 : end;
}

/* Behind a string's closing quote; `at` is behind its opening one. -1 where it has an escape or a control character. */
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

/* Finds the numbers and the id of a header. 0: it is not simple: it has escapes, or numbers that are not plain, or two ids, or
 * no memory was left. What is simple need not be JSON: that is for whoever makes a template of it to see. */
static int scan(const char *text, Py_ssize_t size, found *f) {
    Py_ssize_t literal = 0, depth = 0;
    while (size && is_space(text[size - 1])) size--; /* clients pad headers, so that ids begin at multiples of 8 */
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
            is_id_next = depth == 1 && end - at == 4 && !memcmp(text + at, "\"id\"", 4) && next < size && text[next] == ':';
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

/* What a tensor of the request is. Roles up to WEIGHTS belong to the feature `owner`, DENSE to the dense tensor `owner`, the
 * others to all features. */
enum role { IDS = 0, VALUES = 1, LENGTHS = 2, WEIGHTS = 3, DENSE = 4, KJT_VALUES = 5, KJT_LENGTHS = 6, KJT_WEIGHTS = 7, ROLES = 8 };
/* What a number of the response is. */
enum told { COUNT = 0, BYTES = 1, ID = 2, TOLD = 3 };

/* The words of a template: one `counts`, then the arrays, in this order.
 * id_hole: which hole is the id, or -1. score_values: of a row; 0: there are no scores. apart: vectors of pooled features lie
 * side by side (kjt), `row_bytes` from one bag to the next; unpooled_item: bytes of a value of the unpooled ones. in_order: the
 * parts that follow the response's JSON are the output buffer as it stands; else those of `parts`. */
typedef struct {
    int64_t holes, id_hole, tensors, features, dense, sources, parts, told, score_values, most_out_bytes, apart, row_bytes,
        unpooled_item, in_order, has_offsets;
} counts;
typedef struct { int64_t role, owner, item, dims, first_hole, second_hole, size_hole, width; } tensor;
typedef struct { int64_t is_pooled, vector_bytes, row_bytes; } feature;
typedef struct { int64_t what, output; } telling; /* output: a feature's number; then the scores', kjt's, and those of its sequences and offsets */
typedef struct { int64_t ids_at, ids, lengths_at, bag_length, bags, weights_at, out_at, found_at; } place;
typedef struct { int64_t weights, count, out_bytes; } laid; /* what is known of a feature while a request is laid out */
typedef struct { int64_t at, count, bytes; } output;

typedef struct {
    counts n;
    int64_t *words;
    const int64_t *literals, *sources, *parts, *answers; /* bytes of each piece; numbers */
    const tensor *tensors;
    const feature *features;
    const telling *told;
    char *text;
    const char *answer; /* the response's pieces, behind the header's in `text` */
    int64_t answer_bytes;
    int64_t *numbers; /* the rest is rewritten by each match, which holds the interpreter's lock */
    laid *laid;
    output *outputs;
    int64_t *dense_at, *dense_rows;
} template;

static const char NAME[] = "tableside.template";

static void free_template(template *t) {
    if (!t) return;
    PyMem_Free(t->words), PyMem_Free(t->text), PyMem_Free(t->numbers), PyMem_Free(t->laid), PyMem_Free(t->outputs);
    PyMem_Free(t->dense_at), PyMem_Free(t->dense_rows), PyMem_Free(t);
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
    if ((n->has_offsets && !n->unpooled_item) || n->id_hole < -1 || n->id_hole >= n->holes || n->most_out_bytes < 0 || n->features < 1) return 0;
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
        if (!within(x->role, ROLES) || !within(x->owner, owners) || (x->item != 4 && x->item != 8) || x->dims < 1 || x->dims > 2
            || !within(x->first_hole, n->holes) || !within(x->size_hole, n->holes)
            || (x->dims == 2 && !within(x->second_hole, n->holes)) || ((x->role == IDS || x->role == DENSE) && x->dims != 2)
            || (x->role == KJT_LENGTHS && x->dims != 2) || (x->role == LENGTHS && x->dims != 1))
            return 0;
    }
    for (int64_t k = 0; k < n->features; k++)
        if (!within(t->features[k].vector_bytes, MOST_VECTOR_BYTES) || !within(t->features[k].row_bytes, MOST_VECTOR_BYTES)) return 0;
    for (int64_t k = 0; k < n->sources; k++)
        if (!(t->sources[k] < 0 ? within(-1 - t->sources[k], n->dense) : within(t->sources[k], n->features))) return 0;
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
        t->numbers = several(t->n.holes, sizeof(int64_t)), t->laid = several(t->n.features, sizeof(laid));
        t->outputs = several(t->n.features + 4, sizeof(output));
        t->dense_at = several(t->n.dense, sizeof(int64_t)), t->dense_rows = several(t->n.dense, sizeof(int64_t));
        if (!t->numbers || !t->laid || !t->outputs || !t->dense_at || !t->dense_rows) PyErr_NoMemory();
        else capsule = PyCapsule_New(t, NAME, destroy);
    }
    if (!capsule) free_template(t);
    PyBuffer_Release(&words), PyBuffer_Release(&text);
    return capsule;
}

/* ---- matching ---- */

typedef struct {
    const template *t;
    const char *body;
    int64_t header_bytes, body_bytes;
    const char *id;
    int64_t id_bytes;
    int64_t widened; /* bytes that int32 ids gain */
    int64_t ids, vectors, row_bytes, out_bytes, rows;
    place *places;
} request;

/* Compares the header with the template and takes its numbers out. */
static int walk(request *r) {
    const template *t = r->t;
    const char *p = r->body, *end = p + r->header_bytes, *literal = t->text;
    for (int64_t k = 0;; k++) {
        int64_t n = t->literals[k];
        if (end - p < n || memcmp(p, literal, (size_t)n)) return 0;
        p += n, literal += n;
        if (k == t->n.holes) {
            while (p < end && is_space(*p)) p++;
            return p == end;
        }
        const char *start = p;
        if (k == t->n.id_hole) {
            while (p < end && *p != '"' && *p != '\\' && (unsigned char)*p >= 0x20 && (unsigned char)*p < 0x80) p++;
            if (p == start) return 0;
            r->id = start, r->id_bytes = p - start;
            continue;
        }
        int64_t value = 0;
        while (p < end && is_digit(*p) && p - start < MOST_DIGITS) value = 10 * value + (*p++ - '0');
        if (p == start || (*start == '0' && p - start > 1)) return 0; /* what else may stand in a number, no literal begins with */
        t->numbers[k] = value;
    }
}

static int32_t load_i32(const char *p) {
    int32_t value;
    memcpy(&value, p, 4);
    return value;
}

/* The sum of `count` lengths, or -1: one is negative. */
static int64_t sum_of(const char *lengths, int64_t count) {
    int64_t sum = 0;
    int32_t sign = 0;
    for (int64_t b = 0; b < count; b++) {
        int32_t length = load_i32(lengths + 4 * b);
        sign |= length, sum += length;
    }
    return sign < 0 ? -1 : sum;
}

/* Whether none of `count` fp32 values is infinite or no number. */
static int are_finite(const char *values, int64_t count) {
    int32_t bad = 0;
    for (int64_t k = 0; k < count; k++) bad |= (load_i32(values + 4 * k) & 0x7f800000) == 0x7f800000;
    return !bad;
}

typedef struct { int64_t values, ids, lengths_from, lengths, bags, weights; } compact; /* of a kjt: offsets and counts */

/* Reads every tensor's shape, checks its size, and notes it where it belongs. */
static int read_tensors(request *r, compact *kjt) {
    const template *t = r->t;
    int64_t from = r->header_bytes, to = r->header_bytes; /* where its bytes are, and where they will be */
    int64_t most = r->body_bytes - r->header_bytes;
    for (int64_t k = 0; k < t->n.tensors; k++) {
        const tensor *x = t->tensors + k;
        int64_t first = t->numbers[x->first_hole], second = x->dims == 2 ? t->numbers[x->second_hole] : 1, n, bytes;
        if (first >= LARGEST_DIMENSION || second >= LARGEST_DIMENSION || __builtin_mul_overflow(first, second, &n)
            || __builtin_mul_overflow(n, x->item, &bytes) || bytes != t->numbers[x->size_hole] || bytes > most)
            return 0;
        most -= bytes;
        place *p = r->places + (x->role <= WEIGHTS ? x->owner : 0);
        switch ((enum role)x->role) {
        case IDS:
            if (second > LARGEST_LENGTH) return 0;
            p->bags = first, p->bag_length = second;
            /* fall through */
        case VALUES: p->ids_at = to, p->ids = n; break;
        case LENGTHS:
            p->lengths_at = to, p->bags = first;
            if (!t->features[x->owner].is_pooled) t->laid[x->owner].count = from; /* to be added up: no kernel reads those */
            break;
        case WEIGHTS: p->weights_at = to, t->laid[x->owner].weights = n; break;
        case DENSE:
            if (second != x->width) return 0;
            t->dense_at[x->owner] = to, t->dense_rows[x->owner] = first;
            break;
        case KJT_VALUES: kjt->values = to, kjt->ids = n; break;
        case KJT_LENGTHS:
            if (first != t->n.features) return 0;
            kjt->lengths_from = from, kjt->lengths = to, kjt->bags = second;
            break;
        case KJT_WEIGHTS:
            kjt->weights = to;
            t->laid[0].weights = n;
            break;
        case ROLES: return 0;
        }
        if ((x->role == WEIGHTS || x->role == KJT_WEIGHTS) && !are_finite(r->body + from, n)) return 0;
        int is_ids = x->role == IDS || x->role == VALUES || x->role == KJT_VALUES;
        from += bytes, to += is_ids ? 8 * n : bytes;
    }
    r->widened = to - from;
    return most == 0;
}

/* The places of a kjt's features: its values are cut up by the sums of its lengths. */
static int cut_up(request *r, const compact *kjt) {
    const template *t = r->t;
    int64_t first = 0;
    if (kjt->weights >= 0 && t->laid[0].weights != kjt->ids) return 0;
    for (int64_t f = 0; f < t->n.features; f++) {
        int64_t ids = sum_of(r->body + kjt->lengths_from + 4 * kjt->bags * f, kjt->bags);
        if (ids < 0 || ids > kjt->ids - first) return 0;
        r->places[f] = (place){.ids_at = kjt->values + 8 * first, .ids = ids, .lengths_at = kjt->lengths + 4 * kjt->bags * f,
                               .bags = kjt->bags, .weights_at = kjt->weights < 0 ? -1 : kjt->weights + 4 * first, .found_at = -1};
        first += ids;
    }
    return first == kjt->ids;
}

/* Whether the parts of each feature belong together, as `serving.http.tensors.feature_inputs` checks it. */
static int check_parts(const request *r) {
    const template *t = r->t;
    for (int64_t f = 0; f < t->n.features; f++) {
        const place *p = r->places + f;
        if (p->ids_at < 0 || (t->laid[f].weights >= 0 && t->laid[f].weights != p->ids)) return 0;
        if (t->laid[f].count >= 0 && sum_of(r->body + t->laid[f].count, p->bags) != p->ids) return 0;
    }
    return 1;
}

/* Where each feature's vectors go, then the scores; and what is counted. */
static int place_vectors(request *r) {
    const template *t = r->t;
    output *scores = t->outputs + t->n.features, *pooled = scores + 1, *unpooled = scores + 2;
    int64_t at = 0, column = 0;
    for (int64_t f = 0; f < t->n.features; f++) {
        place *p = r->places + f;
        const feature *x = t->features + f;
        int64_t count = x->is_pooled ? p->bags : p->ids, bytes;
        if (count > LARGEST_LENGTH || p->ids > LARGEST_LENGTH || p->bags > LARGEST_DIMENSION
            || __builtin_mul_overflow(count, x->vector_bytes, &bytes) || (at += bytes) > MOST_BYTES)
            return 0;
        r->ids += p->ids, r->vectors += count, r->row_bytes += p->ids * x->row_bytes;
        t->outputs[f] = (output){at - bytes, count, bytes};
    }
    if (t->n.apart) {
        *pooled = (output){0, r->places[0].bags, r->places[0].bags * t->n.row_bytes};
        *unpooled = (output){pooled->bytes, (at - pooled->bytes) / (t->n.unpooled_item ? t->n.unpooled_item : 1),
                             at - pooled->bytes};
        int64_t next = pooled->bytes;
        for (int64_t f = 0; f < t->n.features; f++) {
            output *o = t->outputs + f;
            if (t->features[f].is_pooled) o->at = pooled->bytes ? column : 0, column += t->features[f].vector_bytes;
            else o->at = next, next += o->bytes;
        }
    }
    for (int64_t f = 0; f < t->n.features; f++) r->places[f].out_at = t->outputs[f].at;
    for (int64_t k = 0; k < t->n.sources; k++) {
        int64_t source = t->sources[k], rows = source < 0 ? t->dense_rows[-1 - source] : t->outputs[source].count;
        if (k && rows != r->rows) return 0;
        r->rows = rows;
    }
    if (t->n.has_offsets) {
        int64_t count = 1;
        for (int64_t f = 0; f < t->n.features; f++) count += !t->features[f].is_pooled;
        scores[3] = (output){at, count, 8 * count};
        at += 8 * count;
    }
    if (t->n.score_values) {
        int64_t bytes;
        if (__builtin_mul_overflow(r->rows, 4 * t->n.score_values, &bytes) || bytes > MOST_BYTES) return 0;
        *scores = (output){at, r->rows, bytes};
        at += bytes;
    }
    r->out_bytes = at;
    return at <= t->n.most_out_bytes;
}

/* Writes a number's digits; returns how many. */
static int digits(int64_t value, char *to) {
    char reversed[24];
    int n = 0;
    do reversed[n++] = (char)('0' + value % 10); while ((value /= 10));
    for (int k = 0; k < n; k++) to[k] = reversed[n - 1 - k];
    return n;
}

/* The response's JSON. */
static PyObject *answer_of(const request *r) {
    const template *t = r->t;
    const char *piece = t->answer;
    char few[4096], *text = few, *p;
    int64_t most = t->answer_bytes + t->n.told * 20 + r->id_bytes;
    if (most > (int64_t)sizeof few && !(text = PyMem_Malloc((size_t)most))) return PyErr_NoMemory();
    p = text;
    for (int64_t k = 0; k <= t->n.told; k++) {
        memcpy(p, piece, (size_t)t->answers[k]);
        p += t->answers[k], piece += t->answers[k];
        if (k == t->n.told) break;
        const output *o = t->outputs + t->told[k].output;
        if (t->told[k].what == ID) memcpy(p, r->id, (size_t)r->id_bytes), p += r->id_bytes;
        else p += digits(t->told[k].what == COUNT ? o->count : o->bytes, p);
    }
    PyObject *answer = PyBytes_FromStringAndSize(text, p - text);
    if (text != few) PyMem_Free(text);
    return answer;
}

static PyObject *parts_of(const request *r) {
    const template *t = r->t;
    if (t->n.in_order) Py_RETURN_NONE;
    PyObject *parts = PyTuple_New(t->n.parts);
    for (int64_t k = 0; parts && k < t->n.parts; k++) {
        const output *o = t->outputs + t->parts[k];
        PyObject *one = Py_BuildValue("LL", (long long)o->at, (long long)(o->at + o->bytes));
        if (!one || PyTuple_SetItem(parts, k, one)) Py_CLEAR(parts);
    }
    return parts;
}

/* The body with its int32 ids as int64, or None. Offsets stay those of `to` in `read_tensors`. */
static PyObject *inputs_of(const request *r) {
    const template *t = r->t;
    if (!r->widened) Py_RETURN_NONE;
    PyObject *made = PyBytes_FromStringAndSize(NULL, r->body_bytes + r->widened);
    if (!made) return NULL;
    char *to = PyBytes_AsString(made);
    const char *from = r->body;
    memcpy(to, from, (size_t)r->header_bytes);
    to += r->header_bytes, from += r->header_bytes;
    for (int64_t k = 0; k < t->n.tensors; k++) {
        const tensor *x = t->tensors + k;
        int64_t bytes = t->numbers[x->size_hole];
        if (x->item == 4 && (x->role == IDS || x->role == VALUES || x->role == KJT_VALUES)) {
            for (int64_t i = 0; i < bytes / 4; i++, to += 8) {
                int64_t wide = load_i32(from + 4 * i);
                memcpy(to, &wide, 8);
            }
        } else {
            memcpy(to, from, (size_t)bytes);
            to += bytes;
        }
        from += bytes;
    }
    return made;
}

/* Where each unpooled feature's part of kjt.sequences begins, and where the last one ends, in values. */
static PyObject *offsets_of(const request *r) {
    const template *t = r->t;
    if (!t->n.has_offsets) Py_RETURN_NONE;
    int64_t count = 0;
    for (int64_t f = 0; f < t->n.features; f++) count += !t->features[f].is_pooled;
    PyObject *made = PyBytes_FromStringAndSize(NULL, 8 * (count + 1));
    if (!made) return NULL;
    char *to = PyBytes_AsString(made);
    int64_t at = 0;
    memcpy(to, &at, 8);
    for (int64_t f = 0; f < t->n.features; f++)
        if (!t->features[f].is_pooled) {
            at += t->outputs[f].bytes / t->n.unpooled_item;
            memcpy(to += 8, &at, 8);
        }
    PyObject *both = Py_BuildValue("LO", (long long)t->outputs[t->n.features + 3].at, made);
    Py_DECREF(made);
    return both;
}

static int lay_out(request *r) {
    const template *t = r->t;
    compact kjt = {.weights = -1};
    for (int64_t f = 0; f < t->n.features; f++) {
        r->places[f] = (place){.ids_at = -1, .lengths_at = -1, .weights_at = -1, .found_at = -1};
        t->laid[f] = (laid){.weights = -1, .count = -1};
    }
    return walk(r) && read_tensors(r, &kjt) && (t->n.apart ? cut_up(r, &kjt) : check_parts(r)) && place_vectors(r);
}

static PyObject *py_match(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Py_buffer body;
    PyObject *result = NULL, *places = NULL;
    if (n != 3) return PyErr_Format(PyExc_TypeError, "match takes 3 arguments, got %zd", n);
    const template *t = PyCapsule_GetPointer(args[0], NAME);
    Py_ssize_t header_bytes = PyLong_AsSsize_t(args[2]);
    if (!t || (header_bytes == -1 && PyErr_Occurred()) || PyObject_GetBuffer(args[1], &body, PyBUF_SIMPLE)) return NULL;
    request r = {.t = t, .body = body.buf, .header_bytes = header_bytes, .body_bytes = body.len};
    if (header_bytes < 0 || header_bytes > body.len) {
        PyErr_SetString(PyExc_ValueError, "the header is longer than the body");
        goto done;
    }
    if (!(places = PyBytes_FromStringAndSize(NULL, t->n.features * (int64_t)sizeof(place)))) goto done;
    r.places = (place *)(void *)PyBytes_AsString(places);
    if (!lay_out(&r)) {
        result = Py_None, Py_INCREF(result);
        goto done;
    }
    PyObject *answer = answer_of(&r), *parts = parts_of(&r), *inputs = inputs_of(&r), *offsets = offsets_of(&r);
    PyObject *dense = PyBytes_FromStringAndSize((const char *)t->dense_at, t->n.dense * 8);
    if (answer && parts && inputs && offsets && dense)
        result = Py_BuildValue("OLLLLOOOOOL", places, (long long)r.ids, (long long)r.vectors, (long long)r.row_bytes,
                               (long long)r.out_bytes, answer, parts, inputs, offsets, dense, (long long)r.rows);
    Py_XDECREF(answer), Py_XDECREF(parts), Py_XDECREF(inputs), Py_XDECREF(offsets), Py_XDECREF(dense);
done:
    Py_XDECREF(places);
    PyBuffer_Release(&body);
    return result;
}

static PyObject *py_numbers(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Py_buffer header;
    PyObject *result = NULL;
    if (n != 2) return PyErr_Format(PyExc_TypeError, "numbers takes 2 arguments, got %zd", n);
    const template *t = PyCapsule_GetPointer(args[0], NAME);
    if (!t || PyObject_GetBuffer(args[1], &header, PyBUF_SIMPLE)) return NULL;
    request r = {.t = t, .body = header.buf, .header_bytes = header.len, .body_bytes = header.len};
    if (walk(&r)) result = PyBytes_FromStringAndSize((const char *)t->numbers, t->n.holes * 8);
    else result = Py_None, Py_INCREF(result);
    PyBuffer_Release(&header);
    return result;
}

static PyMethodDef methods[] = {
    {"skeleton", py_skeleton, METH_O, NULL},
    {"spans", (PyCFunction)(void (*)(void))py_spans, METH_FASTCALL, NULL},
    {"template", (PyCFunction)(void (*)(void))py_template, METH_FASTCALL, NULL},
    {"numbers", (PyCFunction)(void (*)(void))py_numbers, METH_FASTCALL, NULL},
    {"match", (PyCFunction)(void (*)(void))py_match, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_headers", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__headers(void) { return PyModule_Create(&module); }
