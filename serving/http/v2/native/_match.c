/* `match` and `numbers` of `_headers.c`: a header is walked side by side with a template. */
#include "_headers.h"

static const int64_t LARGEST_DIMENSION = 1LL << 40, LARGEST_LENGTH = INT32_MAX, MOST_BYTES = 1LL << 50;

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
            while (p < end && *p != '"' && *p != '\\' && *p >= 0x20 && (unsigned char)*p < 0x80) p++;
            if (p == start) return 0;
            r->id = start, r->id_bytes = p - start;
            continue;
        }
        int64_t value = 0;
        while (p < end && is_digit(*p) && p - start < MOST_DIGITS) value = 10 * value + (*p++ - '0');
        if (p == start || (*start == '0' && p - start > 1)) return 0; /* no literal goes on like a number */
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

typedef struct { int64_t values, ids, lengths_from, lengths, bags, weights; } compact; /* a kjt */

/* Reads every tensor's shape, checks its size, and notes it where it belongs. */
static int read_tensors(request *r, compact *kjt) {
    const template *t = r->t;
    int64_t from = r->header_bytes, to = r->header_bytes; /* where its bytes are, and where they will be */
    int64_t most = r->body_bytes - r->header_bytes;
    for (int64_t k = 0; k < t->n.tensors; k++) {
        const tensor *x = t->tensors + k;
        int64_t n, bytes, first = t->numbers[x->first_hole];
        int64_t second = x->dims == 2 ? t->numbers[x->second_hole] : 1;
        if (first >= LARGEST_DIMENSION || second >= LARGEST_DIMENSION) return 0;
        if (__builtin_mul_overflow(first, second, &n) || __builtin_mul_overflow(n, x->item, &bytes)) return 0;
        if (bytes != t->numbers[x->size_hole] || bytes > most) return 0;
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
            if (!t->features[x->owner].is_pooled) t->laid[x->owner].count = from; /* to be added up */
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
        int64_t lengths_at = kjt->lengths + 4 * kjt->bags * f;
        int64_t weights_at = kjt->weights < 0 ? -1 : kjt->weights + 4 * first;
        r->places[f] = (place){.ids_at = kjt->values + 8 * first, .ids = ids, .lengths_at = lengths_at,
                               .bags = kjt->bags, .weights_at = weights_at, .found_at = -1};
        first += ids;
    }
    return first == kjt->ids;
}

/* Whether each feature's parts fit, as `serving.http.inputs.tensors.feature_inputs` checks. */
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
        int64_t next = pooled->bytes, rest = at - next, item = t->n.unpooled_item ? t->n.unpooled_item : 1;
        *unpooled = (output){next, rest / item, rest};
        for (int64_t f = 0; f < t->n.features; f++) {
            output *o = t->outputs + f;
            const feature *x = t->features + f;
            if (x->is_pooled) o->at = pooled->bytes ? column : 0, column += x->vector_bytes;
            else o->at = next, next += o->bytes;
        }
    }
    for (int64_t f = 0; f < t->n.features; f++) r->places[f].out_at = t->outputs[f].at;
    for (int64_t k = 0; k < t->n.sources; k++) {
        int64_t from = t->sources[k], rows = from < 0 ? t->dense_rows[-1 - from] : t->outputs[from].count;
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
    if (!walk(r) || !read_tensors(r, &kjt)) return 0;
    return (t->n.apart ? cut_up(r, &kjt) : check_parts(r)) && place_vectors(r);
}

PyObject *py_match(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Py_buffer body;
    PyObject *result = NULL, *places = NULL;
    if (n != 3) return PyErr_Format(PyExc_TypeError, "match takes 3 arguments, got %zd", n);
    const template *t = PyCapsule_GetPointer(args[0], NAME);
    Py_ssize_t header_bytes = PyLong_AsSsize_t(args[2]);
    if (!t || (header_bytes == -1 && PyErr_Occurred())) return NULL;
    if (PyObject_GetBuffer(args[1], &body, PyBUF_SIMPLE)) return NULL;
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
    PyObject *answer = answer_of(&r), *parts = parts_of(&r);
    PyObject *inputs = inputs_of(&r), *offsets = offsets_of(&r);
    PyObject *dense = PyBytes_FromStringAndSize((const char *)t->dense_at, t->n.dense * 8);
    if (answer && parts && inputs && offsets && dense)
        result = Py_BuildValue("OLLLLOOOOOL", places, (long long)r.ids, (long long)r.vectors,
                               (long long)r.row_bytes, (long long)r.out_bytes, answer, parts, inputs, offsets,
                               dense, (long long)r.rows);
    Py_XDECREF(answer), Py_XDECREF(parts), Py_XDECREF(inputs), Py_XDECREF(offsets), Py_XDECREF(dense);
done:
    Py_XDECREF(places);
    PyBuffer_Release(&body);
    return result;
}

PyObject *py_numbers(PyObject *self, PyObject *const *args, Py_ssize_t n) {
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
