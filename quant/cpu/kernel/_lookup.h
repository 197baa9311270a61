/* Gather, dequantize and pool, for one instruction set (included once for each, after _lanes.h). A bag's
 * sum stays in registers: BLOCK vectors of LANES columns at a time, over all its rows. int4 and int2 load
 * LANES bytes and split them into 2 or 4 vectors of every second or fourth column, interleaved once a bag.
 * Each row read prefetches another (_prefetch.h). Order of arithmetic, as in FBGEMM: sum = fma(q, scale,
 * sum + bias), with scale and bias times the weight. A sum begins at +0, that of one row at -0, to keep a
 * stored -0. */
#define STREAM_BYTES (4 << 20)

#define SPLIT(format) ((format) == INT4 || (format) == NVFP4 ? 2 : (format) == INT2 ? 4 : 1)
#define HAS_BIAS(format) ((format) <= INT8)
#define HAS_SCALE(format) ((format) >= E4M3)
#define ROW_BYTES(format, dim, to) ((USED_BYTES(format, dim) + (to) - 1) / (to) * (to))

INLINE float first_sum(int64_t length) { return length == 1 ? -0.0f : 0.0f; }

/* 2 to the power of a ue8m0 byte less 127; 255 is not there. */
INLINE float from_ue8m0(uint8_t e) {
    union { uint32_t bits; float value; } u = {e ? (uint32_t)e << 23 : 1u << 22};
    return u.value;
}

INLINE float from_e4m3(uint8_t b) {
    return 256.0f * half_to_float((uint16_t)((b & 0x80) << 8 | (b & 0x7f) << 7));
}

/* The scale of a row as a whole, of a format that has no bias. */
INLINE float row_scale(int format, const uint8_t *row, int64_t dim) {
    return format == E4M3 ? load_f32(row) : format == NVFP4 ? load_f32(row + NVFP4_SCALE(dim)) : 1.0f;
}

/* The scales of the vector that begins at column `column`; NVFP4's is of every second column of 2 * LANES.
 * scale: of the row, with the weight. */
INLINE vf vector_scale(int format, const uint8_t *row, int64_t dim, int64_t column, float scale) {
    if (format == E4M3_BLOCK32) return v_set(from_ue8m0(row[dim + column / 32]) * scale);
    if (format != NVFP4) return v_set(scale);
    const uint8_t *of_blocks = row + NVFP4_SCALES(dim) + column / 16;
    return v_set_halves(from_e4m3(of_blocks[0]) * scale, LANES > 8 ? from_e4m3(of_blocks[1]) * scale : 0.0f);
}

/* Adds `blocks` vectors of one row of `dim` values, from column `column` on, to sum. */
INLINE void add_row(int format, int blocks, int weighted, vf *sum, const uint8_t *row, int64_t dim,
                    int64_t column, float weight) {
    vf scale = v_set(weighted ? weight : 1.0f), bias = scale;
    float of_row = weighted ? weight : 1.0f;
    if (HAS_BIAS(format)) {
        vf2 both = v_load_scale_bias(row, weighted ? weight : 1.0f);
        scale = both.low, bias = both.high;
    } else if (HAS_SCALE(format)) {
        of_row *= row_scale(format, row, dim);
    }
    const uint8_t *p = format == FP32 ? row + 4 * column
                     : format == FP16 ? row + 2 * column
                     : format == FP8 || format == E4M3_BLOCK32 ? row + column
                     : format == NVFP4 ? row + column / 2
                                       : row + 4 + column / SPLIT(format);
    UNROLL for (int k = 0; k < blocks; k++) {
        vf q;
        if (format == INT8) q = v_load_u8(p + k * LANES);
        else if (format == INT4) q = v_load_bits(p + k / 2 * LANES, k % 2 * 4, 15);
        else if (format == INT2) q = v_load_bits(p + k / 4 * LANES, k % 4 * 2, 3);
        else if (format == FP8 || format == E4M3 || format == E4M3_BLOCK32) q = v_load_fp8(p + k * LANES);
        else if (format == NVFP4) q = v_load_e2m1(p + k / 2 * LANES, k % 2 * 4);
        else if (format == FP16) q = v_load_half(p + 2 * k * LANES);
        else q = v_load((const float *)p + k * LANES);
        if (HAS_SCALE(format))
            scale = vector_scale(format, row, dim, column + k / SPLIT(format) * SPLIT(format) * LANES, of_row);
        if (HAS_BIAS(format)) sum[k] = v_fma(q, scale, v_add(sum[k], bias));
        else if (HAS_SCALE(format)) sum[k] = v_fma(q, scale, sum[k]);
        else if (weighted) sum[k] = v_fma(q, scale, sum[k]);
        else sum[k] = v_add(sum[k], q);
    }
}

