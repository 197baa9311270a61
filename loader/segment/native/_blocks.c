/* Rows of a table's file on a disk, in blocks with checksums (loader.segment.blocks).
 * A table's chunks (loader.segment.stored) are cut into blocks of `block_rows` rows, the last of a chunk fewer.
 * A block's checksum is the CRC-32C of its number, int64 little-endian, and of its rows, so that a block that
 * was written to another place is not taken for this one.
 *
 * sums(rows, first_block, block_bytes, out): writes the checksum of each block of a chunk, whose first has this
 *   number. rows: the chunk; out: uint32 [blocks of the chunk]
 * fetch(place, checked, regions, rows, out, state, is_ready) -> rows that are left. Copies rows of a table, and
 *   writes what came of each to `state`: HERE, or CORRUPT where its block is not what was written, after it was
 *   read once more.
 *     place     int64: fd; bytes of row 0 and of the first checksum in the file; row_bytes; rows of the table;
 *               chunk_rows; block_rows; address of row 0 where the file is mapped, or 0; believed_ms and
 *               trusted_ms, see below
 *     checked   uint8 [blocks / 8 + 1], bit n: block n was read and checked
 *     regions   uint8: what looks found, REGION_SIZE bytes for each REGION_BYTES of the rows, and one more
 *     rows      int64 [n], ascending
 *     out       uint8 [n, row_bytes]
 *     state     uint8 [n], read and written: a row is read if its state is LEFT
 *     is_ready  reads no block that a disk has to bring (such rows stay LEFT), if the file system tells; and rows
 *               of checked blocks through the mapping, where the page cache has them, as mincore said a moment
 *               ago. Who cuts the file in that moment ends the process, else such rows are CORRUPT.
 * bring(place, checked, regions, rows, out, state, depth, patience_ms, all_ms) -> rows that are left. As `fetch`,
 *   after the disk was asked for the next `depth` blocks at a time, so that one thread has many reads under way.
 *   Waits no longer than patience_ms for a block, and all_ms for all: that block and those behind it stay LEFT.
 * ask(place, rows, most): asks the disk for the blocks of the first rows, `most` of them; waits for none
 * are_here(place, checked, regions, rows) -> whether all these rows may be read in the mapping now: blocks were
 *   checked, and the page cache has their pages. rows: int64 [n], at any alignment; those that the table has not
 *   are left out.
 *   Any thread may call; the interpreter is free meanwhile.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
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

enum { HERE = 0, CORRUPT = 2, LEFT = 3 };

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

static uint32_t checksum(int64_t block, const uint8_t *data, size_t size) {
    uint8_t number[8];
    for (int i = 0; i < 8; i++) number[i] = (uint8_t)((uint64_t)block >> 8 * i);
    return ~add(add(~0u, number, 8), data, size);
}

static PyObject *py_sums(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    Py_buffer rows, out;
    if (n != 4) return PyErr_Format(PyExc_TypeError, "sums takes 4 arguments, got %zd", n);
    const long long first = PyLong_AsLongLong(args[1]), size = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) return NULL;
    if (PyObject_GetBuffer(args[0], &rows, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[3], &out, PyBUF_WRITABLE)) {
        PyBuffer_Release(&rows);
        return NULL;
    }
    const int64_t blocks = size < 1 ? -1 : rows.len / size + (rows.len % size != 0);
    const int fits = blocks >= 0 && first >= 0 && out.len == 4 * blocks;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (int64_t k = 0; k < blocks; k++) {
            const int64_t at = k * size, end = at + size < rows.len ? at + size : rows.len;
            const uint32_t sum = checksum(first + k, (const uint8_t *)rows.buf + at, (size_t)(end - at));
            memcpy((char *)out.buf + 4 * k, &sum, 4);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&rows), PyBuffer_Release(&out);
    if (!fits) return PyErr_Format(PyExc_ValueError, "sums: these blocks have no room for their checksums");
    Py_RETURN_NONE;
}

/* ---- rows ---- */

typedef struct {
    int64_t fd, at, sums_at, row_bytes, rows, chunk_rows, block_rows, mapped, believed_ms, trusted_ms;
} place;
typedef struct { int64_t number, first, rows; } block; /* first: its first row */

static block block_of(const place *p, int64_t row) {
    const int64_t of_chunk = (p->chunk_rows + p->block_rows - 1) / p->block_rows, chunk = row / p->chunk_rows,
        within = row % p->chunk_rows / p->block_rows, first = chunk * p->chunk_rows + within * p->block_rows;
    int64_t end = first + p->block_rows;
    const int64_t of_rows = (chunk + 1) * p->chunk_rows;
    if (end > of_rows) end = of_rows;
    if (end > p->rows) end = p->rows;
    return (block){chunk * of_chunk + within, first, end - first};
}

