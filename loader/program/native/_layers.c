/* Runs dense layers over a request's vectors and tensors in one call: the Python module over `_layers.h`.
 *
 * run(layers, pieces, sources, weights, inputs, outputs, rows, scores_at, threads)
 *   returns the first row with a non-finite score, or -1
 *   layers, pieces, sources: int64 [n, fields of LAYER_FIELDS, PIECE_FIELDS, SOURCE_FIELDS], as bytes
 *   weights: fp32, at each layer's weights_at; inputs, outputs: a request's buffers, unaligned
 * LAYER_FIELDS, PIECE_FIELDS, SOURCE_FIELDS: field names in order, for callers to check theirs
 * PANEL: outputs side by side in `weights`
 * isas(), use(name): as in quant/cpu/native/_native.c
 *
 * A layer's input is its pieces side by side: sources (tensors of the request) or outputs of earlier layers.
 * The last layer's outputs are the scores: fp32 [rows, width] at byte scores_at of `outputs`. TILE rows at a
 * time pass all layers, to stay in the cache. All sizes are checked before a read. The GIL is released. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include "_processor.h"
#endif
#include "_arguments.h"
#include "_pool.h"
#include "_layers_types.h"

#if defined(__x86_64__)
extern const layers_kernel layers_avx512, layers_avx2;
#elif defined(__aarch64__)
extern const layers_kernel layers_neon;
#endif
extern const layers_kernel layers_portable;

static const layers_kernel *available[3], *active;
static int n_available;

/* activation: one of `activation`. pieces: how many of the pieces are this layer's. */
#define LAYER_FIELDS(F) F(depth) F(width) F(weights_at) F(activation) F(pieces)
/* of: the number of a source, or -1 - the number of a layer. */
#define PIECE_FIELDS(F) F(of) F(width)
/* at: bytes in the output buffer if is_output, else in the input buffer. row_bytes: between rows.
 * is_half: fp16, else fp32. width: values of a row. */
#define SOURCE_FIELDS(F) F(is_output) F(at) F(row_bytes) F(is_half) F(width)
#define MEMBER(name) int64_t name;
#define FIELD_NAME(name) #name,
typedef struct { LAYER_FIELDS(MEMBER) } layer_fields;
typedef struct { PIECE_FIELDS(MEMBER) } piece_fields;
typedef struct { SOURCE_FIELDS(MEMBER) } source_fields;
static const char *const layer_names[] = {LAYER_FIELDS(FIELD_NAME) NULL};
static const char *const piece_names[] = {PIECE_FIELDS(FIELD_NAME) NULL};
static const char *const source_names[] = {SOURCE_FIELDS(FIELD_NAME) NULL};
enum activation { NONE = 0, RELU = 1, SIGMOID = 2, TANH = 3 };

enum { TILE = 64, LARGEST_WIDTH = 1 << 20, TILE_FLOATS = 1 << 18 };

typedef struct {
    const layer_fields *layers;
    const piece_fields *pieces;
    const source_fields *sources;
    const float *weights;
    const uint8_t *inputs;
    uint8_t *outputs;
    int64_t n_layers, n_pieces, n_sources, rows, scores_at;
    int64_t gathered; /* floats of the widest input that is put together */
    int64_t row_floats; /* floats of scratch a row */
    int64_t tile_rows;
    int parts;
    float *scratch;
    int64_t *bad; /* of each part: its first row with a score that is not finite, or -1 */
} call;

static int64_t padded(int64_t width) { return (width + PANEL / 2 - 1) / (PANEL / 2) * (PANEL / 2); }

/* ---- running: each part takes an equal range of the rows, tile by tile ---- */

static void gather_source(const call *c, const piece_fields *p, int64_t row, int64_t rows, float *to,
                          int64_t stride) {
    const source_fields *s = c->sources + p->of;
    const uint8_t *from = (s->is_output ? c->outputs : c->inputs) + s->at + row * s->row_bytes;
    for (int64_t r = 0; r < rows; r++, from += s->row_bytes, to += stride) {
        if (s->is_half) active->from_half(from, p->width, to);
        else memcpy(to, from, (size_t)p->width * sizeof(float));
    }
}

static void activate(float *values, int64_t n, int64_t activation) {
    if (activation == SIGMOID)
        for (int64_t i = 0; i < n; i++) values[i] = (float)(1.0 / (1.0 + exp(-(double)values[i])));
    else if (activation == TANH)
        for (int64_t i = 0; i < n; i++) values[i] = (float)tanh((double)values[i]);
}

/* Returns the outputs of layer `number`: [rows, padded width], behind the gathered input. */
static float *outputs_of(const call *c, int64_t number, int64_t rows, float *scratch) {
    float *at = scratch + rows * c->gathered;
    for (int64_t l = 0; l < number; l++) at += rows * padded(c->layers[l].width);
    return at;
}

