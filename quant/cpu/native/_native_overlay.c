/* What finds a layer's rows (quant/rows/overlay.py specifies both), written for many ids at once:
 * fill_filter(ids, words): sets the bits of ids, int64 [n], in words, uint64
 * fill_marks(numbers, slots, bits, before, order): marks of row numbers, int64 [n], all different, that have
 *   these slots, int64 [n];
 *   bits: uint64 [words], before: uint32 [words], order: uint32 [n or more], all zeros. ValueError: a number
 *   has no word, or comes twice
 * Both release the interpreter's lock. */
#include "_native_index.h"
#include <stdint.h>
#include "_ids.h"

PyObject *py_fill_filter(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments all;
    (void)self;
    if (!take_arguments("fill_filter", "bw", args, n, &all)) return NULL;
    const int64_t ids = all.b[0].len / 8, words = all.b[1].len / 8;
    if (words < 1 || words > UINT32_MAX) return unsound(&all, "fill_filter");
    uint64_t *filter = all.b[1].buf;
    Py_BEGIN_ALLOW_THREADS
    for (int64_t i = 0; i < ids; i++) {
        const uint64_t h = (uint64_t)load_i64((const uint8_t *)all.b[0].buf + 8 * i) * ID_FILTER, one = 1;
        filter[(h >> 32) * (uint64_t)words >> 32] |= one << (h >> 26 & 63) | one << (h >> 20 & 63)
            | one << (h >> 14 & 63);
    }
    Py_END_ALLOW_THREADS
    release(&all);
    Py_RETURN_NONE;
}

/* Whether each number has a word, and none comes twice. */
static int set_marks(const uint8_t *numbers, int64_t n, uint64_t *bits, int64_t words) {
    for (int64_t i = 0; i < n; i++) {
        const uint64_t number = (uint64_t)load_i64(numbers + 8 * i), bit = (uint64_t)1 << (number & 63);
        if (number >> 6 >= (uint64_t)words || bits[number >> 6] & bit) return 0;
        bits[number >> 6] |= bit;
    }
    return 1;
}

PyObject *py_fill_marks(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    arguments all;
    (void)self;
    if (!take_arguments("fill_marks", "bbwww", args, n, &all)) return NULL;
    const int64_t ids = all.b[0].len / 8, words = all.b[2].len / 8;
    const uint8_t *numbers = all.b[0].buf, *slots = all.b[1].buf;
    uint64_t *bits = all.b[2].buf;
    uint32_t *before = all.b[3].buf, *order = all.b[4].buf;
    int is_sound = all.b[1].len == all.b[0].len && all.b[3].len / 4 == words && all.b[4].len / 4 >= ids
        && ids <= UINT32_MAX;
    Py_BEGIN_ALLOW_THREADS
    is_sound = is_sound && set_marks(numbers, ids, bits, words);
    for (int64_t word = 0, count = 0; is_sound && word < words; word++) {
        before[word] = (uint32_t)count;
        count += __builtin_popcountll(bits[word]);
    }
    for (int64_t i = 0; is_sound && i < ids; i++) {
        const uint64_t number = (uint64_t)load_i64(numbers + 8 * i), word = number >> 6,
            slot = (uint64_t)load_i64(slots + 8 * i);
        const int64_t at = before[word]
            + (int64_t)__builtin_popcountll(bits[word] & (((uint64_t)1 << (number & 63)) - 1));
        is_sound = slot <= UINT32_MAX && at < ids;
        if (is_sound) order[at] = (uint32_t)slot;
    }
    Py_END_ALLOW_THREADS
    if (!is_sound) return unsound(&all, "fill_marks");
    release(&all);
    Py_RETURN_NONE;
}
