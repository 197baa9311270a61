/* Vectors of floats for one instruction set: the only file with intrinsics.
 *
 * Defines, for the instruction set named by ISA_AVX512, ISA_AVX2 or ISA_NEON, or for any processor:
 *   LANES                   floats in a vector; a power of two
 *   vf                      a vector of LANES floats
 *   v_set, v_add, v_mul, v_fma(a, b, c) = a * b + c, v_min, v_max
 *   v_load, v_store         fp32, unaligned
 *   v_stream, v_stream_end  fp32, aligned to the vector, past the caches; and the fence after the last
 *   v_load_u8               LANES unsigned bytes -> floats
 *   v_load_bits(p, s, m)    LANES bytes, each shifted right by s and masked with m -> floats
 *   v_load_half, v_store_half   fp16, round to nearest even
 *   v_store_bf16            bf16, round to nearest even
 *   v_load_scale_bias(row, w)   a row's fp16 scale and bias, times w, in every lane
 *   v_load_fp8              1-4-3 floats with exponent bias 7 (FBGEMM's hfp8)
 *   v_load_e2m1(p, s)       LANES bytes, each shifted right by s; its low 4 bits: sign, 2 bits exponent, 1 mantissa
 *   v_set_halves(a, b)      a in the low lanes of 16, b in the high; with fewer lanes a
 *   v_interleave(a, b)      a0 b0 a1 b1 ... into two vectors
 *   v_store_u8              round to nearest even, saturate to 0..255, LANES bytes
 *   half_to_float, float_to_half, float_to_bf16   one value
 */
