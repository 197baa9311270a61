/* Pack rows, for one instruction set (included once for each, after _lanes.h).
 *
 * The bytes equal those of FBGEMM's quantizers with scale and bias moved to the front:
 *   int8   scale = fp16(range / 255), bias = fp16(min); q = round((x - min) * (255 / (range + 1e-8)))
 *   int4/2 bias = fp16(min), scale = fp16((max - bias) / (2^bits - 1)), 1 if 0 or its inverse overflows;
 *          q = clamp(round((x - bias) * (1 / scale)))
 *   fp8    1-4-3, bias 7, round to nearest even, gradual underflow, largest 240
 * And of OCP's and NVIDIA's formats, with the scales that their quantizers choose (TINY at least; nothing is cut):
 *   e4m3           scale = largest |x| / 448; q = e4m3(x / scale)
 *   e4m3_block32   scale = the least power of two with which no |x| of the block is above 448; q = e4m3(x / scale)
 *   nvfp4          scale = largest |x| / (448 * 6), of a block e4m3(its largest |x| / 6 / scale);
 *                  q = e2m1(x / (block's scale * scale)), 0 where that is 0
 * A row of one of these is copied into its own format, and else dequantized first. A row that cannot be represented is refused: not finite, or outside fp16's or fp8's range.
 */
typedef struct { float low, high, poison; } extent;

#undef ONE_BY_ONE
#if defined(__clang__) /* its vectors take 1.3 times as long for these few steps */
#define ONE_BY_ONE _Pragma("clang loop vectorize(disable) unroll(full)")
#else
#define ONE_BY_ONE
#endif

/* Least and greatest of x[0..n); poison is 0, or not a number where a value is not finite. */
INLINE extent extent_of(const float *x, int64_t n) {
    extent e = {x[0], x[0], 0.0f};
    int64_t i = 0;
    if (n >= LANES) {
        float low[LANES], high[LANES], poison[LANES];
        vf a = v_load(x), l = a, h = a, p = v_set(0.0f), zero = v_set(0.0f);
        for (; i + LANES <= n; i += LANES) {
            a = v_load(x + i);
            l = v_min(l, a), h = v_max(h, a), p = v_fma(a, zero, p);
        }
        v_store(low, l), v_store(high, h), v_store(poison, p);
        ONE_BY_ONE
        for (int k = 0; k < LANES; k++) {
            /* not `if`: clang makes a branch of it, which is mispredicted */
            e.low = low[k] < e.low ? low[k] : e.low;
            e.high = high[k] > e.high ? high[k] : e.high;
            e.poison += poison[k];
        }
    }
    for (; i < n; i++) {
        if (x[i] < e.low) e.low = x[i];
        if (x[i] > e.high) e.high = x[i];
        e.poison += x[i] * 0.0f;
    }
    return e;
}

INLINE void round_to_bytes(const float *x, int64_t n, float low, float inverse, int greatest, uint8_t *q) {
    vf l = v_set(low), s = v_set(inverse), top = v_set((float)greatest);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) v_store_u8(q + i, v_min(v_mul(v_sub(v_load(x + i), l), s), top));
    for (; i < n; i++) {
        float y = (x[i] - low) * inverse;
        q[i] = (uint8_t)(y < 0.0f ? 0 : y > (float)greatest ? greatest : lrintf(y));
    }
}

INLINE uint8_t to_fp8(float x) {
    union { float value; uint32_t bits; } u = {x}, small;
    uint32_t sign = u.bits >> 24 & 0x80;
    u.bits &= 0x7fffffff;
    small.value = u.value + 16384.0f; /* the last bit of 2^14 in fp32 is 2^-9, fp8's smallest step */
    uint32_t normal = (u.bits + 0x7ffff + (u.bits >> 20 & 1)) >> 20;
    return (uint8_t)(sign | (u.bits >= 0x3c800000 ? normal - (120 << 3) : small.bits & 0xff));
}

