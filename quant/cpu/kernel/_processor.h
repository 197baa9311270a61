/* Finds the vectors that processor and OS run, by cpuid (zig's __builtin_cpu_supports always says no). */
#pragma once
#include <cpuid.h>
#include <stdint.h>

enum { LEAF1_ECX_FMA = 1 << 12, LEAF1_ECX_OSXSAVE = 1 << 27, LEAF1_ECX_AVX = 1 << 28,
      LEAF1_ECX_F16C = 1 << 29 };
enum { LEAF7_EBX_AVX2 = 1 << 5, LEAF7_EBX_AVX512F = 1 << 16, LEAF7_EBX_AVX512DQ = 1 << 17,
      LEAF7_EBX_AVX512BW = 1 << 30 };
#define LEAF7_EBX_AVX512VL (1u << 31)
enum { XCR0_SSE_AVX = 0x06, XCR0_AVX512 = 0xe6 }; /* registers that the operating system saves */

typedef struct { int avx2, avx512; } processor;

static processor find_processor(void) {
    uint32_t eax, ebx, leaf1, leaf7, edx, xcr0, high;
    if (!__get_cpuid(1, &eax, &ebx, &leaf1, &edx) || !(leaf1 & LEAF1_ECX_OSXSAVE))
        return (processor){0};
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &eax, &leaf7, &ebx, &edx)) return (processor){0};
    const uint32_t base = LEAF1_ECX_FMA | LEAF1_ECX_AVX | LEAF1_ECX_F16C;
    const uint32_t wide = LEAF7_EBX_AVX512F | LEAF7_EBX_AVX512DQ | LEAF7_EBX_AVX512BW | LEAF7_EBX_AVX512VL;
    int avx2 = (leaf1 & base) == base && (leaf7 & LEAF7_EBX_AVX2) && (xcr0 & XCR0_SSE_AVX) == XCR0_SSE_AVX;
    int avx512 = avx2 && (leaf7 & wide) == wide && (xcr0 & XCR0_AVX512) == XCR0_AVX512;
    return (processor){avx2, avx512};
}
