/* Commands that ask a Redis server for records of rows, and its replies (loader.redis.blocks says what a record is).
 *
 * commands(prefix, block_rows, record_bytes, before, rows) -> bytes: one GETRANGE for each of rows, int64 [n], none
 *   negative, in their order. before: what comes before each.
 * take(data, at, head, rows, to, words, out, state) -> (records taken, bytes of `data` up to the next reply, whether
 *   that is something else than a record). Reads replies from byte `at` on, while they are whole, until each of the
 *   rows has one: `head`, a row, its checksum, CR LF.
 *     head     what comes before a record
 *     rows     int64 [n]: whose records are to come
 *     to       int64 [n]: where each goes in `out` and `state`
 *     words    uint64 [2 + row_bytes / 4]: of the checksums
 *     out      uint8 [any, row_bytes]
 *     state    uint8 [any]: gets HERE, or CORRUPT where the checksum is another
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "_arguments.h"

enum { HERE = 0, CORRUPT = 2, LARGEST = 1 << 29 }; /* bytes of a value in Redis */
enum { HEAD_DIGITS = 5, TAG_DIGITS = 3, NUMBERS_BYTES = 96 }; /* of a key; of a command without its prefix */

static int digits_of(uint64_t n) {
    int digits = 1;
    while (n >= 10) n /= 10, digits++;
    return digits;
}

/* Writes a number as a bulk string. */
static char *put_number(char *to, uint64_t n) {
    const int digits = digits_of(n);
    *to++ = '$', *to++ = (char)('0' + digits), *to++ = '\r', *to++ = '\n';
    for (int i = digits; i--; n /= 10) to[i] = (char)('0' + n % 10);
    to += digits;
    *to++ = '\r', *to++ = '\n';
    return to;
}

static char *put(char *to, const void *from, size_t size) { return (char *)memcpy(to, from, size) + size; }

static char *put_key_end(char *to, uint64_t block) {
    static const char hex[] = "0123456789abcdef";
    for (int i = HEAD_DIGITS + TAG_DIGITS - 1; i >= 0; i--) {
        if (i == TAG_DIGITS - 1) *to++ = '{';
        *to++ = hex[block >> 4 * i & 15];
    }
    return put(to, "}\r\n", 3);
}

enum { PREFIX, BEFORE, ASKED };

/* Writes commands; returns where they end. */
static char *put_commands(char *to, const Py_buffer *b, int64_t block_rows, int64_t record_bytes) {
    const int64_t *rows = b[ASKED].buf, count = b[ASKED].len / 8;
    char start[64];
    const int size = snprintf(start, sizeof start, "*4\r\n$8\r\nGETRANGE\r\n$%zd\r\n",
                              b[PREFIX].len + HEAD_DIGITS + TAG_DIGITS + 2);
    for (int64_t i = 0; i < count; i++) {
        const uint64_t at = (uint64_t)(rows[i] % block_rows * record_bytes);
        to = put(to, b[BEFORE].buf, (size_t)b[BEFORE].len);
        to = put(to, start, (size_t)size);
        to = put(to, b[PREFIX].buf, (size_t)b[PREFIX].len);
        to = put_key_end(to, (uint64_t)(rows[i] / block_rows));
        to = put_number(to, at);
        to = put_number(to, at + (uint64_t)record_bytes - 1);
    }
    return to;
}

static PyObject *py_commands(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    arguments a;
    if (!take_arguments("commands", "biibb", args, n, &a)) return NULL;
    const Py_buffer *b = a.b;
    const int64_t block_rows = a.n[0], record_bytes = a.n[1];
    const int64_t *rows = b[ASKED].buf, count = b[ASKED].len / 8;
    const size_t most = (size_t)b[PREFIX].len + (size_t)b[BEFORE].len + NUMBERS_BYTES;
    int is_sound = b[ASKED].len % 8 == 0 && block_rows > 0 && record_bytes > 0 && record_bytes <= LARGEST / block_rows;
    for (int64_t i = 0; is_sound && i < count; i++) is_sound = rows[i] >= 0;
    char *made = is_sound ? malloc(most * (size_t)count + 1) : NULL, *end = made;
    if (!is_sound) PyErr_SetString(PyExc_ValueError, "commands: a row, or the size of a block, is impossible");
    else if (!made) PyErr_NoMemory();
    else {
        Py_BEGIN_ALLOW_THREADS
        end = put_commands(made, b, block_rows, record_bytes);
        Py_END_ALLOW_THREADS
    }
    PyObject *found = made ? PyBytes_FromStringAndSize(made, end - made) : NULL;
    free(made);
    release(&a);
    return found;
}

