/* The response's JSON, as orjson writes what `serving.http.v2.request` describes; and where tensors lie in
 * regions. */
#include "_reader.h"

/* Makes room for `bytes` more; 0: there is no memory. */
static int reserve(buffer *to, int64_t bytes) {
    if (to->failed) return 0;
    if (to->used + bytes > to->room) {
        int64_t room = 2 * (to->used + bytes) + 256;
        char *grown = realloc(to->p, (size_t)room);
        if (!grown) {
            to->failed = 1;
            return 0;
        }
        to->p = grown, to->room = room;
    }
    return 1;
}

/* What follows needs room that was reserved. */
static inline void put(buffer *to, const char *from, int64_t bytes) {
    memcpy(to->p + to->used, from, (size_t)bytes);
    to->used += bytes;
}

/* The same for some ten bytes: 16 at a time, where both sides have as many more. */
static inline void put_some(buffer *to, const char *from, int64_t bytes) {
    for (int64_t k = 0; k < bytes; k += 16) memcpy(to->p + to->used + k, from + k, 16);
    to->used += bytes;
}

#define PUT(to, literal) put(to, literal, (int64_t)sizeof(literal) - 1)
enum { OUTPUT_BYTES = 256 }; /* that an output's description has at most, but for its names */

static inline void put_number(buffer *to, int64_t value) {
    char digits[24], *p = digits + sizeof digits;
    uint64_t left = (uint64_t)value;
    do *--p = (char)('0' + left % 10); while ((left /= 10));
    put(to, p, digits + sizeof digits - p);
}

/* A string as JSON, of at most 6 bytes for one of its own. */
static void put_text(buffer *to, text t) {
    static const char hex[] = "0123456789abcdef", named[] = "btn\0fr"; /* of 8 to 13 */
    PUT(to, "\"");
    for (int64_t k = 0, from = 0; k <= t.n; k++) {
        unsigned char c = k < t.n ? (unsigned char)t.p[k] : '"';
        if (c >= 0x20 && c != '"' && c != '\\') continue;
        put(to, t.p + from, k - from);
        from = k + 1;
        if (k == t.n) break;
        char escape[6] = {'\\', (char)c, '0', '0', hex[c >> 4 & 1], hex[c & 15]};
        int is_short = c >= 0x20 || (c >= 8 && c <= 13 && c != 11);
        if (c < 0x20) escape[1] = is_short ? named[c - 8] : 'u';
        put(to, escape, is_short ? 2 : 6);
    }
    PUT(to, "\"");
}

static void put_label(const request *r, const output *o, buffer *to) {
    static const char *const labels[] = {"", "kjt", "kjt.sequences", "kjt.offsets", "score", "kjt.found"};
    if (o->what == VECTORS || (o->what == MASK && !r->is_kjt)) {
        text label = r->names->label[o->feature];
        put_some(to, label.p, label.n - (o->what == MASK));
        if (o->what == MASK) PUT(to, ".found\"");
        return;
    }
    put_text(to, (text){labels[o->what], (int64_t)strlen(labels[o->what])});
}

/* What follows an output's name. */
static void put_rest(const request *r, const sent *s, buffer *to) {
    const output *o = r->outputs + s->output;
    if (o->what == MASK) PUT(to, ",\"datatype\":\"BOOL\",\"shape\":[");
    else if (o->what == OFFSETS) PUT(to, ",\"datatype\":\"INT64\",\"shape\":[");
    else if (o->is_half) PUT(to, ",\"datatype\":\"FP16\",\"shape\":[");
    else PUT(to, ",\"datatype\":\"FP32\",\"shape\":[");
    put_number(to, o->first);
    if (o->second >= 0) PUT(to, ","), put_number(to, o->second);
    if (s->region < 0) PUT(to, "],\"parameters\":{\"binary_data_size\":");
    else {
        PUT(to, "],\"parameters\":{\"shared_memory_region\":");
        put_text(to, r->regions[s->region]);
        PUT(to, ",\"shared_memory_byte_size\":");
    }
    put_number(to, o->bytes);
    PUT(to, "}}");
}

