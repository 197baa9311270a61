/* Floats as JSON (`_float_text.c`). */
#pragma once
#include <stdint.h>
#include "_json.h"

enum { FLOAT_BYTES = 17, SPARE_BYTES = 48 }; /* of a float with its comma, at most; and written behind the last */

/* Fills its table, and chooses the instruction set: 0, of any processor, 1, AVX2, or 2, AVX-512, if this one has it;
 * else the next lower one. Returns it. To be called before the others. */
int begin_float_text(int most);

/* Writes n floats, or fp16 numbers, as JSON with commas between them, and returns the end. Infinities and what is
 * no number are null. to: room for n * FLOAT_BYTES + SPARE_BYTES. */
char *write_floats(const uint8_t *values, int is_half, int64_t n, char *to);

/* Vectors [count, dim] of a feature. label: its name as JSON. */
typedef struct { text label; const uint8_t *values; int64_t count, dim; int is_half; } vectors;

#define VECTORS_BYTES(v) ((v).label.n + 4 + (v).count * (3 + (v).dim * FLOAT_BYTES))

/* Writes an object of names and lists of vectors, and returns the end. to: room for the VECTORS_BYTES of all, and
 * SPARE_BYTES. */
char *write_vectors(const vectors *of, int64_t n, char *to);
