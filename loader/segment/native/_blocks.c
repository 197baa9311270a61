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
 *               table; address of row 0 where the file is mapped, or 0; believed_ms and trusted_ms, see below
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

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

/* ---- checksums ---- */

static uint32_t byte_sums[256];

static void make_byte_sums(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t sum = n;
        for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? 0x82F63B78u : 0);
        byte_sums[n] = sum;
    }
}

static uint32_t add_slowly(uint32_t sum, const uint8_t *data, size_t size) {
    for (size_t i = 0; i < size; i++) sum = sum >> 8 ^ byte_sums[(sum ^ data[i]) & 255];
    return sum;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2,crc32"))) static uint32_t add_fast(uint32_t sum, const uint8_t *data, size_t size) {
    uint64_t wide = sum;
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    sum = (uint32_t)wide;
    for (; size; data++, size--) sum = _mm_crc32_u8(sum, *data);
    return sum;
}
#endif

static uint32_t (*add)(uint32_t, const uint8_t *, size_t) = add_slowly;

static uint32_t checksum(int64_t seed, int64_t block, const uint8_t *data, size_t size) {
    uint8_t numbers[16];
    for (int i = 0; i < 8; i++) {
        numbers[i] = (uint8_t)((uint64_t)seed >> 8 * i);
        numbers[8 + i] = (uint8_t)((uint64_t)block >> 8 * i);
    }
    return ~add(add(~0u, numbers, 16), data, size);
}

/* Takes the buffers of `count` arguments; bit n of `writable`: the n-th is written. 0: an error is set, none is held. */
static int hold(PyObject *const *args, int count, unsigned writable, Py_buffer *held) {
    for (int i = 0; i < count; i++) {
        if (!PyObject_GetBuffer(args[i], held + i, writable >> i & 1 ? PyBUF_WRITABLE : PyBUF_SIMPLE)) continue;
        while (i--) PyBuffer_Release(held + i);
        return 0;
    }
    return 1;
}

void release(Py_buffer *held, int count) {
    while (count--) PyBuffer_Release(held + count);
}

static PyObject *py_sums(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    Py_buffer b[2];
    if (n != 4) return PyErr_Format(PyExc_TypeError, "sums takes 4 arguments, got %zd", n);
    const long long seed = PyLong_AsLongLong(args[1]), first = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred() || !hold((PyObject *const[]){args[0], args[3]}, 2, 0x2, b)) return NULL;
    const Py_buffer *rows = b, *out = b + 1;
    const int64_t blocks = rows->len / PAGE + (rows->len % PAGE != 0);
    const int fits = first >= 0 && out->len == 4 * blocks;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (int64_t k = 0; k < blocks; k++) {
            const int64_t at = k * PAGE, size = rows->len - at < PAGE ? rows->len - at : PAGE;
            const uint32_t sum = checksum(seed, first + k, (const uint8_t *)rows->buf + at, (size_t)size);
            memcpy((char *)out->buf + 4 * k, &sum, 4);
        }
        Py_END_ALLOW_THREADS
    }
    release(b, 2);
    if (!fits) return PyErr_Format(PyExc_ValueError, "sums: these blocks have no room for their checksums");
    Py_RETURN_NONE;
}

/* ---- rows ---- */

typedef struct { int64_t first, blocks; } span; /* blocks that follow each other */

static span span_of(const place *p, int64_t row) {
    const int64_t at = row * p->row_bytes, first = at / PAGE;
    return (span){first, (at + p->row_bytes - 1) / PAGE - first + 1};
}

static int has(const span *s, const span *other) {
    return other->first >= s->first && other->first + other->blocks <= s->first + s->blocks;
}

static int64_t blocks_of(const place *p) { return (p->rows * p->row_bytes - 1) / PAGE + 1; }

/* Bytes of a span: the last block may be short. */
static int64_t bytes_of(const place *p, const span *s) {
    const int64_t from = s->first * PAGE, to = from + s->blocks * PAGE, end = p->rows * p->row_bytes;
    return (to < end ? to : end) - from;
}

/* What a read gave; or BROKEN and more: the error's number. */
enum { READ, NOT_READY, DAMAGED };

