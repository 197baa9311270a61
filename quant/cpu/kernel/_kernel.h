/* The kernels of one instruction set. An including file defines ISA_AVX512, ISA_AVX2, ISA_NEON or nothing, and
 * NAME. */
#include <float.h>
#include <math.h>
#include <string.h>
#include "_prefetch.h"

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))
#define UNROLL _Pragma("GCC unroll 16")
#if defined(ISA_AVX512) || defined(ISA_AVX2)
#include <immintrin.h>
#define FMA1(a, b, c) __builtin_fmaf(a, b, c)
#elif defined(ISA_NEON)
#include <arm_neon.h>
#define FMA1(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FMA1(a, b, c) ((a) * (b) + (c))
#endif

#include "_lanes.h"
#include "_lookup.h"
#include "_quantize.h"
#include "_resolve.h"
