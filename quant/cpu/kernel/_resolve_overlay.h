/* Asks an overlay for many ids at once: one pass notes ids that may be in a layer, the next looks these
 * up. Part of `_resolve.h`, whose macros it uses. */
#pragma once

/* Where an id's pilot lies in a layer, and what becomes its slot with it. */
typedef struct { uint64_t first, slots, spread; const uint8_t *pilot; } place_in_layer;

INLINE place_in_layer place_in(const layer *l, uint64_t id) {
    const uint64_t hash = mix_id(id), bucket = hash & (uint64_t)(l->buckets - 1);
    const whole_entry *e = (const whole_entry *)(intptr_t)l->entries + bucket;
    const uint64_t first = (uint64_t)e->first_row, g = spread(hash, e->seed);
    const uint8_t *pilots = (const uint8_t *)(intptr_t)l->pilots;
    return (place_in_layer){first, e->slots, g,
                            pilots + pilots_before(first) + bucket + reduce(g, pilots_before(e->slots) + 1)};
}

/* The slot that an id has if it is there; -1: its bucket is empty. */
INLINE int64_t slot_of_place(const place_in_layer *p) {
    return p->slots ? (int64_t)(p->first + slot_of(p->spread, *p->pilot, p->slots)) : -1;
}

/* Which numbers, each of all bits or none, are set. */
INLINE uint32_t lanes_set(lanes each) {
#if defined(ISA_AVX512)
    return (uint32_t)_mm512_movepi64_mask((__m512i)each);
#elif defined(ISA_AVX2)
    return (uint32_t)_mm256_movemask_pd((__m256d)each);
#else
    return (uint32_t)(each[0] & 1) | (uint32_t)(each[1] & 2);
#endif
}

/* The word of each id in a layer's filter. */
INLINE void words_of(const layer *l, const uint64_t *id, uint64_t *at) {
    EACH_VECTOR VECTOR(at) = (VECTOR(id) * ID_FILTER >> 32) * (uint64_t)l->filter_words >> 32;
}

/* Which ids of a block may be in a layer. */
INLINE uint32_t may_be_in(const layer *l, const uint64_t *id) {
    const lanes one = (lanes){0} + 1;
    const uint64_t *filter = (const uint64_t *)(intptr_t)l->filter;
    uint64_t at[ID_BLOCK], word[ID_BLOCK];
    uint32_t maybe = 0;
    words_of(l, id, at);
    EACH_ID word[i] = filter[at[i]];
    EACH_VECTOR {
        const lanes h = VECTOR(id) * ID_FILTER;
        const lanes needed = one << (h >> 26 & 63) | one << (h >> 20 & 63) | one << (h >> 14 & 63);
        maybe |= lanes_set((lanes)((VECTOR(word) & needed) == needed)) << i;
    }
    return maybe;
}

/* Which ids of a block a layer of row numbers has. */
INLINE uint32_t are_marked(const layer *l, const uint64_t *id) {
    const uint64_t *marks = (const uint64_t *)(intptr_t)l->marks, first = (uint64_t)l->first_marked,
        count = (uint64_t)l->marked;
    uint64_t at[ID_BLOCK], word[ID_BLOCK];
    uint32_t found = 0;
    EACH_VECTOR {
        const lanes number = VECTOR(id) - first;
        VECTOR(at) = (number >> 6) & (lanes)(number < count);
    }
    EACH_ID word[i] = marks[at[i]];
    EACH_VECTOR {
        const lanes number = VECTOR(id) - first;
        found |= lanes_set(-(VECTOR(word) >> (number & 63) & 1) & (lanes)(number < count)) << i;
    }
    return found;
}

enum { NOTED = 64 }; /* ids whose lines come in together */

/* Notes the ids of a block, from number `at` on, with bits in `maybe`; returns the new count. */
INLINE int64_t note_block(uint32_t maybe, int64_t at, int32_t *noted, int64_t count) {
#if defined(ISA_AVX512) /* no branch that nobody foresees */
    const __m512i each = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_storeu_si512(noted + count, _mm512_maskz_compress_epi32((__mmask16)maybe,
                                                    _mm512_add_epi32(each, _mm512_set1_epi32((int)at))));
    count += __builtin_popcount(maybe);
#else
    for (; maybe; maybe &= maybe - 1) noted[count++] = (int32_t)at + __builtin_ctz(maybe);
#endif
    return count;
}