/* Whether the page cache has bytes of the file, which is mapped from `mapped` - `at` on. */
static int is_cached(const place *p, int64_t at, int64_t size) {
    unsigned char there[64];
    if (!p->mapped) return 0;
    uintptr_t from = (uintptr_t)(p->mapped - p->at + at) & ~(uintptr_t)(PAGE - 1);
    const uintptr_t end = (uintptr_t)(p->mapped - p->at + at + size);
    for (; from < end; from += sizeof there * PAGE) {
        const size_t part = end - from < sizeof there * PAGE ? end - from : sizeof there * PAGE;
        if (mincore((void *)from, part, there)) return 0;
        for (size_t i = 0; i * PAGE < part; i++)
            if (!(there[i] & 1)) return 0;
    }
    return 1;
}

static int read_at(const place *p, uint8_t *to, int64_t size, int64_t at, int is_ready) {
    int may_wait = !is_ready;
    while (size) {
        struct iovec part = {to, (size_t)size};
        const ssize_t got = may_wait ? pread((int)p->fd, to, (size_t)size, (off_t)at)
                                     : preadv2((int)p->fd, &part, 1, (off_t)at, RWF_NOWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && !may_wait && (errno == EOPNOTSUPP || errno == EINVAL || errno == ENOSYS)) {
            if (!is_cached(p, at, size)) return NOT_READY; /* a file system that does not tell */
            may_wait = 1;
            continue;
        }
        if (got < 0 && is_ready) return NOT_READY;
        if (got < 0) return BROKEN | (errno & 127);
        if (!got) return DAMAGED; /* the file was cut */
        to += got, at += got, size -= got;
    }
    return READ;
}

/* Reads a span to `to`, its checksums behind it. */
static int read_checked(const place *p, const span *s, uint8_t *to, int is_ready) {
    const int64_t size = bytes_of(p, s);
    uint8_t *sums = to + s->blocks * PAGE;
    int came = read_at(p, to, size, p->at + s->first * PAGE, is_ready);
    if (came == READ) came = read_at(p, sums, 4 * s->blocks, p->sums_at + 4 * s->first, is_ready);
    for (int64_t k = 0; came == READ && k < s->blocks; k++) {
        const int64_t left = size - k * PAGE;
        uint32_t sum;
        memcpy(&sum, sums + 4 * k, 4);
        if (checksum(p->seed, s->first + k, to + k * PAGE, (size_t)(left < PAGE ? left : PAGE)) != sum) came = DAMAGED;
    }
    return came;
}

/* Reads a span, and once more where it is not what was written: then from the disk, not from the page cache. */
static int read_span(const place *p, const span *s, uint8_t *to, int is_ready) {
    const int came = read_checked(p, s, to, is_ready);
    if (came != DAMAGED) return came;
    if (is_ready) return NOT_READY;
    posix_fadvise((int)p->fd, (off_t)(p->at + s->first * PAGE), (off_t)(s->blocks * PAGE), POSIX_FADV_DONTNEED);
    return read_checked(p, s, to, 0);
}

static uint8_t state_of(int came) { return came == READ ? HERE : came == DAMAGED ? CORRUPT : (uint8_t)came; }

/* A block that was checked is read in the mapping while its page stays: a page that went and came back may hold
 * other bytes. The kernel does not tell of that, so parts of the rows that are asked for often are looked at again
 * and again: a look is believed for `believed_ms`, and a page that it misses makes its block unchecked. Where the
 * last look is older than `trusted_ms`, all of the part's blocks are unchecked. */
enum { REGION_BYTES = 1 << 21, REGION_PAGES = REGION_BYTES / PAGE };
/* Rows of a part within OFTEN_MS that make a look: a first one, or one while the last is trusted. */
enum { OFTEN = 4, AGAIN = 2, OFTEN_MS = 100 };
/* Of a part of which a look found less than half, and for how long: looks at pages that are away are slow. */
enum { MANY = 32, FEW_MS = 2000 };

static uint32_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint32_t)((uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000);
}

static int has_bit(const uint8_t *bits, int64_t n) {
    return __atomic_load_n(bits + (uint64_t)n / 8, __ATOMIC_RELAXED) >> (uint64_t)n % 8 & 1;
}

static void set_checked(uint8_t *checked, const span *s) {
    for (int64_t n = s->first; n < s->first + s->blocks; n++)
        __atomic_fetch_or(checked + n / 8, (uint8_t)(1 << n % 8), __ATOMIC_RELAXED);
}

