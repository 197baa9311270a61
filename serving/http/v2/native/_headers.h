/* What `_headers.c`, which makes templates, and `_match.c`, which compares headers with them, share. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { MOST_DIGITS = 18 };

static inline int is_digit(char c) { return c >= '0' && c <= '9'; }
static inline int is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

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

#define NAME "tableside.template"

PyObject *py_match(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *py_numbers(PyObject *self, PyObject *const *args, Py_ssize_t n);
