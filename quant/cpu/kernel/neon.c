/* NEON, which every 64-bit ARM processor has: 8 floats a vector, in two registers. Empty for other families. */
#if defined(__aarch64__)
#define ISA_NEON
#define NAME(f) f##_neon
#include "_kernel.h"
const kernel kernel_neon = {"neon", lookup_neon, quantize_neon, place_neon, resolve_neon};
#endif