static uint32_t checksum(const uint64_t *words, int64_t row, const uint8_t *data, int64_t row_bytes) {
    uint64_t sum = words[0] + words[1] * (uint64_t)row;
    for (int64_t i = 0; i < row_bytes / 4; i++) {
        uint32_t word;
        memcpy(&word, data + 4 * i, 4);
        sum += words[2 + i] * word;
    }
    return (uint32_t)(sum >> 32);
}

enum { DATA, HEAD, ROWS, TO, WORDS, OUT, STATE };

/* Takes records; *at: the byte of the next reply. Returns how many; *is_other: the next reply is none. */
static int64_t take(const Py_buffer *b, int64_t *at, int *is_other) {
    const uint8_t *data = b[DATA].buf, *head = b[HEAD].buf;
    const int64_t n = b[ROWS].len / 8, row_bytes = 4 * (b[WORDS].len / 8 - 2), whole = b[HEAD].len + row_bytes + 6;
    int64_t i = 0;
    for (; i < n; i++, *at += whole) {
        const int64_t left = b[DATA].len - *at, known = left < b[HEAD].len ? left : b[HEAD].len;
        const uint8_t *row = data + *at + b[HEAD].len;
        *is_other = memcmp(data + *at, head, (size_t)known) != 0;
        if (*is_other || left < whole) break;
        if ((*is_other = memcmp(row + row_bytes + 4, "\r\n", 2) != 0)) break;
        const int64_t to = ((const int64_t *)b[TO].buf)[i];
        uint32_t sum;
        memcpy(&sum, row + row_bytes, 4);
        const uint32_t right = checksum(b[WORDS].buf, ((const int64_t *)b[ROWS].buf)[i], row, row_bytes);
        memcpy((uint8_t *)b[OUT].buf + to * row_bytes, row, (size_t)row_bytes);
        ((uint8_t *)b[STATE].buf)[to] = sum == right ? HERE : CORRUPT;
    }
    return i;
}

static int is_sound(const Py_buffer *b, int64_t at) {
    const int64_t n = b[ROWS].len / 8, row_bytes = 4 * (b[WORDS].len / 8 - 2);
    if (b[ROWS].len % 8 || b[TO].len != b[ROWS].len || b[WORDS].len % 8 || row_bytes < 4 || at < 0 || at > b[DATA].len)
        return 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t to = ((const int64_t *)b[TO].buf)[i];
        if (to < 0 || to >= b[STATE].len || to >= b[OUT].len / row_bytes) return 0;
    }
    return 1;
}

static PyObject *py_take(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    arguments a;
    if (!take_arguments("take", "bibbbbww", args, n, &a)) return NULL;
    int64_t at = a.n[0], taken = -1;
    int is_other = 0;
    if (is_sound(a.b, at)) {
        Py_BEGIN_ALLOW_THREADS
        taken = take(a.b, &at, &is_other);
        Py_END_ALLOW_THREADS
    } else PyErr_SetString(PyExc_ValueError, "take: these rows have no place, or the data begins elsewhere");
    release(&a);
    return taken < 0 ? NULL : Py_BuildValue("(LLN)", (long long)taken, (long long)at, PyBool_FromLong(is_other));
}

static PyMethodDef methods[] = {
    {"commands", (PyCFunction)(void (*)(void))py_commands, METH_FASTCALL, NULL},
    {"take", (PyCFunction)(void (*)(void))py_take, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_records", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__records(void) { return PyModule_Create(&module); }