/* Returns the first of these rows with a score that is not finite, or -1. */
static int64_t run_tile(const call *c, int64_t row, int64_t rows, float *scratch) {
    const piece_fields *p = c->pieces;
    const layer_fields *l = c->layers;
    float *out = NULL;
    for (int64_t n = 0; n < c->n_layers; n++, p += l->pieces, l++) {
        tile t = {.weights = c->weights + l->weights_at, .out = outputs_of(c, n, rows, scratch), .rows = rows,
                  .depth = l->depth, .width = padded(l->width), .out_stride = padded(l->width),
                  .is_relu = l->activation == RELU};
        if (l->pieces == 1 && p->of < 0) {
            t.in = outputs_of(c, -1 - p->of, rows, scratch), t.in_stride = padded(p->width);
        } else {
            float *to = scratch;
            for (int64_t k = 0; k < l->pieces; to += p[k].width, k++) {
                if (p[k].of >= 0) {
                    gather_source(c, p + k, row, rows, to, l->depth);
                    continue;
                }
                const float *from = outputs_of(c, -1 - p[k].of, rows, scratch);
                for (int64_t r = 0; r < rows; r++)
                    memcpy(to + r * l->depth, from + r * padded(p[k].width),
                           (size_t)p[k].width * sizeof(float));
            }
            t.in = scratch, t.in_stride = l->depth;
        }
        active->layer(&t);
        out = t.out;
        for (int64_t r = 0; l->activation > RELU && r < rows; r++)
            activate(out + r * t.out_stride, l->width, l->activation);
    }
    const int64_t width = c->layers[c->n_layers - 1].width;
    int64_t bad = -1;
    uint8_t *scores = c->outputs + c->scores_at + row * width * (int64_t)sizeof(float);
    for (int64_t r = 0; r < rows; r++, out += padded(width), scores += width * (int64_t)sizeof(float)) {
        for (int64_t k = 0; k < width && bad < 0; k++)
            if (!isfinite(out[k])) bad = row + r;
        memcpy(scores, out, (size_t)width * sizeof(float));
    }
    return bad;
}

static void score_part(const void *argument, int part) {
    const call *c = argument;
    const int64_t end = c->rows * (part + 1) / c->parts;
    float *scratch = c->scratch + part * c->tile_rows * c->row_floats;
    c->bad[part] = -1;
    for (int64_t row = c->rows * part / c->parts; row < end; row += c->tile_rows) {
        const int64_t rows = end - row < c->tile_rows ? end - row : c->tile_rows;
        const int64_t bad = run_tile(c, row, rows, scratch);
        if (bad >= 0 && c->bad[part] < 0) c->bad[part] = bad;
    }
}

/* ---- validation ---- */

static int unsound(const char *what) {
    PyErr_SetString(PyExc_ValueError, what);
    return 0;
}

/* Whether a piece is a source that lies in its buffer, or a layer before layer `number`, of this width. */
static int is_sound_piece(const call *c, const piece_fields *p, int64_t number, const Py_buffer *in,
                          const Py_buffer *out) {
    if (p->width < 1 || p->width > LARGEST_WIDTH) return 0;
    if (p->of < 0) return p->of >= -number && c->layers[-1 - p->of].width == p->width;
    if (p->of >= c->n_sources) return 0;
    const source_fields *s = c->sources + p->of;
    if (s->width != p->width) return 0;
    return lies_in(s->is_output ? out : in, s->at, c->rows, s->row_bytes, p->width * (s->is_half ? 2 : 4));
}

/* Checks all sizes and sets the scratch floats per row; returns 0 with ValueError set for a misfit. */
static int check(call *c, const Py_buffer *weights, const Py_buffer *in, const Py_buffer *out) {
    const piece_fields *p = c->pieces;
    if (c->n_layers < 1 || c->rows < 0) return unsound("layers: expected one at least, and rows");
    for (int64_t n = 0; n < c->n_layers; n++) {
        const layer_fields *l = c->layers + n;
        if (l->width < 1 || l->width > LARGEST_WIDTH || l->depth < 1 || l->activation < NONE
            || l->activation > TANH || l->weights_at < 0 || l->weights_at > weights->len / 4 || l->pieces < 1
            || l->pieces > c->n_pieces - (p - c->pieces))
            return unsound("layers: a size, an activation or a number of pieces is out of range");
        int64_t depth = 0, is_gathered = l->pieces > 1 || p->of >= 0;
        for (int64_t k = 0; k < l->pieces; k++, p++) {
            if (!is_sound_piece(c, p, n, in, out))
                return unsound("layers: a piece does not lie in its buffer, or is no layer before");
            depth += p->width;
        }
        if (depth != l->depth
            || !lies_in(weights, l->weights_at * 4, padded(l->width), (depth + 1) * 4, (depth + 1) * 4))
            return unsound("layers: a layer's weights do not lie in their buffer");
        if (is_gathered && depth > c->gathered) c->gathered = depth;
        c->row_floats += padded(l->width);
    }
    c->row_floats += c->gathered;
    const int64_t score_bytes = c->layers[c->n_layers - 1].width * 4;
    if (!lies_in(out, c->scores_at, c->rows, score_bytes, score_bytes))
        return unsound("layers: the scores do not lie in the output buffer");
    return 1;
}