/* Asks the kernel which pages of a region, from block `first` on, the page cache has. */
static void look(const place *p, uint8_t *checked, region *r, int64_t first, uint32_t now, int is_trusted) {
    unsigned char there[REGION_PAGES] = {0}, packed[REGION_PAGES / 8] = {0};
    const int64_t left = blocks_of(p) - first, pages = left < REGION_PAGES ? left : REGION_PAGES;
    if (mincore((uint8_t *)(uintptr_t)p->mapped + first * PAGE, (size_t)(pages * PAGE), there))
        memset(there, 0, sizeof there);
    int64_t found = 0;
    for (int64_t i = 0; i < pages; i++)
        if (there[i] & 1) packed[i / 8] |= (unsigned char)(1 << i % 8), found++;
    for (int64_t i = 0; i < pages; i += 8) /* a region's first block is a multiple of 8 */
        __atomic_fetch_and(checked + (first + i) / 8, is_trusted ? packed[i / 8] : 0, __ATOMIC_RELAXED);
    __atomic_store_n(&r->has_few, 2 * found < pages, __ATOMIC_RELAXED);
    __atomic_store_n(&r->touches, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&r->seen_ms, now ? now : 1, __ATOMIC_RELEASE);
}

/* Whether blocks of a region that are checked now are those of the page cache. May look. */
static int is_seen(const place *p, uint8_t *checked, region *regions, int64_t number, uint32_t now) {
    region *r = regions + number;
    const uint32_t seen = __atomic_load_n(&r->seen_ms, __ATOMIC_ACQUIRE), age = now - seen;
    if (seen && age < (uint32_t)p->believed_ms) return 1;
    if (now - __atomic_load_n(&r->since_ms, __ATOMIC_RELAXED) >= OFTEN_MS) {
        __atomic_store_n(&r->since_ms, now, __ATOMIC_RELAXED);
        __atomic_store_n(&r->touches, 0, __ATOMIC_RELAXED);
    }
    const int is_trusted = seen && age < (uint32_t)p->trusted_ms,
        is_slow = seen && age < FEW_MS && __atomic_load_n(&r->has_few, __ATOMIC_RELAXED);
    const uint32_t enough = is_slow ? MANY : is_trusted ? AGAIN : OFTEN;
    if (__atomic_add_fetch(&r->touches, 1, __ATOMIC_RELAXED) < enough) return 0;
    look(p, checked, r, number * REGION_PAGES, now, is_trusted);
    return 1;
}

static int is_resident(const place *p, uint8_t *checked, region *regions, const span *s, uint32_t now) {
    const int64_t last = s->first + s->blocks - 1;
    for (int64_t number = s->first / REGION_PAGES; number <= last / REGION_PAGES; number++)
        if (!is_seen(p, checked, regions, number, now)) return 0;
    for (int64_t block = s->first; block <= last; block++)
        if (!has_bit(checked, block)) return 0;
    return 1;
}

/* Whether the file was not cut: what lies behind its end in a page of the mapping reads as zeros. */
static int is_whole(const place *p) {
    struct stat found;
    return !fstat((int)p->fd, &found) && found.st_size >= p->sums_at + 4 * blocks_of(p);
}

/* The span of which the next rows need no read. Of one that did not come, a block may be whole. */
static span kept(const span *s, int came) { return came == READ || s->blocks == 1 ? *s : (span){0, 0}; }

static int64_t fetch(const reading *r, int is_ready) {
    const place *p = &r->p;
    uint8_t *out = r->out, *state = r->state, *buffer = r->buffer;
    int64_t left = 0;
    int came = DAMAGED;
    const uint32_t now = now_ms();
    const int is_mapped = is_ready && p->mapped && is_whole(p);
    span held = {0, 0};
    for (int64_t i = 0; i < r->n; i++) {
        if (state[i] != LEFT) continue;
        const span s = span_of(p, r->rows[i]);
        const int64_t at = r->rows[i] * p->row_bytes;
        if (is_mapped && is_resident(p, r->checked, r->regions, &s, now)) {
            memcpy(out + i * p->row_bytes, (const uint8_t *)(uintptr_t)p->mapped + at, (size_t)p->row_bytes);
            state[i] = HERE;
            continue;
        }
        if (!has(&held, &s)) {
            came = read_span(p, &s, buffer, is_ready);
            held = kept(&s, came);
            if (came == READ) set_checked(r->checked, &s);
        }
        if (came == NOT_READY) {
            left++;
            continue;
        }
        if (came == READ) memcpy(out + i * p->row_bytes, buffer + (at - held.first * PAGE), (size_t)p->row_bytes);
        state[i] = state_of(came);
    }
    return left;
}

/* Asks the disk for a span, and for its checksums unless they lie in the page that was asked for last. The page cache
 * reads them. */