/* Notes which of `n` ids may be in a layer, or are in one with marks; returns how many. */
INLINE int64_t note(const layer *l, int is_marked, const uint8_t *ids, int64_t n, int32_t *noted) {
    int64_t count = 0, at = 0;
    for (; at + ID_BLOCK <= n; at += ID_BLOCK) {
        uint64_t id[ID_BLOCK];
        __builtin_memcpy(id, ids + 8 * at, sizeof id);
        count = note_block(is_marked ? are_marked(l, id) : may_be_in(l, id), at, noted, count);
    }
    if (at < n) {
        uint64_t id[ID_BLOCK] = {0};
        for (int64_t i = 0; i < n - at; i++) id[i] = (uint64_t)load_i64(ids + 8 * (at + i));
        count = note_block((is_marked ? are_marked(l, id) : may_be_in(l, id)) & ((1u << (n - at)) - 1), at,
                           noted, count);
    }
    return count;
}

/* Replaces rows of noted ids that the layer has. Each step prefetches for the next. */
INLINE void override_noted(const layer *l, const uint8_t *ids, const int32_t *noted, int64_t count,
                           int64_t *numbers) {
    const uint8_t *deleted = (const uint8_t *)(intptr_t)l->deleted;
    place_in_layer places[NOTED];
    int64_t slots[NOTED];
    for (int64_t from = 0; from < count; from += NOTED, noted += NOTED) {
        const int64_t n = count - from < NOTED ? count - from : NOTED;
        for (int64_t k = 0; k < n; k++) {
            places[k] = place_in(l, (uint64_t)load_i64(ids + 8 * noted[k]));
            __builtin_prefetch(places[k].pilot, 0, 3);
        }
        for (int64_t k = 0; k < n; k++) {
            slots[k] = slot_of_place(places + k);
            __builtin_prefetch((const uint8_t *)(intptr_t)l->ids + slots[k] * l->id_step, 0, 3);
        }
        for (int64_t k = 0; k < n; k++) {
            const int64_t slot = slots[k];
            if (slot < 0 || load_i64((const uint8_t *)(intptr_t)l->ids + slot * l->id_step) != load_i64(ids
                + 8 * noted[k])) continue;
            numbers[noted[k]] = deleted && deleted[slot >> 3] >> (slot & 7) & 1 ? -1 : l->first_row + slot;
        }
    }
}

/* whatever a file holds */
static inline int64_t below(int64_t x, int64_t count) { return x < count ? x : count - 1; }

/* The same of a layer with marks, which has all of the noted ids. */
INLINE void override_marked(const layer *l, const uint8_t *ids, const int32_t *noted, int64_t count,
                            int64_t *numbers) {
    const uint8_t *deleted = (const uint8_t *)(intptr_t)l->deleted;
    const uint64_t *marks = (const uint64_t *)(intptr_t)l->marks;
    const uint32_t *before = (const uint32_t *)(intptr_t)l->marks_before,
        *slots = (const uint32_t *)(intptr_t)l->marked_slots;
    const uint32_t *at[NOTED];
    for (int64_t from = 0; from < count; from += NOTED, noted += NOTED) {
        const int64_t n = count - from < NOTED ? count - from : NOTED;
        for (int64_t k = 0; k < n; k++) {
            const uint64_t number = (uint64_t)load_i64(ids + 8 * noted[k]) - (uint64_t)l->first_marked,
                word = number >> 6;
            const uint64_t lower = marks[word] & (((uint64_t)1 << (number & 63)) - 1);
            at[k] = slots + below((int64_t)before[word] + __builtin_popcountll(lower), l->slots);
            __builtin_prefetch(at[k], 0, 3);
        }
        for (int64_t k = 0; k < n; k++) {
            const int64_t slot = below(*at[k], l->slots);
            numbers[noted[k]] = deleted && deleted[slot >> 3] >> (slot & 7) & 1 ? -1 : l->first_row + slot;
        }
    }
}

/* Rows of an overlay take the place of `numbers`, of `n` ids, STRETCH at most. */
INLINE void override(const row_map *m, const uint8_t *ids, int64_t n, int64_t *numbers) {
    const layer *layers = (const layer *)(intptr_t)m->layers;
    int32_t noted[STRETCH + ID_BLOCK];
    for (int64_t k = m->layer_count; k-- > 0;) { /* the newest last */
        const layer *l = layers + k;
        if (l->marks) override_marked(l, ids, noted, note(l, 1, ids, n, noted), numbers);
        else override_noted(l, ids, noted, note(l, 0, ids, n, noted), numbers);
    }
}

/* What an overlay says of the ids of a job from number `at` on. */
static NOINLINE void NAME(look_ahead)(resolving *r, int64_t at) {
    const int64_t left = r->job->n_ids - at, n = left < STRETCH ? left : STRETCH;
    for (int64_t i = 0; i < n; i++) r->overlay[i] = NOT_OVERLAID;
    override(r->job->map, r->job->ids + 8 * at, n, r->overlay);
}
