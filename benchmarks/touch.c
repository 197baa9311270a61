/* The floor of a pooled lookup: reads the first and the last word of each row, rows prefetched into L2, and
 * does nothing with them. No lookup of rows that lie on two lines can be faster on one core. */
#include <stdint.h>
#include <string.h>

uint64_t touch(const uint8_t *table, int64_t row_bytes, const int64_t *ids, int64_t count, int64_t ahead) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *later = table + ids[i + ahead < count ? i + ahead : i] * row_bytes;
        const uint8_t *row = table + ids[i] * row_bytes;
        uint64_t first, last;
        __builtin_prefetch(later, 0, 2), __builtin_prefetch(later + row_bytes - 1, 0, 2);
        memcpy(&first, row, 8), memcpy(&last, row + row_bytes - 8, 8);
        sum += first ^ last;
    }
    return sum;
}
