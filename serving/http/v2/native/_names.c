/* A version's names: features, dense tensors and the scorer's inputs, found by an open hash. 16 bytes at a time
 * may be read of what is held. */
#include "_reader.h"

static uint64_t hash_of(text t) {
    uint64_t hash = (uint64_t)t.n;
    for (int64_t k = 0; k < t.n; k += 8) {
        uint64_t word = 0;
        int64_t left = t.n - k;
        memcpy(&word, t.p + k, (size_t)(left < 8 ? left : 8));
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    return hash;
}

static text name_of(const names *n, int32_t entry) {
    return entry < 0 ? n->dense_named[-1 - entry] : n->named[entry];
}

int32_t find(const names *n, text name, int32_t last) {
    if (last + 1 < n->n.features && is_name(name, n->named[last + 1])) return last + 1;
    if (last >= 0 && is_name(name, n->named[last])) return last;
    for (uint64_t slot = hash_of(name) & n->mask;; slot = (slot + 1) & n->mask) {
        int32_t entry = n->slots[slot];
        if (entry == NO_NAME) return NO_NAME;
        if (is_name(name, name_of(n, entry))) return entry;
    }
}

static void insert(names *n, int32_t entry) {
    uint64_t slot = hash_of(name_of(n, entry)) & n->mask;
    while (n->slots[slot] != NO_NAME) slot = (slot + 1) & n->mask;
    n->slots[slot] = entry;
}

void free_names(names *n) {
    if (!n) return;
    free(n->named), free(n->label), free(n->dense_named), free(n->slots), free(n->words), free(n->held), free(n);
}

/* Takes `count` strings, whose lengths are at `*lengths`, off `*from`. */
static int take_texts(text *to, int64_t count, const int64_t **lengths, const char **from, const char *end) {
    for (int64_t k = 0; k < count; k++) {
        int64_t n = *(*lengths)++;
        if (n < 0 || n > end - *from) return 0;
        to[k] = (text){*from, n}, *from += n;
    }
    return 1;
}

static int is_count(int64_t value) { return value >= 0 && value < 1 << 24; }

/* Points into the words and the text; 0: they are not a version's. */
static int read_words(names *n, int64_t count, int64_t bytes) {
    const int64_t *w = n->words + sizeof n->n / 8;
    const names_counts *c = &n->n;
    if (count < (int64_t)(sizeof n->n / 8)) return 0;
    memcpy(&n->n, n->words, sizeof n->n);
    if (!is_count(c->features) || !is_count(c->dense) || !is_count(c->sources) || !is_count(c->score_values)
        || !is_count(c->score_width) || c->most_out_bytes < 0)
        return 0;
    int64_t fields = (int64_t)(sizeof(feature) / 8), texts = 2 * c->features + c->dense + 2;
    if (count != w - n->words + c->features * fields + c->dense + c->sources + texts) return 0;
    n->features = (const feature *)(const void *)w, w += c->features * fields;
    n->dense_widths = w, w += c->dense;
    n->sources = w, w += c->sources;
    for (int64_t k = 0; k < c->features; k++) {
        const feature *f = n->features + k;
        if (!is_count(f->dim) || !is_count(f->vector_bytes) || !is_count(f->row_bytes)) return 0;
    }
    for (int64_t k = 0; k < c->dense; k++)
        if (!is_count(n->dense_widths[k])) return 0;
    for (int64_t k = 0; k < c->sources; k++)
        if (n->sources[k] >= c->features || n->sources[k] < -c->dense) return 0;
    const char *from = n->held, *end = n->held + bytes;
    n->named = calloc((size_t)c->features + 1, sizeof(text));
    n->label = calloc((size_t)c->features + 1, sizeof(text));
    n->dense_named = calloc((size_t)c->dense + 1, sizeof(text));
    if (!n->named || !n->label || !n->dense_named) return 0;
    return take_texts(n->named, c->features, &w, &from, end) && take_texts(n->label, c->features, &w, &from, end)
           && take_texts(n->dense_named, c->dense, &w, &from, end) && take_texts(&n->schema, 1, &w, &from, end)
           && take_texts(&n->opening, 1, &w, &from, end) && from == end;
}

names *make_names(const int64_t *words, int64_t count, const char *held, int64_t bytes) {
    names *n = calloc(1, sizeof(names));
    if (!n || !(n->words = malloc((size_t)count * 8 + 8)) || !(n->held = calloc(1, (size_t)bytes + 16))) goto failed;
    memcpy(n->words, words, (size_t)count * 8), memcpy(n->held, held, (size_t)bytes);
    if (!read_words(n, count, bytes)) goto failed;
    uint64_t room = 16;
    while (room < 2 * (uint64_t)(n->n.features + n->n.dense)) room *= 2;
    if (!(n->slots = malloc(room * sizeof(int32_t)))) goto failed;
    n->mask = room - 1;
    for (uint64_t slot = 0; slot < room; slot++) n->slots[slot] = NO_NAME;
    for (int64_t k = 0; k < n->n.features; k++) {
        insert(n, (int32_t)k);
        if (n->label[k].n > n->longest_label) n->longest_label = n->label[k].n;
    }
    for (int64_t k = 0; k < n->n.dense; k++) {
        insert(n, (int32_t)(-1 - k));
        n->has_dots |= memchr(n->dense_named[k].p, '.', (size_t)n->dense_named[k].n) != NULL;
    }
    return n;
failed:
    free_names(n);
    return NULL;
}
