/* What the kernels of dense layers take, for `_layers.c` and for the kernels of each instruction set. */
#pragma once
#include <stdint.h>

enum { PANEL = 32 }; /* outputs side by side in memory; the last panel of a layer may have half as many */

/* One layer for some rows. weights: bias [width], then panels [depth, PANEL]; width: a multiple of PANEL / 2.
 * in: fp32 [rows, depth]; out: fp32 [rows, width]; strides in floats per row. */
typedef struct {
    const float *in, *weights;
    float *out;
    int64_t rows, depth, width, in_stride, out_stride;
    int is_relu;
} tile;

typedef struct {
    const char *name;
    void (*layer)(const tile *);
    void (*from_half)(const uint8_t *from, int64_t n, float *to); /* n values of fp16, at any alignment */
} layers_kernel;
