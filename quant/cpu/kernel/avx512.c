/* AVX-512: 16 floats a vector. Empty where the processor's family has none. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif
#define ISA_AVX512
#define NAME(f) f##_avx512
#include "_kernel.h"
const kernel kernel_avx512 = {"avx512", lookup_avx512, quantize_avx512, place_avx512, resolve_avx512};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