static void ask(const place *p, const span *s, int64_t *sum_page) {
    const int64_t sum = p->sums_at + 4 * s->first;
    posix_fadvise((int)p->fd, (off_t)(p->at + s->first * PAGE), (off_t)bytes_of(p, s), POSIX_FADV_WILLNEED);
    if (sum / PAGE != *sum_page) posix_fadvise((int)p->fd, (off_t)sum, (off_t)(4 * s->blocks), POSIX_FADV_WILLNEED);
    *sum_page = sum / PAGE;
}

/* The next row from `i` on that is left and does not lie in `s`, which becomes its span; n: none. */
static int64_t next_span(const place *p, const int64_t *rows, const uint8_t *state, int64_t i, int64_t n, span *s) {
    for (; i < n; i++) {
        if (state[i] != LEFT) continue;
        const span found = span_of(p, rows[i]);
        if (has(s, &found)) continue;
        *s = found;
        break;
    }
    return i;
}

/* Looks whether a row came: at first so long after one another, then so many within twice the time. */
enum { NAP_NS = 10000, LONGEST_NAP_NS = 1000000, LOOKS = 8 };

/* Reads a span that was asked for. began: of `bring`. */
static int wait_for(const place *p, const span *s, uint8_t *to, const limits *most, uint32_t began) {
    struct timespec nap = {0, NAP_NS};
    int64_t waited_ns = 0;
    uint32_t since = 0;
    for (;;) {
        const int came = read_checked(p, s, to, 1);
        if (came == DAMAGED) return read_span(p, s, to, 0);
        if (came == READ) return READ;
        const uint32_t now = now_ms();
        if (!waited_ns) since = now;
        if (now - since >= most->patience || now - began >= most->all) return NOT_READY;
        nanosleep(&nap, NULL);
        waited_ns += nap.tv_nsec;
        if (waited_ns / LOOKS > nap.tv_nsec) nap.tv_nsec = waited_ns / LOOKS;
        if (nap.tv_nsec > LONGEST_NAP_NS) nap.tv_nsec = LONGEST_NAP_NS;
    }
}

static int64_t bring(const reading *r, const limits *most) {
    const place *p = &r->p;
    const int64_t *rows = r->rows, n = r->n;
    uint8_t *out = r->out, *state = r->state, *buffer = r->buffer;
    span held = {0, 0}, asked = {0, 0};
    int64_t left = 0, ahead = 0, under_way = 0, sum_page = -1;
    const uint32_t began = now_ms();
    int came = READ;
    for (int64_t i = 0; i < n; i++) {
        if (state[i] != LEFT) continue;
        const span s = span_of(p, rows[i]);
        if (came != NOT_READY && !has(&held, &s)) {
            for (; under_way < most->depth && ahead < n; under_way++)
                if ((ahead = next_span(p, rows, state, ahead, n, &asked)) < n) ask(p, &asked, &sum_page);
            came = wait_for(p, &s, buffer, most, began);
            held = kept(&s, came);
            under_way--;
            if (came == READ) set_checked(r->checked, &s);
        }
        if (came == READ)
            memcpy(out + i * p->row_bytes, buffer + (rows[i] * p->row_bytes - held.first * PAGE), (size_t)p->row_bytes);
        if (came == NOT_READY) left++;
        else state[i] = state_of(came);
    }
    return left;
}

int64_t read_left(const reading *r, const limits *most) { return most->depth ? bring(r, most) : fetch(r, 0); }

void ask_rows(const place *p, const int64_t *rows, int64_t n, int64_t most) {
    span asked = {0, 0};
    int64_t sum_page = -1;
    for (int64_t i = 0; i < n && most > 0; i++) {
        if (rows[i] < 0 || rows[i] >= p->rows) continue;
        const span s = span_of(p, rows[i]);
        if (has(&asked, &s)) continue;
        asked = s, most--;
        ask(p, &asked, &sum_page);
    }
}

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

/* As `is_resident`, for most rows, sooner; no: ask that. */
static inline int is_known(const place *p, const uint8_t *checked, const region *regions, uint64_t row, uint32_t now) {
    const uint64_t at = row * (uint64_t)p->row_bytes, first = at / PAGE, last = (at + (uint64_t)p->row_bytes - 1) / PAGE;
    const uint32_t seen = __atomic_load_n(&regions[first / REGION_PAGES].seen_ms, __ATOMIC_ACQUIRE);
    return (seen != 0) & (now - seen < (uint32_t)p->believed_ms) & (last - first <= 1)
           & (first / REGION_PAGES == last / REGION_PAGES) & has_bit(checked, (int64_t)first)
           & has_bit(checked, (int64_t)last);
}