enum { READ, NOT_READY, FAILED };

static int read_at(int fd, uint8_t *to, size_t size, off_t at, int is_ready) {
    while (size) {
        struct iovec part = {to, size};
        ssize_t got = is_ready ? preadv2(fd, &part, 1, at, RWF_NOWAIT) : pread(fd, to, size, at);
        if (got < 0 && is_ready && (errno == EOPNOTSUPP || errno == EINVAL || errno == ENOSYS))
            got = pread(fd, to, size, at); /* of memory, or a kernel that does not tell */
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && is_ready && errno == EAGAIN) return NOT_READY;
        if (got <= 0) return FAILED;
        to += got, at += got, size -= (size_t)got;
    }
    return READ;
}

static int read_checked(const place *p, const block *b, size_t size, off_t at, uint8_t *to, int is_ready) {
    uint32_t sum;
    int came = read_at((int)p->fd, to, size, at, is_ready);
    if (came == READ) came = read_at((int)p->fd, (uint8_t *)&sum, 4, (off_t)(p->sums_at + 4 * b->number), is_ready);
    return came == READ && checksum(b->number, to, size) != sum ? FAILED : came;
}

/* Reads a block, and once more where it is not what was written: then from the disk, not from the page cache. */
static int read_block(const place *p, const block *b, uint8_t *to, int is_ready) {
    const size_t size = (size_t)(b->rows * p->row_bytes);
    const off_t at = (off_t)(p->at + b->first * p->row_bytes);
    const int came = read_checked(p, b, size, at, to, is_ready);
    if (came != FAILED) return came;
    if (is_ready) return NOT_READY;
    const off_t first = at & ~(off_t)4095; /* whole pages alone are dropped */
    posix_fadvise((int)p->fd, first, at + (off_t)size - first + 4096, POSIX_FADV_DONTNEED);
    return read_checked(p, b, size, at, to, 0);
}

/* A block that was checked is read in the mapping while its page stays: a page that went and came back may hold
 * other bytes. The kernel does not tell of that, so parts of the rows that are asked for often are looked at again
 * and again: a look is believed for `believed_ms`, and a page that it misses makes its blocks unchecked. Where the
 * last look is older than `trusted_ms`, all of the part's blocks are unchecked. */
enum { PAGE = 4096, REGION_BYTES = 1 << 21, REGION_PAGES = REGION_BYTES / PAGE };
/* Rows of a part within OFTEN_MS that make a look: a first one, or one while the last is trusted. */
enum { OFTEN = 4, AGAIN = 2, OFTEN_MS = 100 };
/* A part of which a look found less than half is left alone for so long: looks at pages that are away are slow. */
enum { FEW_MS = 2000 };
/* touches: since `since_ms`. has_few: the last look found less than half of the pages. is_whole: it found all, and
 * all blocks checked. */
typedef struct {
    uint32_t is_seen, seen_ms, since_ms, touches, has_few, is_whole;
    unsigned char pages[REGION_PAGES / 8];
} region;

static uint32_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint32_t)((uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000);
}

static int is_checked(const uint8_t *checked, int64_t block) {
    return __atomic_load_n(checked + block / 8, __ATOMIC_RELAXED) >> block % 8 & 1;
}

static void set_checked(uint8_t *checked, int64_t block) {
    __atomic_fetch_or(checked + block / 8, (uint8_t)(1 << block % 8), __ATOMIC_RELAXED);
}

/* Unchecks the blocks with rows in [first, end) of the mapping. */
static void uncheck(const place *p, uint8_t *checked, uintptr_t first, uintptr_t end) {
    const uintptr_t mapped = (uintptr_t)p->mapped, bytes = (uintptr_t)(p->rows * p->row_bytes);
    const uintptr_t from = first > mapped ? first - mapped : 0, to = end - mapped < bytes ? end - mapped : bytes;
    if (from >= to) return;
    int64_t block = block_of(p, (int64_t)from / p->row_bytes).number;
    const int64_t last = block_of(p, (int64_t)(to - 1) / p->row_bytes).number;
    while (block <= last) {
        const int whole = block % 8 == 0 && last - block >= 7;
        if (whole) __atomic_store_n(checked + block / 8, 0, __ATOMIC_RELAXED);
        else __atomic_fetch_and(checked + block / 8, (uint8_t)~(1 << block % 8), __ATOMIC_RELAXED);
        block += whole ? 8 : 1;
    }
}

