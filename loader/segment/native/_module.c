/* Rows of a table's file on a disk, in blocks with checksums (loader.segment.blocks).
 * The rows begin at a page of the file. Block k is their page k, PAGE bytes, the last one fewer; a row lies in one
 * block, or in some that follow each other. A block's checksum is the CRC-32C of the file's seed and the block's
 * number, int64 little-endian, and of its bytes: a block that was written to another place, or belongs to another
 * file, is not taken for this one.
 *
 * sums(rows, seed, first_block, out): writes the checksums of blocks, from this number on. rows: their bytes; out:
 *   uint32 [blocks]
 * fetch(place, checked, regions, rows, out, state, is_ready) -> rows that are left. Copies rows of a table, and
 *   writes what came of each to `state`: HERE; CORRUPT where a block is not what was written, after it was read once
 *   more; BROKEN and the error's number where it cannot be read.
 *     place     int64: fd; bytes of row 0 and of the first checksum in the file; its seed; row_bytes; rows of the
 *               table; address of row 0 where the file is mapped, or 0; believed_ms and trusted_ms, see _blocks.c
 *     checked   uint8 [blocks / 8 + 1], bit n: block n was read and checked
 *     regions   uint8: what looks found, REGION_SIZE bytes for each REGION_BYTES of the rows, and two more
 *     rows      int64 [n], ascending
 *     out       uint8 [n, row_bytes]
 *     state     uint8 [n], read and written: a row is read if its state is LEFT
 *     is_ready  reads no block that a disk has to bring: such rows stay LEFT. Rows of checked blocks are read through
 *               the mapping, where the page cache has them, as mincore said a moment ago. Who cuts the file in that
 *               moment ends the process.
 * bring(place, checked, regions, rows, out, state, depth, patience_ms, all_ms) -> rows that are left. As `fetch`,
 *   after the disk was asked for the next `depth` rows' blocks at a time, so that one thread has many reads under
 *   way. Waits no longer than patience_ms for a row, and all_ms for all: that row and those behind it stay LEFT.
 *   A file system whose queue is full makes it wait longer.
 * away(place, checked, regions, rows, out) -> how many of these rows may not be read in the mapping now: of the
 *   others the blocks were checked, and the page cache has their pages. rows: int64 [n], at any alignment; those that
 *   the table has not do not count. out: int64 [n], gets the places in `rows` of those that are away
 * in_threads, ask: see _threads.c
 */
#include "_blocks.h"

#include <stdlib.h>
#include <string.h>

/* Whether bits and regions are those of a table. */
static int fits(const place *p, const Py_buffer *checked, const Py_buffer *regions) {
    int64_t bytes, last;
    return p->at >= 0 && p->at % PAGE == 0 && p->mapped % PAGE == 0 && p->sums_at >= 0 && p->row_bytes >= 1
           && p->rows >= 1 && p->believed_ms >= 0 && p->trusted_ms >= 0
           && !__builtin_mul_overflow(p->rows, p->row_bytes, &bytes) && !__builtin_add_overflow(bytes, p->at, &last)
           && checked->len > blocks_of(p) / 8 && (uintptr_t)regions->buf % sizeof(uint32_t) == 0
           && regions->len >= (bytes / REGION_BYTES + 2) * (int64_t)sizeof(region);
}

/* Whether all that `fetch` reads and writes lies in its buffers. */
static int is_sound(const place *p, int64_t n, const Py_buffer *checked, const Py_buffer *regions,
                    const Py_buffer *rows, const Py_buffer *out, const Py_buffer *state) {
    int64_t bytes;
    if (!fits(p, checked, regions) || rows->len % 8 || state->len != n
        || __builtin_mul_overflow(n, p->row_bytes, &bytes) || out->len != bytes) return 0;
    for (int64_t i = 0; i < n; i++)
        if (((const int64_t *)rows->buf)[i] < 0 || ((const int64_t *)rows->buf)[i] >= p->rows) return 0;
    return 1;
}

