/* Rows of a table's file in blocks: what the functions of _module.c do. */
#include "_blocks.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

typedef struct { int64_t first, blocks; } span; /* blocks that follow each other */

static span span_of(const place *p, int64_t row) {
    const int64_t at = row * p->row_bytes, first = at / PAGE;
    return (span){first, (at + p->row_bytes - 1) / PAGE - first + 1};
}

static int has(const span *s, const span *other) {
    return other->first >= s->first && other->first + other->blocks <= s->first + s->blocks;
}

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
enum { REGION_PAGES = REGION_BYTES / PAGE };
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

/* Asks the kernel which pages of a region, from block `first` on, the page cache has. Where all blocks become
 * unchecked that does not matter: of a table that is read for the first time each call would take as long as some
 * rows. */
static void look(const place *p, uint8_t *checked, region *r, int64_t first, uint32_t now, int is_trusted) {
    unsigned char there[REGION_PAGES] = {0}, packed[REGION_PAGES / 8] = {0};
    const int64_t left = blocks_of(p) - first, pages = left < REGION_PAGES ? left : REGION_PAGES;
    if (is_trusted && mincore((uint8_t *)(uintptr_t)p->mapped + first * PAGE, (size_t)(pages * PAGE), there))
        memset(there, 0, sizeof there);
    int64_t found = 0;
    for (int64_t i = 0; i < pages; i++)
        if (there[i] & 1) packed[i / 8] |= (unsigned char)(1 << i % 8), found++;
    for (int64_t i = 0; i < pages; i += 8) /* a region's first block is a multiple of 8 */
        __atomic_fetch_and(checked + (first + i) / 8, packed[i / 8], __ATOMIC_RELAXED);
    __atomic_store_n(&r->has_few, is_trusted && 2 * found < pages, __ATOMIC_RELAXED);
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

int64_t fetch(const reading *r, int is_ready) {
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

int64_t bring(const reading *r, const limits *most) {
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

/* As `is_resident`, for most rows, sooner; no: ask that. */
static inline int is_known(const place *p, const uint8_t *checked, const region *regions, uint64_t row, uint32_t now) {
    const uint64_t at = row * (uint64_t)p->row_bytes, first = at / PAGE, last = (at + (uint64_t)p->row_bytes - 1) / PAGE;
    const uint32_t seen = __atomic_load_n(&regions[first / REGION_PAGES].seen_ms, __ATOMIC_ACQUIRE);
    return (seen != 0) & (now - seen < (uint32_t)p->believed_ms) & (last - first <= 1)
           & (first / REGION_PAGES == last / REGION_PAGES) & has_bit(checked, (int64_t)first)
           & has_bit(checked, (int64_t)last);
}

int64_t away(const place *p, uint8_t *checked, region *regions, const uint8_t *rows, int64_t n, int64_t *out) {
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