/* The output whose rest was written last, and where: most of a request's outputs are alike in it. */
typedef struct { const output *of; int64_t at, bytes; } rest;

static int is_alike(const output *a, const output *b) {
    return a->what == b->what && a->first == b->first && a->second == b->second && a->bytes == b->bytes
           && a->is_half == b->is_half;
}

static void put_output(const request *r, const sent *s, rest *last, buffer *to) {
    const output *o = r->outputs + s->output;
    int64_t names_bytes = o->what == VECTORS || o->what == MASK ? r->names->longest_label : 0;
    if (s->region >= 0) names_bytes += 6 * r->regions[s->region].n;
    if (!reserve(to, OUTPUT_BYTES + names_bytes)) return;
    PUT(to, "{\"name\":");
    put_label(r, o, to);
    if (s->region < 0 && last->of && is_alike(o, last->of)) {
        put_some(to, to->p + last->at, last->bytes);
        return;
    }
    int64_t at = to->used;
    put_rest(r, s, to);
    *last = (rest){s->region < 0 ? o : NULL, at, to->used - at};
}

void write_answer(const request *r, const char *tail, int64_t tail_bytes, buffer *to) {
    rest last = {0};
    if (!reserve(to, OUTPUT_BYTES + 6 * r->id.n + r->names->opening.n)) return;
    PUT(to, "{");
    if (r->id.n) PUT(to, "\"id\":"), put_text(to, r->id), PUT(to, ",");
    put(to, r->names->opening.p, r->names->opening.n);
    for (int64_t k = 0; k < r->sent_count; k++) {
        if (k && reserve(to, 1)) PUT(to, ",");
        put_output(r, r->sent + k, &last, to);
    }
    if (reserve(to, tail_bytes)) put(to, tail, tail_bytes);
}

/* ---- regions ---- */

/* Adds bytes to the last run, or begins one. last: where the bytes before ended in their region. */
static int64_t add_run(run *runs, int64_t count, run next) {
    run *last = runs + count - 1;
    if (count && last->region == next.region && last->offset + last->size == next.offset
        && last->at + last->size == next.at) {
        last->size += next.size;
        if (next.limit > last->limit) last->limit = next.limit;
        return count;
    }
    runs[count] = next;
    return count + 1;
}

static int64_t limit_of(int64_t offset, int64_t size) {
    int64_t end;
    return __builtin_add_overflow(offset, size, &end) ? INT64_MAX : end;
}

int64_t input_runs(const request *r, run *to) {
    int64_t count = 0, in_body = 0, at = 0;
    for (const tensor *t = r->tensors; t < r->tensors + r->tensor_count; t++) {
        if (t->source == IN_TEXT) continue;
        int64_t offset = t->source == IN_REGION ? t->offset : in_body;
        count = add_run(to, count, (run){t->region, offset, t->bytes, at, limit_of(offset, t->bytes)});
        at += t->bytes;
        if (t->source == IN_BODY) in_body += t->bytes;
    }
    return count;
}

int64_t elsewhere_runs(const request *r, run *to) {
    int64_t count = 0;
    for (const tensor *t = r->tensors; t < r->tensors + r->tensor_count; t++)
        if (t->is_elsewhere)
            count = add_run(to, count, (run){t->region, t->offset, t->bytes, t->at, limit_of(t->offset, t->bytes)});
    return count;
}

int64_t output_runs(const request *r, run *to) {
    int64_t count = 0;
    for (const sent *s = r->sent; s < r->sent + r->sent_count; s++) {
        const output *o = r->outputs + s->output;
        if (s->region < 0) continue;
        count = add_run(to, count, (run){s->region, s->offset, o->bytes, o->at, limit_of(s->offset, s->size)});
    }
    return count;
}