int is_place(const Py_buffer *given, place *p) {
    if (given->len != sizeof *p) return 0;
    memcpy(p, given->buf, sizeof *p);
    return 1;
}

static PyObject *py_away(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    arguments a;
    int64_t found = -1;
    place p;
    if (!take_arguments("away", "bwwbw", args, n, &a)) return NULL;
    const Py_buffer *b = a.b;
    if (!is_place(b, &p) || b[3].len % 8 || b[4].len < b[3].len || !fits(&p, b + 1, b + 2))
        PyErr_SetString(PyExc_ValueError, "away: rows or bits do not fit this table");
    else {
        Py_BEGIN_ALLOW_THREADS
        found = away(&p, b[1].buf, b[2].buf, b[3].buf, b[3].len / 8, b[4].buf);
        Py_END_ALLOW_THREADS
    }
    release(&a);
    return found < 0 ? NULL : PyLong_FromLongLong(found);
}

size_t buffer_bytes(const place *p) { return (size_t)((p->row_bytes / PAGE + 2) * (PAGE + 4)); }

int read_arguments(arguments *a, const char *name, reading *r) {
    const Py_buffer *b = a->b;
    *r = (reading){.checked = b[1].buf, .regions = b[2].buf, .rows = b[3].buf, .n = b[3].len / 8,
                   .out = b[4].buf, .state = b[5].buf};
    if (is_place(b, &r->p) && is_sound(&r->p, r->n, b + 1, b + 2, b + 3, b + 4, b + 5)) return 1;
    release(a);
    PyErr_Format(PyExc_ValueError, "%s: rows, states or bits do not fit this table", name);
    return 0;
}

/* most: `bring`; NULL: `fetch`. */
static PyObject *read_rows(arguments *a, const char *name, const limits *most, int is_ready) {
    reading r;
    int64_t left = -1;
    if (!read_arguments(a, name, &r)) return NULL;
    if (!(r.buffer = malloc(buffer_bytes(&r.p)))) PyErr_NoMemory();
    else {
        Py_BEGIN_ALLOW_THREADS
        left = most ? bring(&r, most) : fetch(&r, is_ready);
        Py_END_ALLOW_THREADS
    }
    free(r.buffer);
    release(a);
    return left < 0 ? NULL : PyLong_FromLongLong(left);
}

static PyObject *py_fetch(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    arguments a;
    return take_arguments("fetch", "bwwbwwi", args, n, &a) ? read_rows(&a, "fetch", NULL, a.n[0] != 0) : NULL;
}

static PyObject *py_bring(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    arguments a;
    if (!take_arguments("bring", "bwwbwwiii", args, n, &a)) return NULL;
    const limits most = {a.n[0], a.n[1], a.n[2]};
    if (most.depth >= 1 && most.patience >= 0 && most.all >= 0) return read_rows(&a, "bring", &most, 0);
    release(&a);
    return PyErr_Format(PyExc_ValueError, "bring: a limit is negative, or the depth is 0");
}

static PyMethodDef methods[] = {
    {"sums", (PyCFunction)(void (*)(void))py_sums, METH_FASTCALL, NULL},
    {"fetch", (PyCFunction)(void (*)(void))py_fetch, METH_FASTCALL, NULL},
    {"bring", (PyCFunction)(void (*)(void))py_bring, METH_FASTCALL, NULL},
    {"in_threads", (PyCFunction)(void (*)(void))py_in_threads, METH_FASTCALL, NULL},
    {"ask", (PyCFunction)(void (*)(void))py_ask, METH_FASTCALL, NULL},
    {"away", (PyCFunction)(void (*)(void))py_away, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_blocks", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__blocks(void) {
    choose_sums();
    PyObject *made = PyModule_Create(&module);
    if (made && (PyModule_AddIntConstant(made, "REGION_BYTES", REGION_BYTES)
                 || PyModule_AddIntConstant(made, "REGION_SIZE", sizeof(region)))) Py_CLEAR(made);
    return made;
}