INLINE int pack_int(int bits, const float *x, int64_t dim, extent e, uint8_t *out, uint8_t *q) {
    uint16_t scale, bias = float_to_half(e.low);
    if (e.poison != 0.0f || e.low < -65504.0f || e.high > 65504.0f) return 0;
    if (bits == 8) {
        float range = e.high - e.low;
        scale = float_to_half(range / 255.0f);
        round_to_bytes(x, dim, e.low, 255.0f / (range + 1e-8f), 255, out + 4);
    } else {
        int greatest = (1 << bits) - 1;
        float low = half_to_float(bias), range = e.high - low;
        float step = range == 0.0f ? 1.0f : range / (float)greatest;
        scale = float_to_half(step);
        step = half_to_float(scale);
        if (step == 0.0f || isinf(1.0f / step)) step = 1.0f, scale = 0x3c00;
        round_to_bytes(x, dim, low, 1.0f / step, greatest, q);
        uint8_t *p = out + 4;
        if (bits == 4) for (int64_t i = 0; i < dim / 2; i++) p[i] = (uint8_t)(q[2 * i] | q[2 * i + 1] << 4);
        else for (int64_t i = 0; i < dim / 4; i++)
            p[i] = (uint8_t)(q[4 * i] | q[4 * i + 1] << 2 | q[4 * i + 2] << 4 | q[4 * i + 3] << 6);
    }
    memcpy(out, &scale, 2), memcpy(out + 2, &bias, 2);
    return 1;
}

INLINE int pack_float(int format, const float *x, int64_t dim, extent e, uint8_t *out) {
    float greatest = format == FP8 ? 240.0f : format == FP16 ? 65504.0f : FLT_MAX;
    if (e.poison != 0.0f || e.low < -greatest || e.high > greatest) return 0;
    if (format == FP32) {
        memcpy(out, x, (size_t)dim * 4);
    } else if (format == FP8) {
        for (int64_t i = 0; i < dim; i++) out[i] = to_fp8(x[i]);
    } else {
        int64_t i = 0;
        for (; i + LANES <= dim; i += LANES) v_store_half(out + 2 * i, v_load(x + i));
        for (; i < dim; i++) {
            uint16_t h = float_to_half(x[i]);
            memcpy(out + 2 * i, &h, 2);
        }
    }
    return 1;
}

#define TINY 0x1p-126f /* the least normal float */
#define SCALED_MAX 0x1p126f /* of values of a format with a wide scale: no product is infinite */

