/* Rows of a file in blocks (_module.c says what they are): their checksums (_sums.c), what reads them (_blocks.c), and
 * threads that do (_threads.c). */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include "_arguments.h"

#define INTERN __attribute__((visibility("hidden")))

enum { HERE = 0, LATE = 1, CORRUPT = 2, LEFT = 3, BROKEN = 128 };
enum { PAGE = 4096, REGION_BYTES = 1 << 21 };

typedef struct { int64_t fd, at, sums_at, seed, row_bytes, rows, mapped, believed_ms, trusted_ms; } place;
/* seen_ms: of the last look, never 0; 0: there was none. touches: since `since_ms`. has_few: the look found less than
 * half of the pages. */
typedef struct { uint32_t seen_ms, since_ms, touches, has_few; } region;

/* Rows to read, as `fetch` says. buffer: room for `buffer_bytes`. */
typedef struct {
    place p;
    uint8_t *checked;
    region *regions;
    const int64_t *rows;
    int64_t n;
    uint8_t *out, *state, *buffer;
} reading;

/* What `bring` waits for, and how long, in milliseconds; depth 0: `fetch` reads instead, and waits. */
typedef struct { int64_t depth, patience, all; } limits;

static inline int64_t blocks_of(const place *p) { return (p->rows * p->row_bytes - 1) / PAGE + 1; }

INTERN void choose_sums(void);
INTERN uint32_t checksum(int64_t seed, int64_t block, const uint8_t *data, size_t size);

INTERN size_t buffer_bytes(const place *p);
INTERN int64_t fetch(const reading *r, int is_ready);
INTERN int64_t bring(const reading *r, const limits *most);
INTERN int64_t away(const place *p, uint8_t *checked, region *regions, const uint8_t *rows, int64_t n, int64_t *out);
/* Reads rows that are left, and waits for them; returns how many still are. */
INTERN int64_t read_left(const reading *r, const limits *most);
/* Asks the disk for the blocks of rows, `most` of them. */
INTERN void ask_rows(const place *p, const int64_t *rows, int64_t n, int64_t most);

/* Reads six buffers as `fetch` takes them; 0: an error is set, and the arguments are released. */
INTERN int read_arguments(arguments *a, const char *name, reading *r);
INTERN int is_place(const Py_buffer *given, place *p);

INTERN PyObject *py_sums(PyObject *self, PyObject *const *args, Py_ssize_t n);
INTERN PyObject *py_in_threads(PyObject *self, PyObject *const *args, Py_ssize_t n);
INTERN PyObject *py_ask(PyObject *self, PyObject *const *args, Py_ssize_t n);
