/* Dense layers for one instruction set: x -> activation(x W^T + b), row by row. The including file defines
 * NAME, and ISA_AVX512, ISA_AVX2, ISA_NEON or none. A value is its bias plus the products, added one by one in order
 * of depth, so a row's result does not depend on other rows, bit for bit. */
#include <math.h>
#include <string.h>
#include "_layers_types.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#if defined(ISA_AVX512) || defined(ISA_AVX2)
#include <immintrin.h>
#elif defined(ISA_NEON)
#include <arm_neon.h>
#endif
#include "_lanes.h"

#if defined(ISA_AVX512)
enum { BLOCK_ROWS = 8 }; /* with 2 vectors a row: 16 sums in registers */
#else
enum { BLOCK_ROWS = 2 }; /* with 4 vectors a row: 8 of AVX2's 16 */
#endif

/* `rows` rows of `columns` outputs. panel: [depth, columns]; in: [rows, depth]; strides in floats per row. */
INLINE void block(int rows, int columns, const float *in, int64_t in_stride, const float *panel,
                  int64_t depth, const float *bias, float *out, int64_t out_stride, int is_relu) {
    vf sum[BLOCK_ROWS][PANEL / LANES];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < columns / LANES; v++) sum[r][v] = v_load(bias + v * LANES);
    for (int64_t k = 0; k < depth; k++, panel += columns) {
        UNROLL for (int r = 0; r < rows; r++) {
            const vf x = v_set(in[r * in_stride + k]);
            UNROLL for (int v = 0; v < columns / LANES; v++)
                sum[r][v] = v_fma(x, v_load(panel + v * LANES), sum[r][v]);
        }
    }
    /* Zero first: where a sum is not a number the maximum is the second operand, so it stays none. */
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < columns / LANES; v++)
            v_store(out + r * out_stride + v * LANES, is_relu ? v_max(v_set(0), sum[r][v]) : sum[r][v]);
}

/* Whole blocks of `rows` rows from row `r` on; returns the row behind them. */
INLINE int64_t blocks(int rows, int columns, const tile *t, const float *panel, int64_t column, int64_t r) {
    for (; r + rows <= t->rows; r += rows)
        block(rows, columns, t->in + r * t->in_stride, t->in_stride, panel, t->depth, t->weights + column,
              t->out + r * t->out_stride + column, t->out_stride, t->is_relu);
    return r;
}

INLINE void panel_rows(int columns, const tile *t, const float *panel, int64_t column) {
    int64_t r = blocks(BLOCK_ROWS, columns, t, panel, column, 0);
    if (BLOCK_ROWS > 4) r = blocks(4, columns, t, panel, column, r);
    if (BLOCK_ROWS > 2) r = blocks(2, columns, t, panel, column, r);
    blocks(1, columns, t, panel, column, r);
}

static void NAME(layer)(const tile *t) {
    int64_t column = 0;
    for (; column + PANEL <= t->width; column += PANEL)
        panel_rows(PANEL, t, t->weights + t->width + column * t->depth, column);
    if (column < t->width) panel_rows(PANEL / 2, t, t->weights + t->width + column * t->depth, column);
}

static void NAME(from_half)(const uint8_t *from, int64_t n, float *to) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) v_store(to + i, v_load_half(from + 2 * i));
    for (; i < n; i++) {
        uint16_t half;
        memcpy(&half, from + 2 * i, sizeof half);
        to[i] = half_to_float(half);
    }
}
