/* Shared by `_headers.c`, which makes templates, and `_match.c`, which matches headers. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { MOST_DIGITS = 18 };

static inline int is_digit(char c) { return c >= '0' && c <= '9'; }
static inline int is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

/* A request tensor's role. Up to WEIGHTS `owner` is a feature, for DENSE a dense tensor, else unused. */
enum role { IDS, VALUES, LENGTHS, WEIGHTS, DENSE, KJT_VALUES, KJT_LENGTHS, KJT_WEIGHTS, ROLES };
/* The kind of a number in the response. */
enum told { COUNT = 0, BYTES = 1, ID = 2, TOLD = 3 };

/* The words of a template: one `counts`, then the arrays in this order.
 * id_hole: the id's hole, or -1. score_values: a row's, or 0. apart: pooled vectors lie side by side (kjt),
 * `row_bytes` apart; unpooled_item: bytes of an unpooled value. in_order: the response's binary part is the
 * whole output buffer; else `parts`. */
typedef struct {
    int64_t holes, id_hole, tensors, features, dense, sources, parts, told, score_values, most_out_bytes;
    int64_t apart, row_bytes, unpooled_item, in_order, has_offsets;
} counts;
typedef struct { int64_t role, owner, item, dims, first_hole, second_hole, size_hole, width; } tensor;
typedef struct { int64_t is_pooled, vector_bytes, row_bytes; } feature;
typedef struct { int64_t what, output; } telling; /* output: feature, then scores, kjt, sequences, offsets */
typedef struct { int64_t ids_at, ids, lengths_at, bag_length, bags, weights_at, out_at, found_at; } place;
typedef struct { int64_t weights, count, out_bytes; } laid; /* of a feature */
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
    int64_t *numbers; /* from here on each match, which holds the GIL, rewrites all */
    laid *laid;
    output *outputs;
    int64_t *dense_at, *dense_rows;
} template;

#define NAME "tableside.template"

PyObject *py_match(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_numbers(PyObject *self, PyObject *const *args, Py_ssize_t n);
