/* AVX2 with FMA and F16C: 8 floats a vector. Empty where the processor's family has none. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define ISA_AVX2
#define NAME(f) f##_avx2
#include "_kernel.h"
const kernel kernel_avx2 = {"avx2", lookup_avx2, quantize_avx2, place_avx2, resolve_avx2};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