/* Whether all blocks with rows in [first, end) of the mapping are checked. */
static int are_checked(const place *p, const uint8_t *checked, uintptr_t first, uintptr_t end) {
    const uintptr_t mapped = (uintptr_t)p->mapped, bytes = (uintptr_t)(p->rows * p->row_bytes);
    const uintptr_t from = first > mapped ? first - mapped : 0, to = end - mapped < bytes ? end - mapped : bytes;
    if (from >= to) return 1;
    const int64_t last = block_of(p, (int64_t)(to - 1) / p->row_bytes).number;
    for (int64_t block = block_of(p, (int64_t)from / p->row_bytes).number; block <= last; block++)
        if (!is_checked(checked, block)) return 0;
    return 1;
}

/* Asks the kernel which of a region's pages, from `first` to `end`, the page cache has. */
static void look(const place *p, uint8_t *checked, region *r, uintptr_t first, uintptr_t end, uint32_t now,
                 int is_trusted) {
    unsigned char there[REGION_PAGES] = {0}, packed[REGION_PAGES / 8] = {0};
    const size_t pages = (end - first + PAGE - 1) / PAGE;
    if (mincore((void *)first, end - first, there)) memset(there, 0, sizeof there);
    if (!is_trusted) uncheck(p, checked, first, end);
    size_t found = 0;
    for (size_t i = 0, gone = 0; i <= pages; i++) { /* gone: pages before this one, in a row */
        const int is_here = i < pages && (there[i] & 1);
        if (is_here) packed[i / 8] |= (unsigned char)(1 << i % 8), found++;
        if (i < pages && !is_here) gone++;
        else if (gone) {
            if (is_trusted) uncheck(p, checked, first + (i - gone) * PAGE, first + i * PAGE);
            gone = 0;
        }
    }
    for (size_t i = 0; i < sizeof packed; i++) __atomic_store_n(r->pages + i, packed[i], __ATOMIC_RELAXED);
    __atomic_store_n(&r->has_few, 2 * found < pages, __ATOMIC_RELAXED);
    __atomic_store_n(&r->is_whole, found == pages && are_checked(p, checked, first, end), __ATOMIC_RELAXED);
    __atomic_store_n(&r->is_seen, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&r->touches, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&r->seen_ms, now, __ATOMIC_RELEASE);
}

/* Whether the page cache has a page of the mapping, and had it since its blocks were checked. */
static int has_page(const place *p, uint8_t *checked, region *regions, uintptr_t page, uint32_t now) {
    const uintptr_t base = (uintptr_t)p->mapped & ~(uintptr_t)(PAGE - 1), at = page - base;
    const uintptr_t all = (uintptr_t)p->mapped + (uintptr_t)(p->rows * p->row_bytes);
    region *r = regions + at / REGION_BYTES;
    const uint32_t age = now - __atomic_load_n(&r->seen_ms, __ATOMIC_ACQUIRE);
    const int is_seen = __atomic_load_n(&r->is_seen, __ATOMIC_RELAXED) != 0;
    if (!is_seen || age >= (uint32_t)p->believed_ms) {
        if (is_seen && age < FEW_MS && __atomic_load_n(&r->has_few, __ATOMIC_RELAXED)) return 0;
        if (now - __atomic_load_n(&r->since_ms, __ATOMIC_RELAXED) >= OFTEN_MS) {
            __atomic_store_n(&r->since_ms, now, __ATOMIC_RELAXED);
            __atomic_store_n(&r->touches, 0, __ATOMIC_RELAXED);
        }
        const int is_trusted = is_seen && age < (uint32_t)p->trusted_ms;
        if (__atomic_add_fetch(&r->touches, 1, __ATOMIC_RELAXED) < (is_trusted ? AGAIN : OFTEN)) return 0;
        const uintptr_t first = base + at / REGION_BYTES * REGION_BYTES, end = first + REGION_BYTES;
        look(p, checked, r, first, end < all ? end : all, now, is_trusted);
    }
    const uintptr_t n = at % REGION_BYTES / PAGE;
    return __atomic_load_n(r->pages + n / 8, __ATOMIC_RELAXED) >> n % 8 & 1;
}