enum { STORE_FLOAT = AS_FP32, STORE_HALF = AS_FP16, STORE_BF16 = AS_BF16, STREAM_FLOAT = 3 };

INLINE void store_vector(uint8_t *out, int64_t column, vf a, int how) {
    if (how == STORE_HALF) v_store_half(out + 2 * column, a);
    else if (how == STORE_BF16) v_store_bf16(out + 2 * column, a);
    else if (how == STREAM_FLOAT) v_stream((float *)out + column, a);
    else v_store((float *)out + column, a);
}

INLINE void store_row(int format, int blocks, const vf *sum, uint8_t *out, int64_t column, int how) {
    UNROLL for (int k = 0; k < blocks; k += SPLIT(format)) {
        int64_t c = column + k * LANES;
        if (SPLIT(format) == 1) {
            store_vector(out, c, sum[k], how);
        } else if (SPLIT(format) == 2) {
            vf2 r = v_interleave(sum[k], sum[k + 1]);
            store_vector(out, c, r.low, how), store_vector(out, c + LANES, r.high, how);
        } else {
            vf2 even = v_interleave(sum[k], sum[k + 2]), odd = v_interleave(sum[k + 1], sum[k + 3]);
            vf2 low = v_interleave(even.low, odd.low), high = v_interleave(even.high, odd.high);
            store_vector(out, c, low.low, how), store_vector(out, c + LANES, low.high, how);
            store_vector(out, c + 2 * LANES, high.low, how), store_vector(out, c + 3 * LANES, high.high, how);
        }
    }
}

/* One value of a row: for the last columns, fewer than a vector (or a group of 2 or 4 vectors). */
INLINE float value_at(int format, const uint8_t *row, int64_t c) {
    uint16_t h;
    if (format == INT8) return row[4 + c];
    if (format == INT4) return (row[4 + c / 2] >> (c % 2 * 4)) & 15;
    if (format == INT2) return (row[4 + c / 4] >> (c % 4 * 2)) & 3;
    if (format == FP8 || format == E4M3_BLOCK32) return from_e4m3(row[c]);
    if (format == E4M3) return from_e4m3(row[4 + c]);
    if (format == NVFP4) return E2M1[(row[c / 2] >> (c % 2 * 4)) & 15];
    if (format == FP32) return load_f32(row + 4 * c);
    memcpy(&h, row + 2 * c, 2);
    return half_to_float(h);
}

/* The scale of value `c` of a row, of a format without a bias. scale: of the row. */
INLINE float scale_at(int format, const uint8_t *row, int64_t dim, int64_t c, float scale) {
    if (format == E4M3_BLOCK32) return from_ue8m0(row[dim + c / 32]) * scale;
    return format == NVFP4 ? from_e4m3(row[NVFP4_SCALES(dim) + c / 16]) * scale : scale;
}

INLINE void tail(int format, const job *j, int64_t id, int64_t length, uint8_t *out, int64_t column,
                 float factor) {
    for (int64_t c = column; c < j->dim; c++) {
        float sum = first_sum(length);
        for (int64_t i = id; i < id + length; i++) {
            const uint8_t *row = j->table + load_i64(j->ids + 8 * i) * j->row_bytes;
            float weight = j->weights ? load_f32(j->weights + 4 * i) : 1.0f;
            float scale = weight;
            if (HAS_BIAS(format)) {
                uint16_t s, b;
                memcpy(&s, row, 2), memcpy(&b, row + 2, 2);
                scale = half_to_float(s) * weight;
                sum += half_to_float(b) * weight;
            } else if (HAS_SCALE(format)) {
                scale = scale_at(format, row, j->dim, c, row_scale(format, row, j->dim) * weight);
            }
            sum = FMA1(value_at(format, row, c), scale, sum);
        }
        sum *= factor;
        if (j->precision != AS_FP32) {
            uint16_t h = j->precision == AS_FP16 ? float_to_half(sum) : float_to_bf16(sum);
            memcpy(out + 2 * c, &h, 2);
        } else {
            memcpy(out + 4 * c, &sum, 4);
        }
    }
}

/* Rows of exactly `blocks` vectors, the usual widths: everything but the ids is known to the compiler.
 * sum[blocks] += row `id` of the job, which is declared around it; a row that comes soon goes from L2 to L1. */
