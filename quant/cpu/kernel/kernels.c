/* The kernels that this processor runs. */
#if defined(__x86_64__)
#include "_processor.h"
#endif
#include "_rows.h"

#if defined(__x86_64__)
extern const kernel kernel_avx512, kernel_avx2;
#elif defined(__aarch64__)
extern const kernel kernel_neon;
#endif
extern const kernel kernel_portable;

int find_kernels(const kernel **found) {
    int count = 0;
#if defined(__x86_64__)
    const processor here = find_processor();
    if (here.avx512) found[count++] = &kernel_avx512;
    if (here.avx2) found[count++] = &kernel_avx2;
#elif defined(__aarch64__)
    found[count++] = &kernel_neon;
#endif
    found[count++] = &kernel_portable;
    return count;
}