static int is_resident(const place *p, uint8_t *checked, region *regions, const uint8_t *row, uint32_t now) {
    const uintptr_t last = ((uintptr_t)row + (uintptr_t)p->row_bytes - 1) & ~(uintptr_t)(PAGE - 1);
    for (uintptr_t page = (uintptr_t)row & ~(uintptr_t)(PAGE - 1); page <= last; page += PAGE)
        if (!has_page(p, checked, regions, page, now)) return 0;
    return 1;
}

/* Whether the file was not cut: what lies behind its end in a page of the mapping reads as zeros. */
static int is_whole(const place *p) {
    struct stat found;
    return !fstat((int)p->fd, &found) && found.st_size >= p->sums_at + 4 * (block_of(p, p->rows - 1).number + 1);
}

static int64_t fetch(const place *p, uint8_t *checked, region *regions, const int64_t *rows, int64_t n,
                     uint8_t *out, uint8_t *state, int is_ready, uint8_t *buffer) {
    int64_t left = 0;
    int came = FAILED;
    const uint32_t now = now_ms();
    const int is_mapped = is_ready && p->mapped && is_whole(p);
    block b = {-1, 0, 0};
    for (int64_t i = 0; i < n; i++) {
        if (state[i] != LEFT) continue;
        const block of = block_of(p, rows[i]);
        const uint8_t *mapped = (const uint8_t *)(uintptr_t)p->mapped + rows[i] * p->row_bytes;
        if (is_mapped && is_resident(p, checked, regions, mapped, now) && is_checked(checked, of.number)) {
            memcpy(out + i * p->row_bytes, mapped, (size_t)p->row_bytes);
            state[i] = HERE;
            continue;
        }
        if (of.number != b.number) {
            b = of;
            came = read_block(p, &b, buffer, is_ready);
            if (came == READ) set_checked(checked, b.number);
        }
        if (came == NOT_READY) {
            left++;
            continue;
        }
        if (came == READ)
            memcpy(out + i * p->row_bytes, buffer + (rows[i] - b.first) * p->row_bytes, (size_t)p->row_bytes);
        state[i] = came == READ ? HERE : CORRUPT;
    }
    return left;
}

/* Asks the disk for a block, and for its checksum unless that lies in the page that was asked for last. The page
 * cache reads them. */
static void ask(const place *p, const block *b, int64_t *sum_page) {
    const int64_t sum = p->sums_at + 4 * b->number;
    posix_fadvise((int)p->fd, (off_t)(p->at + b->first * p->row_bytes), (off_t)(b->rows * p->row_bytes),
                  POSIX_FADV_WILLNEED);
    if (sum / PAGE != *sum_page) posix_fadvise((int)p->fd, (off_t)sum, 4, POSIX_FADV_WILLNEED);
    *sum_page = sum / PAGE;
}

/* The next row from `i` on that is left and lies in another block than `b`, which becomes its block; n: none. */
static int64_t next_block(const place *p, const int64_t *rows, const uint8_t *state, int64_t i, int64_t n, block *b) {
    for (; i < n; i++)
        if (state[i] == LEFT && (rows[i] < b->first || rows[i] >= b->first + b->rows)) {
            *b = block_of(p, rows[i]);
            break;
        }
    return i;
}

/* How long `bring` waits: ms. */
typedef struct { int64_t depth, patience, all; } limits;
enum { NAP_NS = 10000 };

/* Reads a block that was asked for. began: of `bring`. */
static int wait_for(const place *p, const block *b, uint8_t *to, const limits *most, uint32_t began) {
    const size_t size = (size_t)(b->rows * p->row_bytes);
    const off_t at = (off_t)(p->at + b->first * p->row_bytes);
    const struct timespec nap = {0, NAP_NS};
    uint32_t since = 0;
    for (int naps = 0;; naps++) {
        const int came = read_checked(p, b, size, at, to, 1);
        if (came == FAILED) return read_block(p, b, to, 0);
        if (came == READ) return READ;
        const uint32_t now = now_ms();
        if (!naps) since = now;
        if (now - since >= most->patience || now - began >= most->all) return NOT_READY;
        nanosleep(&nap, NULL);
    }
}