static const float E2M1[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
/* Round to nearest even. */
INLINE uint16_t float_to_bf16(float f) {
    union { float value; uint32_t bits; } u = {f};
    return (uint16_t)((u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16);
}

#if defined(ISA_AVX512)

#define LANES 16
typedef __m512 vf;
typedef struct { vf low, high; } vf2;
INLINE vf v_set(float x) { return _mm512_set1_ps(x); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE void v_stream(float *p, vf a) { _mm512_stream_ps(p, a); }
INLINE void v_stream_end(void) { _mm_sfence(); }
INLINE vf from_bytes(__m128i b) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(b)); }
INLINE vf v_load_u8(const uint8_t *p) { return from_bytes(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf v_load_bits(const uint8_t *p, int shift, int mask) {
    __m128i b = _mm_loadu_si128((const __m128i *)p);
    return from_bytes(_mm_and_si128(_mm_srli_epi16(b, shift), _mm_set1_epi8((char)mask)));
}
INLINE vf v_load_half(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void v_store_half(uint8_t *p, vf a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE vf2 v_load_scale_bias(const uint8_t *row, float weight) {
    __m128 both = _mm_mul_ps(_mm_cvtph_ps(_mm_loadu_si32(row)), _mm_set1_ps(weight));
    return (vf2){_mm512_broadcastss_ps(both), _mm512_broadcastss_ps(_mm_movehdup_ps(both))};
}
INLINE vf v_load_fp8(const uint8_t *p) {
    __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), _mm512_set1_ps(256.0f));
}
INLINE vf v_load_e2m1(const uint8_t *p, int shift) {
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_permutexvar_ps(_mm512_srli_epi32(wide, shift), _mm512_loadu_ps(E2M1));
}
INLINE vf v_set_halves(float low, float high) {
    return _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(low), _mm512_set1_ps(high));
}
INLINE void v_store_bf16(uint8_t *p, vf a) {
    __m512i bits = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
}
INLINE vf2 v_interleave(vf a, vf b) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return (vf2){_mm512_permutex2var_ps(a, low, b), _mm512_permutex2var_ps(a, high, b)};
}
INLINE void v_store_u8(uint8_t *p, vf a) {
    __m512i i = _mm512_max_epi32(_mm512_cvtps_epi32(a), _mm512_setzero_si512());
    _mm_storeu_si128((__m128i *)p, _mm512_cvtusepi32_epi8(i));
}
#define HARDWARE_HALF 1

#elif defined(ISA_AVX2)

#define LANES 8
typedef __m256 vf;
typedef struct { vf low, high; } vf2;
INLINE vf v_set(float x) { return _mm256_set1_ps(x); }
INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
INLINE void v_stream(float *p, vf a) { _mm256_stream_ps(p, a); }
INLINE void v_stream_end(void) { _mm_sfence(); }
INLINE vf from_bytes(__m128i b) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(b)); }
INLINE vf v_load_u8(const uint8_t *p) { return from_bytes(_mm_loadl_epi64((const __m128i *)p)); }
INLINE vf v_load_bits(const uint8_t *p, int shift, int mask) {
    __m128i b = _mm_loadl_epi64((const __m128i *)p);
    return from_bytes(_mm_and_si128(_mm_srli_epi16(b, shift), _mm_set1_epi8((char)mask)));
}
INLINE vf v_load_half(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE void v_store_half(uint8_t *p, vf a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE vf2 v_load_scale_bias(const uint8_t *row, float weight) {
    __m128 both = _mm_mul_ps(_mm_cvtph_ps(_mm_loadu_si32(row)), _mm_set1_ps(weight));
    return (vf2){_mm256_broadcastss_ps(both), _mm256_broadcastss_ps(_mm_movehdup_ps(both))};
}
INLINE vf v_load_fp8(const uint8_t *p) {
    __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
    __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
    __m128i rest = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7);
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, rest)), _mm256_set1_ps(256.0f));
}
INLINE vf v_load_e2m1(const uint8_t *p, int shift) {
    __m256i wide = _mm256_srli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)), shift);
    __m256i sign = _mm256_slli_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(8)), 28);
    return _mm256_or_ps(_mm256_permutevar8x32_ps(_mm256_loadu_ps(E2M1), wide), _mm256_castsi256_ps(sign));
}
INLINE vf v_set_halves(float low, float high) { return (void)high, v_set(low); }
INLINE void v_store_bf16(uint8_t *p, vf a) {
    __m256i bits = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    bits = _mm256_srli_epi32(bits, 16);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
}
INLINE vf2 v_interleave(vf a, vf b) {
    vf low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    return (vf2){_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
INLINE void v_store_u8(uint8_t *p, vf a) {
    __m256i i = _mm256_cvtps_epi32(a);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
}
#define HARDWARE_HALF 1

#elif defined(ISA_NEON) /* eight floats in two registers, as what 8 bytes become */

#define LANES 8
typedef struct { float32x4_t a, b; } vf;
typedef struct { vf low, high; } vf2;
INLINE vf v_set(float x) { return (vf){vdupq_n_f32(x), vdupq_n_f32(x)}; }
INLINE vf v_add(vf x, vf y) { return (vf){vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
INLINE vf v_sub(vf x, vf y) { return (vf){vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
INLINE vf v_mul(vf x, vf y) { return (vf){vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
INLINE vf v_fma(vf x, vf y, vf z) { return (vf){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
/* as x86 has them: the second operand where one is not a number */
INLINE vf v_min(vf x, vf y) {
    return (vf){vbslq_f32(vcltq_f32(x.a, y.a), x.a, y.a), vbslq_f32(vcltq_f32(x.b, y.b), x.b, y.b)};
}
INLINE vf v_max(vf x, vf y) {
    return (vf){vbslq_f32(vcgtq_f32(x.a, y.a), x.a, y.a), vbslq_f32(vcgtq_f32(x.b, y.b), x.b, y.b)};
}
INLINE vf v_load(const float *p) { return (vf){vld1q_f32(p), vld1q_f32(p + 4)}; }
INLINE void v_store(float *p, vf x) { vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b); }
INLINE void v_stream(float *p, vf x) { v_store(p, x); } /* no intrinsic writes past the caches */
INLINE void v_stream_end(void) {}
INLINE vf from_bytes(uint8x8_t b) {
    const uint16x8_t wide = vmovl_u8(b);
    return (vf){vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_high_u16(wide))};
}
INLINE vf v_load_u8(const uint8_t *p) { return from_bytes(vld1_u8(p)); }
INLINE vf v_load_bits(const uint8_t *p, int shift, int mask) {
    return from_bytes(vand_u8(vshl_u8(vld1_u8(p), vdup_n_s8((int8_t)-shift)), vdup_n_u8((uint8_t)mask)));
}
INLINE vf from_halves(uint16x8_t h) {
    const float16x8_t x = vreinterpretq_f16_u16(h);
    return (vf){vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)};
}
INLINE vf v_load_half(const uint8_t *p) { return from_halves(vreinterpretq_u16_u8(vld1q_u8(p))); }
INLINE void v_store_half(uint8_t *p, vf x) {
    vst1q_u8(p, vreinterpretq_u8_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)));
}
INLINE vf2 v_load_scale_bias(const uint8_t *row, float weight) {
    uint32_t both;
    memcpy(&both, row, sizeof both);
    const float32x4_t x = vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u32(vdup_n_u32(both))), weight);
    const float32x4_t scale = vdupq_laneq_f32(x, 0), bias = vdupq_laneq_f32(x, 1);
    return (vf2){{scale, scale}, {bias, bias}};
}
INLINE vf v_load_fp8(const uint8_t *p) {
    const uint16x8_t wide = vmovl_u8(vld1_u8(p));
    const uint16x8_t sign = vshlq_n_u16(vandq_u16(wide, vdupq_n_u16(0x80)), 8);
    const uint16x8_t rest = vshlq_n_u16(vandq_u16(wide, vdupq_n_u16(0x7f)), 7);
    return v_mul(from_halves(vorrq_u16(sign, rest)), v_set(256.0f));
}
INLINE vf v_load_e2m1(const uint8_t *p, int shift) { /* twice a value is a whole number below 13 */
    static const int8_t TWICE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, 1, 2, 3, 4, 6, 8, 12};
    const uint8x8_t four = vand_u8(vshl_u8(vld1_u8(p), vdup_n_s8((int8_t)-shift)), vdup_n_u8(15));
    const vf size = from_bytes(vqtbl1_u8(vreinterpretq_u8_s8(vld1q_s8(TWICE)), four));
    const uint16x8_t wide = vmovl_u8(vand_u8(four, vdup_n_u8(8)));
    const uint32x4_t low = vshll_n_u16(vget_low_u16(wide), 16), high = vshll_n_u16(vget_high_u16(wide), 16);
    const uint32x4_t a = vreinterpretq_u32_f32(vmulq_n_f32(size.a, 0.5f));
    const uint32x4_t b = vreinterpretq_u32_f32(vmulq_n_f32(size.b, 0.5f));
    return (vf){vreinterpretq_f32_u32(vorrq_u32(a, vshlq_n_u32(low, 12))),
                vreinterpretq_f32_u32(vorrq_u32(b, vshlq_n_u32(high, 12)))};
}
INLINE vf v_set_halves(float low, float high) { return (void)high, v_set(low); }
INLINE uint16x4_t to_bf16(float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
}
INLINE void v_store_bf16(uint8_t *p, vf x) {
    vst1q_u8(p, vreinterpretq_u8_u16(vcombine_u16(to_bf16(x.a), to_bf16(x.b))));
}
INLINE vf2 v_interleave(vf x, vf y) {
    return (vf2){{vzip1q_f32(x.a, y.a), vzip2q_f32(x.a, y.a)}, {vzip1q_f32(x.b, y.b), vzip2q_f32(x.b, y.b)}};
}
INLINE void v_store_u8(uint8_t *p, vf x) {
    vst1_u8(p, vqmovn_u16(vcombine_u16(vqmovun_s32(vcvtnq_s32_f32(x.a)), vqmovun_s32(vcvtnq_s32_f32(x.b)))));
}
#define HARDWARE_HALF 1

#else /* four floats, loops that any compiler can vectorize */

#define LANES 4
typedef struct { float x[LANES]; } vf;
typedef struct { vf low, high; } vf2;
#define EACH for (int i = 0; i < LANES; i++)
INLINE vf v_set(float x) { vf r; EACH r.x[i] = x; return r; }
INLINE vf v_add(vf a, vf b) { EACH a.x[i] += b.x[i]; return a; }
INLINE vf v_sub(vf a, vf b) { EACH a.x[i] -= b.x[i]; return a; }
INLINE vf v_mul(vf a, vf b) { EACH a.x[i] *= b.x[i]; return a; }
INLINE vf v_fma(vf a, vf b, vf c) { EACH a.x[i] = a.x[i] * b.x[i] + c.x[i]; return a; }
INLINE vf v_min(vf a, vf b) { EACH a.x[i] = a.x[i] < b.x[i] ? a.x[i] : b.x[i]; return a; }
INLINE vf v_max(vf a, vf b) { EACH a.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i]; return a; }
INLINE vf v_load(const float *p) { vf r; memcpy(&r, p, sizeof r); return r; }
INLINE void v_store(float *p, vf a) { memcpy(p, &a, sizeof a); }
INLINE void v_stream(float *p, vf a) { v_store(p, a); }
INLINE void v_stream_end(void) {}
INLINE vf v_load_u8(const uint8_t *p) { vf r; EACH r.x[i] = p[i]; return r; }
INLINE vf v_load_bits(const uint8_t *p, int shift, int mask) {
    vf r;
    EACH r.x[i] = (p[i] >> shift) & mask;
    return r;
}
static float half_to_float(uint16_t h);
static uint16_t float_to_half(float f);
INLINE vf v_load_half(const uint8_t *p) {
    uint16_t h[LANES];
    vf r;
    memcpy(h, p, sizeof h);
    EACH r.x[i] = half_to_float(h[i]);
    return r;
}
INLINE void v_store_half(uint8_t *p, vf a) {
    uint16_t h[LANES];
    EACH h[i] = float_to_half(a.x[i]);
    memcpy(p, h, sizeof h);
}
INLINE vf2 v_load_scale_bias(const uint8_t *row, float weight) {
    uint16_t both[2];
    memcpy(both, row, sizeof both);
    return (vf2){v_set(half_to_float(both[0]) * weight), v_set(half_to_float(both[1]) * weight)};
}
INLINE vf v_load_fp8(const uint8_t *p) {
    vf r;
    EACH r.x[i] = 256.0f * half_to_float((uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7));
    return r;
}
INLINE vf v_load_e2m1(const uint8_t *p, int shift) {
    vf r;
    EACH r.x[i] = E2M1[p[i] >> shift & 15];
    return r;
}
INLINE vf v_set_halves(float low, float high) { return (void)high, v_set(low); }
INLINE void v_store_bf16(uint8_t *p, vf a) {
    uint16_t h[LANES];
    EACH h[i] = float_to_bf16(a.x[i]);
    memcpy(p, h, sizeof h);
}
INLINE vf2 v_interleave(vf a, vf b) {
    float both[2 * LANES];
    vf2 r;
    EACH both[2 * i] = a.x[i], both[2 * i + 1] = b.x[i];
    memcpy(&r, both, sizeof r);
    return r;
}
INLINE void v_store_u8(uint8_t *p, vf a) {
    EACH { long q = lrintf(a.x[i]); p[i] = (uint8_t)(q < 0 ? 0 : q > 255 ? 255 : q); }
}
#undef EACH
#define HARDWARE_HALF 0

#endif

#if defined(ISA_NEON)
INLINE float half_to_float(uint16_t h) {
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0);
}
INLINE uint16_t float_to_half(float f) {
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(f))), 0);
}
#elif HARDWARE_HALF
INLINE float half_to_float(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }
INLINE uint16_t float_to_half(float f) {
    return (uint16_t)_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(f), _MM_FROUND_TO_NEAREST_INT));
}
#else
static float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
    union { uint32_t bits; float value; } u;
    if (magnitude >= 0x7c00) { /* infinity, not a number */
        u.bits = sign | 0x7f800000u | (magnitude & 0x3ff) << 13;
        return u.value;
    }
    u.bits = magnitude << 13; /* exponent bias 15 read as bias 127: off by 2^112 */
    u.value *= 0x1p112f;
    u.bits |= sign;
    return u.value;
}
static uint16_t float_to_half(float f) {
    union { float value; uint32_t bits; } u = {f};
    uint16_t sign = (uint16_t)(u.bits >> 16 & 0x8000);
    u.bits &= 0x7fffffff;
    if (u.bits > 0x7f800000) return sign | 0x7e00;
    if (u.bits >= 0x477ff000) return sign | 0x7c00; /* rounds to more than 65504 */
    if (u.bits < 0x38800000) {                      /* subnormal: 0.5 aligns the last bit to 2^-24 */
        u.value += 0.5f;
        return (uint16_t)(sign | (u.bits - 0x3f000000));
    }
    return (uint16_t)(sign | (u.bits - 0x38000000 + 0xfff + (u.bits >> 13 & 1)) >> 13);
}
#endif
