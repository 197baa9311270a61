/* Bags as lookups take them, for `_native_bags.c` and `_native_tensors.c`: places of a batch, and int32
 * lengths. */
#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include "_place.h"
#include "_rows.h"

/* How ids make bags, as quant/cpu/bags.py numbers it. */
enum form { FORM_IDS = 0, FORM_FIXED = 1, FORM_LENGTHS = 2, FORM_OFFSETS = 3, FORM_ENDS = 4 };

/* A negative number becomes one above any count of ids. */
static inline __attribute__((always_inline)) uint64_t item_of(const uint8_t *from, int64_t i, int bytes) {
    return bytes == 8 ? (uint64_t)load_i64(from + 8 * i) : (uint64_t)(uint32_t)load_i32(from + 4 * i);
}

/* Whether every item is at most `ids`; those are written as int32, or of offsets what is between them. */
static inline __attribute__((always_inline)) int convert_items(const uint8_t *from, int bytes, int64_t items,
                                                               uint64_t ids, int are_offsets,
                                                               int32_t *lengths) {
    uint64_t beyond = 0, before = 0; /* the sign of `beyond`: one is above `ids`, which has 31 bits */
    for (int64_t i = 0; i < items; i++) {
        uint64_t value = item_of(from, i, bytes);
        beyond |= value | (ids - value);
        if (!are_offsets) lengths[i] = (int32_t)value;
        else if (i) lengths[i - 1] = (int32_t)(value - before);
        before = value;
    }
    return !(beyond >> 63);
}

/* How many bags lengths or offsets tell of; of FORM_ENDS there is at least one item. */
static inline int64_t bags_told(int64_t items, int form) { return items - (form == FORM_ENDS); }

/* Writes lengths, int32 [bags_told], from `items` integers of 4 or 8 bytes; 0: they do not fit `ids` ids. */
static inline int write_lengths(const uint8_t *from, int bytes, int64_t items, int64_t ids, int form,
                                int32_t *lengths) {
    const int are_offsets = form != FORM_LENGTHS;
    if (ids > INT32_MAX || (are_offsets && items && item_of(from, 0, bytes))) return 0;
    if (!(bytes == 8 ? convert_items(from, 8, items, (uint64_t)ids, are_offsets, lengths)
                     : convert_items(from, 4, items, (uint64_t)ids, are_offsets, lengths)))
        return 0;
    if (form == FORM_OFFSETS && items)
        lengths[items - 1] = (int32_t)((uint64_t)ids - item_of(from, items - 1, bytes));
    return 1;
}

/* Writes each feature's first id and its number of ids, int64 [2, features], from lengths int32 [features,
 * bags]; 0: they do not fit `ids` ids. */
static inline int write_parts(const uint8_t *lengths, int64_t features, int64_t bags, int64_t ids,
                              int64_t *starts) {
    int64_t total = 0;
    if (ids > INT32_MAX) return 0;
    for (int64_t f = 0; f < features; f++, lengths += 4 * bags) {
        int64_t count = 0, beyond = 0;
        for (int64_t bag = 0; bag < bags; bag++) {
            const int64_t length = load_i32(lengths + 4 * bag);
            beyond |= length | (ids - length); /* the sign: below 0, or above `ids` */
            count += length;
        }
        starts[f] = total, starts[features + f] = count;
        total += count;
        if (beyond < 0 || total > ids) return 0;
    }
    return total == ids;
}