static int64_t bring(const place *p, uint8_t *checked, const int64_t *rows, int64_t n, uint8_t *out, uint8_t *state,
                     const limits *most, uint8_t *buffer) {
    block b = {-1, 0, 0}, asked = {-1, 0, 0};
    int64_t left = 0, ahead = 0, under_way = 0, sum_page = -1;
    const uint32_t began = now_ms();
    int came = READ;
    for (int64_t i = 0; i < n; i++) {
        if (state[i] != LEFT) continue;
        if (came != NOT_READY && (rows[i] < b.first || rows[i] >= b.first + b.rows)) {
            for (; under_way < most->depth && ahead < n; under_way++)
                if ((ahead = next_block(p, rows, state, ahead, n, &asked)) < n) ask(p, &asked, &sum_page);
            b = block_of(p, rows[i]);
            came = wait_for(p, &b, buffer, most, began);
            under_way--;
            if (came == READ) set_checked(checked, b.number);
        }
        if (came == READ)
            memcpy(out + i * p->row_bytes, buffer + (rows[i] - b.first) * p->row_bytes, (size_t)p->row_bytes);
        if (came == NOT_READY) left++;
        else state[i] = came == READ ? HERE : CORRUPT;
    }
    return left;
}

/* Whether bits and regions are those of a table. */
static int fits(const place *p, const Py_buffer *checked, const Py_buffer *regions) {
    int64_t bytes, last;
    return p->at >= 0 && p->sums_at >= 0 && p->row_bytes >= 1 && p->rows >= 1 && p->chunk_rows >= 1
           && p->block_rows >= 1 && p->block_rows <= p->chunk_rows && p->believed_ms >= 0 && p->trusted_ms >= 0
           && !__builtin_mul_overflow(p->rows, p->row_bytes, &bytes) && !__builtin_add_overflow(bytes, p->at, &last)
           && checked->len > block_of(p, p->rows - 1).number / 8 && (uintptr_t)regions->buf % sizeof(uint32_t) == 0
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

/* x / y of numbers below 2^52, by a product with `inverse`, 1.0 / y, which is one off at most. */
static uint64_t divide(uint64_t x, uint64_t y, double inverse) {
    uint64_t q = (uint64_t)((double)x * inverse);
    if (q * y > x) q--;
    return x - q * y >= y ? q + 1 : q;
}

/* Whether a row lies in pages that a fresh look at one region found. */
static int is_seen(const region *r, uint64_t at, uint64_t end, uint32_t now, uint32_t believed) {
    if (now - __atomic_load_n(&r->seen_ms, __ATOMIC_ACQUIRE) >= believed
        || !__atomic_load_n(&r->is_seen, __ATOMIC_RELAXED) || (at ^ (end - 1)) / REGION_BYTES) return 0;
    const uint64_t last = (end - 1) % REGION_BYTES / PAGE;
    for (uint64_t n = at % REGION_BYTES / PAGE; n <= last; n++)
        if (!(__atomic_load_n(r->pages + n / 8, __ATOMIC_RELAXED) >> n % 8 & 1)) return 0;
    return 1;
}

static int are_here(const place *p, uint8_t *checked, region *regions, const uint8_t *rows, int64_t n) {
    const uint32_t now = now_ms(), believed = (uint32_t)p->believed_ms;
    const uint64_t shift = (uint64_t)p->mapped % PAGE, row_bytes = (uint64_t)p->row_bytes,
        chunk_rows = (uint64_t)p->chunk_rows, block_rows = (uint64_t)p->block_rows,
        of_chunk = (chunk_rows + block_rows - 1) / block_rows;
    const double of_chunks = 1.0 / (double)chunk_rows, of_blocks = 1.0 / (double)block_rows;
    if (!p->mapped || (uint64_t)p->rows >> 52 || !is_whole(p)) return 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t number;
        memcpy(&number, rows + 8 * i, 8);
        const uint64_t row = (uint64_t)number;
        if (row >= (uint64_t)p->rows) continue;
        const uint64_t at = shift + row * row_bytes;
        const region *r = regions + at / REGION_BYTES;
        if (!is_seen(r, at, at + row_bytes, now, believed)) {
            const uint8_t *mapped = (const uint8_t *)(uintptr_t)p->mapped + row * row_bytes;
            if (!is_resident(p, checked, regions, mapped, now)) return 0;
        } else if (__atomic_load_n(&r->is_whole, __ATOMIC_RELAXED)) continue;
        const uint64_t chunk = divide(row, chunk_rows, of_chunks),
            within = divide(row - chunk * chunk_rows, block_rows, of_blocks);
        if (!is_checked(checked, (int64_t)(chunk * of_chunk + within))) return 0;
    }
    return 1;
}

