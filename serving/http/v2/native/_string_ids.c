/* The id of a string (loader/string_ids.py): XXH3 of 64 bits without a seed, as its specification has it
 * (doc/xxhash_spec.md of github.com/Cyan4973/xxHash). Little-endian. */
#include "_reader.h"
#include "_xxh3.h"

static const uint64_t P64_1 = 0x9E3779B185EBCA87u, P64_2 = 0xC2B2AE3D27D4EB4Fu, P64_3 = 0x165667B19E3779F9u;

static uint64_t word4(const uint8_t *p) { uint32_t x; memcpy(&x, p, 4); return x; }
static uint64_t secret(int at) { return xxh3_word(xxh3_secret + at); }
static uint64_t rotated(uint64_t x, int by) { return x << by | x >> (64 - by); }

static uint64_t product(uint64_t a, uint64_t b) {
    const unsigned __int128 wide = (unsigned __int128)a * b;
    return (uint64_t)wide ^ (uint64_t)(wide >> 64);
}

static uint64_t mixed(const uint8_t *p, int at) {
    return product(xxh3_word(p) ^ secret(at), xxh3_word(p + 8) ^ secret(at + 8));
}

static uint64_t avalanche(uint64_t x) {
    x = (x ^ x >> 37) * 0x165667919E3779F9u;
    return x ^ x >> 32;
}

static uint64_t avalanche_of_few(uint64_t x) {
    x = (x ^ x >> 33) * P64_2, x = (x ^ x >> 29) * P64_3;
    return x ^ x >> 32;
}

static uint64_t hash_of_few(const uint8_t *p, uint64_t n) { /* up to 16 bytes */
    if (!n) return avalanche_of_few(secret(56) ^ secret(64));
    if (n < 4) {
        const uint64_t joined = (uint64_t)p[0] << 16 | (uint64_t)p[n >> 1] << 24 | p[n - 1] | n << 8;
        return avalanche_of_few(joined ^ word4(xxh3_secret) ^ word4(xxh3_secret + 4));
    }
    if (n <= 8) {
        uint64_t x = (word4(p + n - 4) | word4(p) << 32) ^ secret(8) ^ secret(16);
        x = (x ^ rotated(x, 49) ^ rotated(x, 24)) * 0x9FB21C651E98DF25u;
        x = (x ^ ((x >> 35) + n)) * 0x9FB21C651E98DF25u;
        return x ^ x >> 28;
    }
    const uint64_t low = xxh3_word(p) ^ secret(24) ^ secret(32), high = xxh3_word(p + n - 8) ^ secret(40) ^ secret(48);
    return avalanche(n + __builtin_bswap64(low) + high + product(low, high));
}

static uint64_t hash_of_some(const uint8_t *p, uint64_t n) { /* 17 to 240 bytes */
    uint64_t sum = n * P64_1;
    if (n <= 128) {
        for (int k = (int)(n - 1) / 32; k >= 0; k--)
            sum += mixed(p + 16 * k, 32 * k) + mixed(p + n - 16 * (k + 1), 32 * k + 16);
        return avalanche(sum);
    }
    for (int k = 0; k < 8; k++) sum += mixed(p + 16 * k, 16 * k);
    sum = avalanche(sum);
    for (int k = 8; k < (int)n / 16; k++) sum += mixed(p + 16 * k, 16 * (k - 8) + 3);
    return avalanche(sum + mixed(p + n - 16, 136 - 17));
}

int64_t string_id(text t) {
    const uint8_t *p = (const uint8_t *)t.p;
    const uint64_t n = (uint64_t)t.n;
    return (int64_t)(n <= 16 ? hash_of_few(p, n) : n <= XXH3_SHORT ? hash_of_some(p, n) : xxh3(p, t.n));
}