#define ADD_ROW \
    if (near) prefetch_row(table, row_bytes, used, ids + 8 * (id + near < last ? id + near : id), 1); \
    add_row(format, blocks, weighted, sum, table + load_i64(ids + 8 * id) * row_bytes, \
            blocks * LANES, 0, \
            weighted ? load_f32(weights + 4 * id) : 1.0f)

INLINE void pool_whole(int format, int blocks, int alignment, int weighted, int how, const job *j,
                       ahead *a) {
    const int64_t used = USED_BYTES(format, blocks * LANES), n_ids = j->n_ids,
        row_bytes = ROW_BYTES(format, blocks * LANES, alignment), out_row_bytes = j->out_row_bytes;
    const uint8_t *const table = j->table, *const ids = j->ids, *const weights = j->weights,
        *const lengths = j->lengths;
    const int mean = j->pooling == POOL_MEAN, into_l1 = a->how.into_l1;
    const int64_t last = n_ids + j->beyond, near = a->how.near;
    int64_t id = 0, prefetched = a->job == j ? a->id : last; /* of this job's rows */
    uint8_t *out = j->out;
    vf sum[16];
    for (int64_t bag = 0; bag < j->n_bags; bag++, out += out_row_bytes) {
        const int64_t length = lengths ? load_i32(lengths + 4 * bag) : j->fixed_length, end = id + length;
        const int64_t left = last - prefetched, until = length < left ? end : id + left;
        const uint8_t *const later = ids + 8 * (prefetched - id);
        prefetched += until - id;
        UNROLL for (int k = 0; k < blocks; k++) sum[k] = v_set(first_sum(length));
        for (; id < until; id++) {
            prefetch_row(table, row_bytes, used, later + 8 * id, into_l1);
            ADD_ROW;
        }
        if (id < end) {
            prefetch_later(a, j, end - id);
            for (; id < end; id++) {
                ADD_ROW;
            }
        }
        if (mean && length > 1) {
            vf factor = v_set(1.0f / (float)length);
            UNROLL for (int k = 0; k < blocks; k++) sum[k] = v_mul(sum[k], factor);
        }
        store_row(format, blocks, sum, out, 0, how);
    }
    if (a->job == j) a->id = prefetched;
}

/* The same, unpooled. */
INLINE void copy_whole(int format, int blocks, int alignment, int weighted, int how, const job *j,
                       ahead *a) {
    const int64_t used = USED_BYTES(format, blocks * LANES), n_ids = j->n_ids,
        row_bytes = ROW_BYTES(format, blocks * LANES, alignment), out_row_bytes = j->out_row_bytes;
    const uint8_t *const table = j->table, *const ids = j->ids, *const weights = j->weights;
    const int into_l1 = a->how.into_l1;
    const int64_t last = n_ids + j->beyond, near = a->how.near, lead = a->job == j ? a->id : last;
    const int64_t until = last - lead < n_ids ? last - lead : n_ids;
    uint8_t *out = j->out;
    vf sum[16];
    int64_t id = 0;
    for (; id < until; id++, out += out_row_bytes) {
        prefetch_row(table, row_bytes, used, ids + 8 * (id + lead), into_l1);
        UNROLL for (int k = 0; k < blocks; k++) sum[k] = v_set(first_sum(1));
        ADD_ROW;
        store_row(format, blocks, sum, out, 0, how);
    }
    if (a->job == j) a->id += id;
    if (id < n_ids) prefetch_later(a, j, n_ids - id);
    for (; id < n_ids; id++, out += out_row_bytes) {
        UNROLL for (int k = 0; k < blocks; k++) sum[k] = v_set(first_sum(1));
        ADD_ROW;
        store_row(format, blocks, sum, out, 0, how);
    }
    if (how == STREAM_FLOAT) v_stream_end();
}
#undef ADD_ROW

/* Any width: `blocks` vectors from column `column` on, then the next block of the same bag. */
INLINE void pool_block(int format, int blocks, int weighted, const job *j, int64_t id, int64_t length,
                       uint8_t *out, int64_t column, float factor) {
    vf sum[16];
    UNROLL for (int k = 0; k < blocks; k++) sum[k] = v_set(first_sum(length));
    for (int64_t i = id; i < id + length; i++) {
        const uint8_t *row = j->table + load_i64(j->ids + 8 * i) * j->row_bytes;
        add_row(format, blocks, weighted, sum, row, j->dim, column, weighted ? load_f32(j->weights + 4 * i) : 1.0f);
    }
    UNROLL for (int k = 0; k < blocks; k++) sum[k] = v_mul(sum[k], v_set(factor));
    store_row(format, blocks, sum, out, column, j->precision);
}