static PyObject *py_are_here(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    Py_buffer b[4] = {{0}};
    int held = 0, here = -1;
    place p;
    if (n != 4) return PyErr_Format(PyExc_TypeError, "are_here takes 4 arguments, got %zd", n);
    while (held < 4 && !PyObject_GetBuffer(args[held], b + held, held % 3 ? PyBUF_WRITABLE : PyBUF_SIMPLE)) held++;
    if (held == 4) {
        if (b[0].len == sizeof p) memcpy(&p, b[0].buf, sizeof p);
        if (b[0].len != sizeof p || b[3].len % 8 || !fits(&p, b + 1, b + 2))
            PyErr_SetString(PyExc_ValueError, "are_here: rows or bits do not fit this table");
        else {
            Py_BEGIN_ALLOW_THREADS
            here = are_here(&p, b[1].buf, b[2].buf, b[3].buf, b[3].len / 8);
            Py_END_ALLOW_THREADS
        }
    }
    while (held--) PyBuffer_Release(b + held);
    return here < 0 ? NULL : PyBool_FromLong(here);
}

/* most: `bring`; NULL: `fetch`. */
static PyObject *read_rows(PyObject *const *args, const char *name, const limits *most, int is_ready) {
    Py_buffer b[6] = {{0}};
    int held = 0;
    int64_t left = -1;
    place p;
    while (held < 6 && !PyObject_GetBuffer(args[held], b + held, held % 3 ? PyBUF_WRITABLE : PyBUF_SIMPLE)) held++;
    if (held == 6) {
        const int64_t count = b[3].len / 8;
        uint8_t *buffer = NULL;
        if (b[0].len == sizeof p) memcpy(&p, b[0].buf, sizeof p);
        if (b[0].len != sizeof p || !is_sound(&p, count, b + 1, b + 2, b + 3, b + 4, b + 5))
            PyErr_Format(PyExc_ValueError, "%s: rows, states or bits do not fit this table", name);
        else if (!(buffer = malloc((size_t)(p.block_rows * p.row_bytes))))
            PyErr_NoMemory();
        else {
            Py_BEGIN_ALLOW_THREADS
            if (most) left = bring(&p, b[1].buf, b[3].buf, count, b[4].buf, b[5].buf, most, buffer);
            else left = fetch(&p, b[1].buf, b[2].buf, b[3].buf, count, b[4].buf, b[5].buf, is_ready, buffer);
            Py_END_ALLOW_THREADS
        }
        free(buffer);
    }
    while (held--) PyBuffer_Release(b + held);
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

static PyObject *py_ask(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    Py_buffer at = {0}, rows = {0};
    place p = {0};
    if (n != 3) return PyErr_Format(PyExc_TypeError, "ask takes 3 arguments, got %zd", n);
    const long long most = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &at, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[1], &rows, PyBUF_SIMPLE)) {
        PyBuffer_Release(&at);
        return NULL;
    }
    if (at.len == sizeof p) memcpy(&p, at.buf, sizeof p);
    const int64_t count = rows.len / 8, *numbers = rows.buf;
    const int is_table = at.len == sizeof p && rows.len % 8 == 0 && p.row_bytes >= 1 && p.chunk_rows >= 1
                         && p.block_rows >= 1 && p.block_rows <= p.chunk_rows;
    if (is_table) {
        Py_BEGIN_ALLOW_THREADS
        block asked = {-1, 0, 0};
        int64_t left = most, sum_page = -1;
        for (int64_t i = 0; i < count && left > 0; i++) {
            const int64_t row = numbers[i];
            if (row < 0 || row >= p.rows || (row >= asked.first && row < asked.first + asked.rows)) continue;
            asked = block_of(&p, row), left--;
            ask(&p, &asked, &sum_page);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&at), PyBuffer_Release(&rows);
    if (!is_table) return PyErr_Format(PyExc_ValueError, "ask: rows do not fit this table");
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"sums", (PyCFunction)(void (*)(void))py_sums, METH_FASTCALL, NULL},
    {"fetch", (PyCFunction)(void (*)(void))py_fetch, METH_FASTCALL, NULL},
    {"bring", (PyCFunction)(void (*)(void))py_bring, METH_FASTCALL, NULL},
    {"ask", (PyCFunction)(void (*)(void))py_ask, METH_FASTCALL, NULL},
    {"are_here", (PyCFunction)(void (*)(void))py_are_here, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_blocks", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__blocks(void) {
    make_byte_sums();
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) add = add_fast;
#endif
    PyObject *made = PyModule_Create(&module);
    if (made && (PyModule_AddIntConstant(made, "REGION_BYTES", REGION_BYTES)
                 || PyModule_AddIntConstant(made, "REGION_SIZE", sizeof(region)))) Py_CLEAR(made);
    return made;
}
