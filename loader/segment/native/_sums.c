/* Checksums of blocks: CRC-32C (_module.c). */
#include "_blocks.h"

#include <string.h>
#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
enum { HAS_CRC32 = 1 << 7 }; /* of Linux's AT_HWCAP */
#endif

static uint32_t byte_sums[256];

static void make_byte_sums(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t sum = n;
        for (int bit = 0; bit < 8; bit++) sum = sum >> 1 ^ (sum & 1 ? 0x82F63B78u : 0);
        byte_sums[n] = sum;
    }
}

static uint32_t add_slowly(uint32_t sum, const uint8_t *data, size_t size) {
    for (size_t i = 0; i < size; i++) sum = sum >> 8 ^ byte_sums[(sum ^ data[i]) & 255];
    return sum;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2,crc32"))) static uint32_t add_fast(uint32_t sum, const uint8_t *data, size_t size) {
    uint64_t wide = sum;
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    sum = (uint32_t)wide;
    for (; size; data++, size--) sum = _mm_crc32_u8(sum, *data);
    return sum;
}
#elif defined(__aarch64__)
static uint32_t add_fast(uint32_t sum, const uint8_t *data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(sum) : "r"(word));
    }
    for (; size; data++, size--)
        __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(sum) : "r"((uint32_t)*data));
    return sum;
}
#endif

static uint32_t (*add)(uint32_t, const uint8_t *, size_t) = add_slowly;

uint32_t checksum(int64_t seed, int64_t block, const uint8_t *data, size_t size) {
    uint8_t numbers[16];
    for (int i = 0; i < 8; i++) {
        numbers[i] = (uint8_t)((uint64_t)seed >> 8 * i);
        numbers[8 + i] = (uint8_t)((uint64_t)block >> 8 * i);
    }
    return ~add(add(~0u, numbers, 16), data, size);
}

void choose_sums(void) {
    make_byte_sums();
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) add = add_fast;
#elif defined(__aarch64__)
    if (getauxval(AT_HWCAP) & HAS_CRC32) add = add_fast;
#endif
}

PyObject *py_sums(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    arguments a;
    if (!take_arguments("sums", "biiw", args, n, &a)) return NULL;
    const int64_t seed = a.n[0], first = a.n[1];
    const Py_buffer *rows = a.b, *out = a.b + 1;
    const int64_t blocks = rows->len / PAGE + (rows->len % PAGE != 0);
    const int fits = first >= 0 && out->len == 4 * blocks;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        for (int64_t k = 0; k < blocks; k++) {
            const int64_t at = k * PAGE, size = rows->len - at < PAGE ? rows->len - at : PAGE;
            const uint32_t sum = checksum(seed, first + k, (const uint8_t *)rows->buf + at, (size_t)size);
            memcpy((char *)out->buf + 4 * k, &sum, 4);
        }
        Py_END_ALLOW_THREADS
    }
    release(&a);
    if (!fits) return PyErr_Format(PyExc_ValueError, "sums: these blocks have no room for their checksums");
    Py_RETURN_NONE;
}