/* Runs a checked call; returns the first row with a non-finite score, -1: none, -2: no memory. */
static int64_t run_rows(call *c, int64_t threads) {
    int64_t bad[MAX_THREADS], first = -1;
    const int64_t fitting = TILE_FLOATS / c->row_floats;
    const int64_t most = fitting > TILE ? TILE : fitting < 8 ? 8 : fitting;
    const int64_t tiles = (c->rows + most - 1) / most;
    c->parts = (int)(tiles < threads ? tiles : threads < MAX_THREADS ? threads : MAX_THREADS);
    if (c->parts < 1) return -1; /* no rows */
    c->tile_rows = c->rows < most ? c->rows : most;
    c->bad = bad;
    c->scratch = malloc((size_t)(c->parts * c->tile_rows * c->row_floats) * sizeof(float));
    if (!c->scratch) return -2;
    run_parts(c->parts, c->parts, score_part, c);
    free(c->scratch);
    for (int part = c->parts - 1; part >= 0; part--)
        if (bad[part] >= 0) first = bad[part];
    return first;
}

/* ---- Python ---- */

static PyObject *py_run(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    enum { LAYERS, PIECES, SOURCES, WEIGHTS, INPUTS, OUTPUTS };
    arguments a;
    int64_t first = -2;
    (void)self;
    if (!take_arguments("run", "bbbbbwiii", args, n, &a)) return NULL;
    const Py_buffer *b = a.b;
    call c = {.layers = b[LAYERS].buf, .pieces = b[PIECES].buf, .sources = b[SOURCES].buf,
              .weights = b[WEIGHTS].buf, .inputs = b[INPUTS].buf, .outputs = b[OUTPUTS].buf,
              .n_layers = b[LAYERS].len / (Py_ssize_t)sizeof(layer_fields),
              .n_pieces = b[PIECES].len / (Py_ssize_t)sizeof(piece_fields),
              .n_sources = b[SOURCES].len / (Py_ssize_t)sizeof(source_fields),
              .rows = a.n[0], .scores_at = a.n[1]};
    if (check(&c, b + WEIGHTS, b + INPUTS, b + OUTPUTS)) {
        Py_BEGIN_ALLOW_THREADS
        first = run_rows(&c, a.n[2]);
        Py_END_ALLOW_THREADS
        if (first == -2) PyErr_NoMemory();
    }
    release(&a);
    return first == -2 ? NULL : PyLong_FromLongLong(first);
}

static PyObject *py_isas(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    PyObject *names = PyTuple_New(n_available);
    for (int i = 0; names && i < n_available; i++)
        PyTuple_SetItem(names, i, PyUnicode_FromString(available[i]->name));
    return names;
}

static PyObject *py_use(PyObject *self, PyObject *name) {
    (void)self;
    for (int i = 0; i < n_available; i++)
        if (PyUnicode_CompareWithASCIIString(name, available[i]->name) == 0) {
            active = available[i];
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "instruction set %R: %s", name,
                        "this processor does not run it; isas() lists what it runs");
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))py_run, METH_FASTCALL,
     "Runs dense layers over a request's buffers."},
    {"isas", py_isas, METH_NOARGS, "The instruction sets that this processor runs, fastest first."},
    {"use", py_use, METH_O, "Selects an instruction set."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_layers", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__layers(void) {
    n_available = 0;
#if defined(__x86_64__)
    processor found = find_processor();
    if (found.avx512) available[n_available++] = &layers_avx512;
    if (found.avx2) available[n_available++] = &layers_avx2;
#elif defined(__aarch64__)
    available[n_available++] = &layers_neon;
#endif
    available[n_available++] = &layers_portable;
    active = available[0];
    open_pool();
    PyObject *made = PyModule_Create(&module);
    if (made && add_names(made, "LAYER_FIELDS", layer_names) && add_names(made, "PIECE_FIELDS", piece_names)
        && add_names(made, "SOURCE_FIELDS", source_names)
        && PyModule_AddIntConstant(made, "PANEL", PANEL) == 0)
        return made;
    Py_XDECREF(made);
    return NULL;
}