static int64_t away(const place *p, uint8_t *checked, region *regions, const uint8_t *rows, int64_t n, int64_t *out) {
    const uint32_t now = now_ms();
    const int is_mapped = p->mapped && is_whole(p);
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t row;
        memcpy(&row, rows + 8 * i, 8);
        if ((uint64_t)row >= (uint64_t)p->rows) continue;
        if (is_mapped && is_known(p, checked, regions, (uint64_t)row, now)) continue;
        const span s = span_of(p, row);
        if (!is_mapped || !is_resident(p, checked, regions, &s, now)) out[found++] = i;
    }
    return found;
}

int is_place(const Py_buffer *given, place *p) {
    if (given->len != sizeof *p) return 0;
    memcpy(p, given->buf, sizeof *p);
    return 1;
}

static PyObject *py_away(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    Py_buffer b[5];
    int64_t found = -1;
    place p;
    if (n != 5) return PyErr_Format(PyExc_TypeError, "away takes 5 arguments, got %zd", n);
    if (!hold(args, 5, 0x16, b)) return NULL;
    if (!is_place(b, &p) || b[3].len % 8 || b[4].len < b[3].len || !fits(&p, b + 1, b + 2))
        PyErr_SetString(PyExc_ValueError, "away: rows or bits do not fit this table");
    else {
        Py_BEGIN_ALLOW_THREADS
        found = away(&p, b[1].buf, b[2].buf, b[3].buf, b[3].len / 8, b[4].buf);
        Py_END_ALLOW_THREADS
    }
    release(b, 5);
    return found < 0 ? NULL : PyLong_FromLongLong(found);
}

size_t buffer_bytes(const place *p) { return (size_t)((p->row_bytes / PAGE + 2) * (PAGE + 4)); }

int hold_reading(PyObject *const *args, const char *name, Py_buffer *b, reading *r) {
    if (!hold(args, 6, 0x36, b)) return 0;
    *r = (reading){.checked = b[1].buf, .regions = b[2].buf, .rows = b[3].buf, .n = b[3].len / 8,
                   .out = b[4].buf, .state = b[5].buf};
    if (is_place(b, &r->p) && is_sound(&r->p, r->n, b + 1, b + 2, b + 3, b + 4, b + 5)) return 1;
    release(b, 6);
    PyErr_Format(PyExc_ValueError, "%s: rows, states or bits do not fit this table", name);
    return 0;
}

/* most: `bring`; NULL: `fetch`. */
static PyObject *read_rows(PyObject *const *args, const char *name, const limits *most, int is_ready) {
    Py_buffer b[6];
    reading r;
    int64_t left = -1;
    if (!hold_reading(args, name, b, &r)) return NULL;
    if (!(r.buffer = malloc(buffer_bytes(&r.p)))) PyErr_NoMemory();
    else {
        Py_BEGIN_ALLOW_THREADS
        left = most ? bring(&r, most) : fetch(&r, is_ready);
        Py_END_ALLOW_THREADS
    }
    free(r.buffer);
    release(b, 6);
    return left < 0 ? NULL : PyLong_FromLongLong(left);
}

static PyObject *py_fetch(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (n != 7) return PyErr_Format(PyExc_TypeError, "fetch takes 7 arguments, got %zd", n);
    const int is_ready = PyObject_IsTrue(args[6]);
    return is_ready < 0 ? NULL : read_rows(args, "fetch", NULL, is_ready);
}

static PyObject *py_bring(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (n != 9) return PyErr_Format(PyExc_TypeError, "bring takes 9 arguments, got %zd", n);
    const limits most = {PyLong_AsLongLong(args[6]), PyLong_AsLongLong(args[7]), PyLong_AsLongLong(args[8])};
    if (PyErr_Occurred()) return NULL;
    if (most.depth < 1 || most.patience < 0 || most.all < 0)
        return PyErr_Format(PyExc_ValueError, "bring: a limit is negative, or the depth is 0");
    return read_rows(args, "bring", &most, 0);
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
    make_byte_sums();
    pthread_atfork(NULL, NULL, forget_pools);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) add = add_fast;
#endif
    PyObject *made = PyModule_Create(&module);
    if (made && (PyModule_AddIntConstant(made, "REGION_BYTES", REGION_BYTES)
                 || PyModule_AddIntConstant(made, "REGION_SIZE", sizeof(region)))) Py_CLEAR(made);
    return made;
}
