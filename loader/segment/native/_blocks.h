/* What reads rows in blocks (_blocks.c), for threads that do so (_threads.c). */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>

#define INTERN __attribute__((visibility("hidden")))

enum { HERE = 0, LATE = 1, CORRUPT = 2, LEFT = 3, BROKEN = 128 };
enum { PAGE = 4096 };

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

INTERN size_t buffer_bytes(const place *p);
/* Reads rows that are left, and waits for them; returns how many still are. */
INTERN int64_t read_left(const reading *r, const limits *most);
/* Asks the disk for the blocks of rows, `most` of them. */
INTERN void ask_rows(const place *p, const int64_t *rows, int64_t n, int64_t most);

/* Takes six arguments as `fetch` does: 0: an error is set, and none of the buffers is held. */
INTERN int hold_reading(PyObject *const *args, const char *name, Py_buffer *held, reading *r);
INTERN void release(Py_buffer *held, int count);
INTERN int is_place(const Py_buffer *given, place *p);

INTERN void forget_pools(void);
INTERN PyObject *py_in_threads(PyObject *self, PyObject *const *args, Py_ssize_t n);
INTERN PyObject *py_ask(PyObject *self, PyObject *const *args, Py_ssize_t n);
