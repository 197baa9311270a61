/* sample_uses(sample, places, inputs, salts, half, ms): adds what a request asks for to a sample of uses
 *   (`quant.cpu.uses`): places, int64 [n, fields of PLACE_FIELDS], say where ids lie in inputs; salts, uint64
 *   [kinds]; half, 0 or 1: which totals count the ids; ms: when it is.
 * It releases the interpreter's lock. */
#include <string.h>
#include "_ids.h"
#include "_native_index.h"
#include "_place.h"

enum { CHANGES, BITS, ENTRIES, REQUESTS, HEAD, MOST_BITS = 47 };
typedef struct { int64_t id; uint32_t kind, ms; } use;
typedef struct {
    int64_t *head;
    use *uses;
    int64_t capacity, n, kinds;
    const uint64_t *salts;
    uint64_t last;
} sample;

static inline uint64_t key_of(const sample *s, int64_t id, uint64_t kind) {
    const uint64_t salted = (uint64_t)id + s->salts[kind];
    return (salted ^ (salted >> 32)) * ID_MIX;
}

/* Leaves half of the rows out. A reader that sees an odd number, or another one after it, reads again. */
static void thin(sample *s) {
    int64_t left = 0;
    __atomic_store_n(s->head + CHANGES, s->head[CHANGES] + 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    s->last = UINT64_MAX >> ++s->head[BITS];
    for (int64_t i = 0; i < s->n; i++) {
        const use one = s->uses[i];
        if (one.kind < s->kinds && key_of(s, one.id, one.kind) <= s->last) s->uses[left++] = one;
    }
    s->head[ENTRIES] = s->n = left;
    __atomic_store_n(s->head + CHANGES, s->head[CHANGES] + 1, __ATOMIC_SEQ_CST);
}

static void add_uses(sample *s, const uint8_t *ids, int64_t n, uint32_t kind, uint32_t ms) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t id = load_i64(ids + 8 * i);
        const uint64_t key = key_of(s, id, kind);
        if (key > s->last) continue;
        while (s->n == s->capacity && s->head[BITS] < MOST_BITS) thin(s);
        if (key <= s->last && s->n < s->capacity) s->uses[s->n++] = (use){id, kind, ms};
    }
}

PyObject *py_sample_uses(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments all;
    (void)self;
    if (!take_arguments("sample_uses", "wbbbii", args, n, &all)) return NULL;
    const int64_t half = all.n[0], ms = all.n[1];
    const int64_t kinds = all.b[3].len / 8, at = (8 * (HEAD + 2 * kinds) + 63) / 64 * 64;
    int64_t *head = all.b[0].buf;
    const int64_t capacity = (all.b[0].len - at) / (int64_t)sizeof(use);
    if ((uintptr_t)head % 8 || (uintptr_t)all.b[3].buf % 8 || capacity < 1
        || all.b[1].len % (int64_t)sizeof(place) || (half | 1) != 1 || ms < 0 || ms > UINT32_MAX
        || head[BITS] < 0 || head[BITS] > MOST_BITS || head[ENTRIES] < 0 || head[ENTRIES] > capacity)
        return unsound(&all, "sample_uses");
    sample s = {head, (use *)((uint8_t *)head + at), capacity, head[ENTRIES], kinds, all.b[3].buf,
                UINT64_MAX >> head[BITS]};
    const uint8_t *inputs = all.b[2].buf;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < all.b[1].len / (int64_t)sizeof(place); i++) {
        place p;
        memcpy(&p, (const uint8_t *)all.b[1].buf + i * (int64_t)sizeof p, sizeof p);
        const int64_t room = all.b[2].len - p.ids_at;
        if (p.kind < 0 || p.kind >= kinds || p.ids < 0 || p.ids_at < 0 || room < 0 || p.ids > room / 8)
            continue;
        head[HEAD + 2 * p.kind + half] += p.ids;
        add_uses(&s, inputs + p.ids_at, p.ids, (uint32_t)p.kind, (uint32_t)ms);
    }
    head[REQUESTS]++;
    __atomic_store_n(head + ENTRIES, s.n, __ATOMIC_RELEASE);
    Py_END_ALLOW_THREADS
    release(&all);
    Py_RETURN_NONE;
}
