/* NEON, which every 64-bit ARM processor has: 8 floats a vector, in two registers. Empty for other families. */
#if defined(__aarch64__)
#define ISA_NEON
#define NAME(f) f##_neon
#include "_layers.h"
const layers_kernel layers_neon = {"neon", layer_neon, from_half_neon};
#endif