INLINE float largest_of(const float *x, int64_t n) {
    float largest = 0.0f;
    for (int64_t i = 0; i < n; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    return largest;
}

/* At least TINY. */
INLINE float scale_for(float largest, float greatest) {
    float scale = largest / greatest;
    return scale > TINY ? scale : TINY;
}

INLINE void divide_to_e4m3(const float *x, int64_t n, float scale, uint8_t *out) {
    for (int64_t i = 0; i < n; i++) out[i] = to_fp8(x[i] / scale);
}

/* The ue8m0 byte of the least power of two, TINY at least, that no value exceeds 448 times. 448 is 1.75 * 2^8. */
INLINE uint8_t ue8m0_for(float largest) {
    union { float value; uint32_t bits; } u = {largest};
    int32_t e = (int32_t)(u.bits >> 23) - 8 + ((u.bits & 0x7fffff) > 0x600000);
    return (uint8_t)(e < 1 ? 1 : e);
}

/* Round to nearest even: ties go to the values whose last bit is 0. */
INLINE uint8_t to_e2m1(float x) {
    float y = fabsf(x);
    int code = (y > 0.25f) + (y >= 0.75f) + (y > 1.25f) + (y >= 1.75f) + (y > 2.5f) + (y >= 3.5f) + (y > 5.0f);
    return (uint8_t)(code | (signbit(x) ? 8 : 0));
}

INLINE void pack_nvfp4(const float *x, int64_t dim, float scale, uint8_t *out, uint8_t *q) {
    for (int64_t b = 0; b < dim / 16; b++) {
        uint8_t of_block = to_fp8(largest_of(x + 16 * b, 16) / 6.0f / scale);
        float step = from_e4m3(of_block) * scale;
        for (int64_t i = 16 * b; i < 16 * b + 16; i++) q[i] = of_block ? to_e2m1(x[i] / step) : 0;
        out[NVFP4_SCALES(dim) + b] = of_block;
    }
    for (int64_t i = 0; i < dim / 2; i++) out[i] = (uint8_t)(q[2 * i] | q[2 * i + 1] << 4);
    memcpy(out + NVFP4_SCALE(dim), &scale, 4);
}

INLINE int pack_scaled(int format, const float *x, int64_t dim, extent e, uint8_t *out, uint8_t *q) {
    float largest = -e.low > e.high ? -e.low : e.high;
    if (e.poison != 0.0f || largest > SCALED_MAX) return 0;
    if (format == E4M3) {
        float scale = scale_for(largest, 448.0f);
        memcpy(out, &scale, 4);
        divide_to_e4m3(x, dim, scale, out + 4);
    } else if (format == E4M3_BLOCK32) {
        for (int64_t c = 0; c < dim; c += 32) {
            uint8_t scale = ue8m0_for(largest_of(x + c, 32));
            out[dim + c / 32] = scale;
            divide_to_e4m3(x + c, 32, from_ue8m0(scale), out + c);
        }
    } else {
        pack_nvfp4(x, dim, scale_for(largest, 448.0f * 6.0f), out, q);
    }
    return 1;
}

/* Whether a row of a scaled format holds numbers alone, none of them above SCALED_MAX by its scales. */
INLINE int is_sound_row(int format, const uint8_t *row, int64_t dim) {
    const uint8_t *values = row + (format == E4M3 ? 4 : 0), *scales = row + NVFP4_SCALES(dim);
    uint8_t is_bad = 0; /* of a byte, so that as many are compared at once */
    if (format == NVFP4) {
        for (int64_t b = 0; b < dim / 16; b++) is_bad |= scales[b] > 0x7e;
    } else {
        for (int64_t c = 0; c < dim; c++) is_bad |= (values[c] & 0x7f) == 0x7f;
    }
    if (format == E4M3_BLOCK32) {
        for (int64_t b = 0; b < dim / 32; b++) is_bad |= row[dim + b] > 127 + 117; /* 448 * 2^117 */
        return !is_bad;
    }
    float scale = row_scale(format, row, dim);
    return !is_bad && scale >= 0.0f && scale <= SCALED_MAX / (format == E4M3 ? 448.0f : 448.0f * 6.0f);
}

/* fp16, bf16 or packed values -> scratch; fp32 values stay where they are, if floats may lie there. */
INLINE const float *as_floats(int source, const uint8_t *values, int64_t dim, float *scratch) {
    if (source >= E4M3 && source <= LAST_FORMAT) {
        float scale = row_scale(source, values, dim);
        for (int64_t c = 0; c < dim; c++)
            scratch[c] = value_at(source, values, c) * scale_at(source, values, dim, c, scale);
        return scratch;
    }
    if (source == FP32) {
        if ((uintptr_t)values % sizeof(float) == 0) return (const float *)values;
        memcpy(scratch, values, (size_t)dim * 4);
        return scratch;
    }
    for (int64_t i = 0; i < dim; i++) {
        uint16_t h;
        memcpy(&h, values + 2 * i, 2);
        uint32_t bits = (uint32_t)h << 16;
        if (source == FP16) scratch[i] = half_to_float(h);
        else memcpy(scratch + i, &bits, 4);
    }
    return scratch;
}

/* scratch: at least 2 * dim floats. */
static int64_t NAME(quantize)(int format, int source, const uint8_t *values, int64_t rows, int64_t dim,
                              uint8_t *out, int64_t row_bytes, float *scratch) {
    const int is_scaled = source >= E4M3 && source <= LAST_FORMAT;
    int64_t source_bytes = SOURCE_BYTES(source, dim), used = USED_BYTES(format, dim);
    uint8_t *q = (uint8_t *)(scratch + dim);
    for (int64_t r = 0; r < rows; r++, values += source_bytes, out += row_bytes) {
        if (is_scaled && !is_sound_row(source, values, dim)) return r;
        if (format == source && is_scaled) {
            memcpy(out, values, (size_t)used);
            memset(out + used, 0, (size_t)(row_bytes - used));
            continue;
        }
        const float *x = as_floats(source, values, dim, scratch);
        extent e = extent_of(x, dim);
        int packed = format == INT8   ? pack_int(8, x, dim, e, out, q)
                     : format == INT4 ? pack_int(4, x, dim, e, out, q)
                     : format == INT2 ? pack_int(2, x, dim, e, out, q)
                     : format >= E4M3 ? pack_scaled(format, x, dim, e, out, q)
                                      : pack_float(format, x, dim, e, out);
        if (!packed) return r;
        memset(out + used, 0, (size_t)(row_bytes - used));
    }
    return -1;
}
