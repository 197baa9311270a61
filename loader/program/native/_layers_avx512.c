/* AVX-512: 16 floats a vector. Empty where the processor's family has none. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif
#define ISA_AVX512
#define NAME(f) f##_avx512
#include "_layers.h"
const layers_kernel layers_avx512 = {"avx512", layer_avx512, from_half_avx512};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