INLINE void lookup_any(int format, int weighted, const job *j, ahead *a) {
    const int64_t n_bags = bags_of(j);
    int64_t id = 0;
    for (int64_t bag = 0; bag < n_bags; bag++) {
        int64_t length = j->pooling == POOL_NONE ? 1 : j->lengths ? load_i32(j->lengths + 4 * bag)
            : j->fixed_length;
        float factor = j->pooling == POOL_MEAN && length > 1 ? 1.0f / (float)length : 1.0f;
        uint8_t *out = j->out + bag * j->out_row_bytes;
        int64_t column = 0;
        prefetch_rows(a, length);
#define BLOCK(n) \
    for (; (n) >= SPLIT(format) && j->dim - column >= (n) * LANES; column += (n) * LANES) \
        pool_block(format, n, weighted, j, id, length, out, column, factor);
        BLOCK(16) BLOCK(4) BLOCK(1)
        if (SPLIT(format) > 1) { BLOCK(2) }
#undef BLOCK
        if (column < j->dim) tail(format, j, id, length, out, column, factor);
        id += length;
    }
}

/* Unpooled outputs that would flush the caches bypass them, if rows are aligned for that. */
INLINE int streams(const job *j) {
    return j->pooling == POOL_NONE && j->n_ids * j->out_row_bytes > STREAM_BYTES
           && ((uintptr_t)j->out | (uintptr_t)j->out_row_bytes) % (4 * LANES) == 0;
}

INLINE void lookup_format(int format, int weighted, const job *j, ahead *a) {
    /* Others than these go without code of their own, which would take a compiler twice as long. */
#define IS_USUAL (!HAS_SCALE(format) && j->precision != AS_BF16)
#define WHOLE(n, to) \
    if (IS_USUAL && (n) >= SPLIT(format) && j->dim == (n) * LANES \
        && j->row_bytes == ROW_BYTES(format, (n) * LANES, to)) { \
        if (j->pooling != POOL_NONE) { \
            if (j->precision == AS_FP16) pool_whole(format, n, to, weighted, STORE_HALF, j, a); \
            else pool_whole(format, n, to, weighted, STORE_FLOAT, j, a); \
        } else if (j->precision == AS_FP16) copy_whole(format, n, to, weighted, STORE_HALF, j, a); \
        else if (!weighted && streams(j)) copy_whole(format, n, to, 0, STREAM_FLOAT, j, a); \
        else copy_whole(format, n, to, weighted, STORE_FLOAT, j, a); \
        return; \
    }
#if LANES >= 8
    WHOLE(1, 16) WHOLE(2, 16) WHOLE(4, 16) WHOLE(8, 16) WHOLE(16, 16)
    WHOLE(1, 4) WHOLE(2, 4) WHOLE(4, 4) WHOLE(8, 4) WHOLE(16, 4)
#endif
#undef WHOLE
#undef IS_USUAL
    lookup_any(format, weighted, j, a);
}

#define LOOKUP(format) \
    static NOINLINE void NAME(lookup_##format)(const job *j, ahead *a) { \
        lookup_format(format, 0, j, a); \
    } \
    static NOINLINE void NAME(lookup_weighted_##format)(const job *j, ahead *a) { \
        lookup_format(format, 1, j, a); \
    }
LOOKUP(INT2) LOOKUP(INT4) LOOKUP(INT8) LOOKUP(FP8) LOOKUP(FP16) LOOKUP(FP32)
LOOKUP(E4M3) LOOKUP(E4M3_BLOCK32) LOOKUP(NVFP4)
#undef LOOKUP

static void NAME(lookup)(const job *j, ahead *a) {
    static void (*const plain[])(const job *, ahead *) = {
        NAME(lookup_INT2), NAME(lookup_INT4), NAME(lookup_INT8), NAME(lookup_FP8), NAME(lookup_FP16),
            NAME(lookup_FP32), NAME(lookup_E4M3), NAME(lookup_E4M3_BLOCK32), NAME(lookup_NVFP4)};
    static void (*const weighted[])(const job *, ahead *) = {
        NAME(lookup_weighted_INT2), NAME(lookup_weighted_INT4), NAME(lookup_weighted_INT8),
        NAME(lookup_weighted_FP8), NAME(lookup_weighted_FP16), NAME(lookup_weighted_FP32),
        NAME(lookup_weighted_E4M3), NAME(lookup_weighted_E4M3_BLOCK32), NAME(lookup_weighted_NVFP4)};
    (j->weights ? weighted : plain)[j->format](j, a);
}
