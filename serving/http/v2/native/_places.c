/* What tensors say together: a place for each lookup, the outputs, and the scorer's inputs. */
#include "_reader.h"

/* ---- features by name ---- */

/* Whether what the host reads of a tensor lies in its memory. */
static int is_readable(const request *r, const tensor *t) {
    if (!t->is_elsewhere) return 1;
    return t->role != DENSE && !is_converted(t) && t->role != KJT_LENGTHS
           && (t->role != LENGTHS || r->names->features[t->owner].is_pooled);
}

static int take_dense(request *r, const tensor *t) {
    if (t->dims != 2 || t->shape[1] != r->names->dense_widths[t->owner] || r->dense_at[t->owner] >= 0) return 0;
    r->dense_at[t->owner] = t->at, r->dense_rows[t->owner] = t->shape[0];
    return 1;
}

/* Notes a tensor with its feature, which comes where its first tensor does. */
static int take_part(request *r, int32_t number) {
    const tensor *t = r->tensors + number;
    int32_t k = r->part_of[t->owner];
    if (k < 0) {
        k = r->part_of[t->owner] = (int32_t)r->part_count++;
        r->parts[k] = (part){t->owner, -1, -1, -1, -1};
    }
    part *p = r->parts + k;
    int32_t *to = t->role == LENGTHS ? &p->lengths : t->role == WEIGHTS ? &p->weights : &p->ids;
    if (*to >= 0) return 0;
    *to = number;
    return 1;
}

/* The sum of `count` lengths, or -1: one is negative. */
static int64_t sum_of(const char *lengths, int64_t count) {
    int64_t sum = 0;
    int32_t sign = 0;
    for (int64_t b = 0; b < count; b++) {
        int32_t length = load_i32(lengths + 4 * b);
        sign |= length, sum += length;
    }
    return sign < 0 ? -1 : sum;
}

static int place_part(const request *r, const part *p, place *to) {
    const feature *f = r->names->features + p->feature;
    const tensor *ids = p->ids < 0 ? NULL : r->tensors + p->ids;
    const tensor *lengths = p->lengths < 0 ? NULL : r->tensors + p->lengths;
    const tensor *weights = p->weights < 0 ? NULL : r->tensors + p->weights;
    if (!ids || !are_of(f, ids->kinds)) return 0;
    if (ids->role == IDS && (lengths || ids->dims != 2 || ids->shape[1] > LARGEST_LENGTH)) return 0;
    if ((ids->role == VALUES && ids->dims != 1) || (lengths && lengths->dims != 1)) return 0;
    if (weights && (weights->elements != ids->elements || !f->is_pooled)) return 0;
    if (f->is_pooled && !lengths && ids->role == VALUES) return 0;
    *to = (place){.kind = p->feature, .ids_at = ids->at, .ids = ids->elements,
                  .lengths_at = lengths ? lengths->at : -1, .weights_at = weights ? weights->at : -1,
                  .found_at = -1};
    if (ids->role == IDS) to->bags = ids->shape[0], to->bag_length = ids->shape[1];
    else if (lengths) to->bags = lengths->shape[0];
    /* No kernel reads the lengths of what is not pooled. */
    return f->is_pooled || !lengths || sum_of(values_of(r, lengths), lengths->elements) == to->ids;
}

/* ---- features in one pair of tensors ---- */

static int add_feature(request *r, text name) {
    int32_t feature = find(r->names, name, r->last);
    r->last = feature;
    if (feature < 0 || r->part_of[feature] >= 0) return 0;
    r->part_of[feature] = (int32_t)r->part_count;
    r->parts[r->part_count++] = (part){feature, -1, -1, -1, -1};
    return 1;
}

/* The features of a kjt in order: those that the parameter names, or all. */
static int list_features(request *r) {
    const names *n = r->names;
    scanner *s = &r->scan;
    scalar named;
    if (!r->kjt_features) {
        for (int64_t k = 0; k < n->n.features; k++)
            if (!add_feature(r, n->named[k])) return 0;
        return 1;
    }
    s->p = r->kjt_features, s->depth = 0;
    if (*s->p == '[') {
        int first = 1, found;
        if (!enter(s, '[')) return 0;
        while ((found = next_item(s, &first)) == 1)
            if (!read_scalar(s, &named) || named.kind != STRING || !add_feature(r, named.string)) return 0;
        return found == 0 && r->part_count;
    }
    if (!read_scalar(s, &named) || named.kind != STRING) return 0;
    for (text rest = named.string;;) {
        const char *comma = rest.n ? memchr(rest.p, ',', (size_t)rest.n) : NULL;
        int64_t size = comma ? comma - rest.p : rest.n;
        if (!add_feature(r, (text){rest.p, size})) return 0;
        if (!comma) return 1;
        rest.p += size + 1, rest.n -= size + 1;
    }
}

/* Whether vectors that lie together are all fp32, or all fp16. */
static int are_alike(const request *r) {
    int is_half[2] = {-1, -1};
    for (int64_t k = 0; k < r->part_count; k++) {
        const feature *f = r->names->features + r->parts[k].feature;
        int *seen = is_half + (f->is_pooled != 0);
        if (*seen >= 0 && *seen != f->is_half) return 0;
        *seen = (int)f->is_half;
    }
    return 1;
}

static int place_kjt(request *r) {
    const tensor *values = NULL, *lengths = NULL, *weights = NULL;
    for (const tensor *t = r->tensors; t < r->tensors + r->tensor_count; t++) {
        const tensor **to = t->role == KJT_VALUES ? &values : t->role == KJT_LENGTHS ? &lengths
            : t->role == KJT_WEIGHTS ? &weights : NULL;
        if (!to && t->role == DENSE) continue;
        if (!to || *to) return 0;
        *to = t;
    }
    const text schema = r->names->schema;
    if (!values || !lengths || (r->has_schema && !is(r->kjt_schema, schema.p, schema.n))) return 0;
    if (!list_features(r) || !are_alike(r)) return 0;
    if (values->dims != 1 || lengths->dims != 2 || lengths->shape[0] != r->part_count) return 0;
    if (weights && (weights->dims != 1 || weights->elements != values->elements)) return 0;
    const int64_t bags = lengths->shape[1];
    const char *counts = values_of(r, lengths);
    int64_t first = 0;
    for (int64_t k = 0; k < r->part_count; k++) {
        const int64_t skipped = 4 * bags * k, ids = sum_of(counts + skipped, bags);
        const int32_t number = r->parts[k].feature;
        if (ids < 0 || ids > values->elements - first) return 0;
        const feature *f = r->names->features + number;
        if ((weights && !f->is_pooled) || !are_of(f, values->kinds)) return 0;
        r->places[k] = (place){.kind = number, .ids_at = values->at + 8 * first, .ids = ids,
                               .lengths_at = lengths->at + skipped, .bags = bags,
                               .weights_at = weights ? weights->at + 4 * first : -1, .found_at = -1};
        first += ids;
    }
    return first == values->elements;
}

/* ---- outputs ---- */

/* The part whose found mask an output is; -1: it is none. KJT's mask, of all parts: the number of parts. */
static int32_t masked_part(const request *r, text name) {
    if (name.n < 6 || memcmp(name.p + name.n - 6, ".found", 6)) return -1;
    text owner = {name.p, name.n - 6};
    if (r->is_kjt) return IS(owner, "kjt") ? (int32_t)r->part_count : -1;
    int32_t feature = find(r->names, owner, r->last);
    return feature < 0 ? -1 : r->part_of[feature];
}

static output *add_output(request *r, enum what what, int64_t bytes, int64_t first, int64_t second) {
    output *made = r->outputs + r->output_count++;
    made->what = what, made->bytes = bytes, made->first = first, made->second = second;
    made->feature = -1, made->is_half = made->is_taken = 0;
    r->out_bytes += bytes;
    return made;
}

/* The sizes of each lookup's vectors. */
static int size_vectors(request *r) {
    int64_t total = 0;
    for (int64_t k = 0; k < r->part_count; k++) {
        place *p = r->places + k;
        const feature *f = r->names->features + p->kind;
        const int64_t count = f->is_pooled ? p->bags : p->ids;
        int64_t bytes;
        if (count > LARGEST_LENGTH || p->ids > LARGEST_LENGTH || p->bags > LARGEST_DIMENSION
            || __builtin_mul_overflow(count, f->vector_bytes, &bytes) || (total += bytes) > MOST_BYTES)
            return 0;
        r->ids += p->ids, r->vectors += count, r->row_bytes += p->ids * f->row_bytes;
        if (r->is_kjt) continue;
        output *o = add_output(r, VECTORS, bytes, count, f->dim);
        o->feature = (int32_t)p->kind, o->is_half = (int)f->is_half;
    }
    return 1;
}

/* A kjt's vectors: pooled ones side by side, [bags, sum of dims], then the others, then their offsets. */
static void join_vectors(request *r) {
    int64_t dims = 0, size = 0, values = 0, unpooled = 0;
    int pooled_half = 0, unpooled_half = 0;
    const int64_t bags = r->places[0].bags;
    r->step = 0;
    for (int64_t k = 0; k < r->part_count; k++) {
        const feature *f = r->names->features + r->places[k].kind;
        if (f->is_pooled) r->step += f->vector_bytes, dims += f->dim, pooled_half = (int)f->is_half;
        else {
            unpooled++, values += r->places[k].ids * f->dim, size += r->places[k].ids * f->vector_bytes;
            unpooled_half = (int)f->is_half;
        }
    }
    if (unpooled < r->part_count) add_output(r, KJT, r->step * bags, bags, dims)->is_half = pooled_half;
    if (!unpooled) return;
    add_output(r, SEQUENCES, size, values, -1)->is_half = unpooled_half;
    add_output(r, OFFSETS, 8 * (unpooled + 1), unpooled + 1, -1);
}

/* Whether all inputs of a scorer are there. */
static int can_score(const request *r) {
    const names *n = r->names;
    for (int64_t k = 0; k < n->n.sources; k++) {
        int64_t from = n->sources[k];
        if (from < 0 ? r->dense_at[-1 - from] < 0 : r->part_of[from] < 0) return 0;
    }
    return n->n.score_values > 0;
}

static int wants_scores(const request *r) {
    if (r->vectors_alone) return 0;
    if (!r->wanted_count) return can_score(r);
    for (int64_t k = 0; k < r->wanted_count; k++)
        if (IS(r->wanted[k].name, "score") && !r->names->n.has_score_feature) return 1;
    return 0;
}

/* The scorer's inputs, of as many rows each, and the size of the scores. */
static int size_scores(request *r) {
    const names *n = r->names;
    if (!(r->has_scores = wants_scores(r))) return 1;
    if (!can_score(r) || !n->n.sources) return 0;
    r->scores_alone = r->wanted_count > 0;
    for (int64_t k = 0; k < r->wanted_count; k++) r->scores_alone &= IS(r->wanted[k].name, "score");
    for (int64_t k = 0; k < n->n.sources; k++) {
        int64_t from = n->sources[k];
        const place *p = from < 0 ? NULL : r->places + r->part_of[from];
        int64_t rows = !p ? r->dense_rows[-1 - from] : n->features[from].is_pooled ? p->bags : p->ids;
        if (k && rows != r->rows) return 0;
        r->rows = rows;
    }
    int64_t bytes;
    if (__builtin_mul_overflow(r->rows, 4 * n->n.score_values, &bytes) || bytes > MOST_BYTES) return 0;
    add_output(r, SCORES, bytes, r->rows, n->n.score_width ? n->n.score_width : -1);
    return 1;
}

/* Found masks that are asked for: in the order of the features, or one of all of a kjt. */
static void size_masks(request *r) {
    int is_any = r->wants_masks;
    for (int64_t k = 0; is_any && k < r->part_count; k++) r->parts[k].mask = WANTED;
    for (int64_t k = 0; k < r->wanted_count; k++) {
        int32_t p = masked_part(r, r->wanted[k].name);
        if (p < 0) continue;
        is_any = 1;
        if (!r->is_kjt) r->parts[p].mask = WANTED;
    }
    if (is_any && r->is_kjt) add_output(r, MASK, r->ids, r->ids, -1);
    for (int64_t k = 0; is_any && !r->is_kjt && k < r->part_count; k++) {
        const place *p = r->places + k;
        if (r->parts[k].mask != WANTED) continue;
        r->parts[k].mask = (int32_t)r->output_count;
        add_output(r, MASK, p->ids, p->ids, -1)->feature = (int32_t)p->kind;
    }
}

/* The output that a header names; -1: this request has none of that name. */
static int32_t named_output(request *r, text name) {
    enum what what = SCORES;
    if (!r->is_kjt) {
        const int32_t feature = find(r->names, name, r->last), masked = feature < 0 ? masked_part(r, name) : -1;
        r->last = feature < 0 ? r->last : feature;
        if (feature >= 0) return r->part_of[feature]; /* vectors come first */
        if (masked >= 0) return r->parts[masked].mask;
        if (!IS(name, "score")) return -1;
    } else if (IS(name, "kjt")) what = KJT;
    else if (IS(name, "kjt.sequences")) what = SEQUENCES;
    else if (IS(name, "kjt.offsets")) what = OFFSETS;
    else if (IS(name, "kjt.found")) what = MASK;
    else if (!IS(name, "score")) return -1;
    for (int32_t k = r->is_kjt ? 0 : (int32_t)r->part_count; k < r->output_count; k++)
        if (r->outputs[k].what == what) return k;
    return -1;
}

/* Which outputs are sent, and how. */
static int choose_outputs(request *r) {
    const int64_t count = r->wanted_count ? r->wanted_count : r->output_count;
    if (!(r->sent = calloc((size_t)count + 1, sizeof(sent)))) return 0;
    for (int64_t k = 0; k < count; k++) {
        const wanted *w = r->wanted_count ? r->wanted + k : NULL;
        sent *s = r->sent + r->sent_count++;
        *s = (sent){.output = w ? named_output(r, w->name) : (int32_t)k, .region = w ? w->region : -1};
        if (s->output < 0 || r->outputs[s->output].is_taken) return 0;
        output *o = r->outputs + s->output;
        o->is_taken = 1;
        if (s->region >= 0) {
            s->offset = w->offset, s->size = w->size;
            if (s->size < o->bytes) return 0;
            if (is_on_device(r, s->region) && (r->has_scores || o->what == MASK || o->what == OFFSETS)) return 0;
        } else s->is_binary = w && w->binary != ABSENT ? w->binary == YES : r->is_binary_by_default;
    }
    return 1;
}

/* ---- places in the output buffer ---- */

/* Outputs that are sent behind the response's JSON come first, in its order; then those that are sent in other
 * ways, in that order too, and then those that are not sent. */
static void place_outputs(request *r) {
    int64_t at = 0, placed = 0;
    for (int is_binary = 1; is_binary >= 0 && placed < r->sent_count; is_binary--) {
        for (const sent *s = r->sent; s < r->sent + r->sent_count; s++)
            if (s->is_binary == is_binary)
                r->outputs[s->output].at = at, at += r->outputs[s->output].bytes, placed++;
        if (is_binary) r->sent_bytes = at;
    }
    if (placed == r->output_count) return;
    for (output *o = r->outputs; o < r->outputs + r->output_count; o++)
        if (!o->is_taken) o->at = at, at += o->bytes;
}

/* Where lookups write: vectors of a kjt in its outputs, each feature's part of a kjt's mask. */
static void place_lookups(request *r) {
    int64_t pooled = 0, unpooled = 0, mask = -1, column = 0;
    for (const output *o = r->outputs; r->is_kjt && o < r->outputs + r->output_count; o++) {
        if (o->what == KJT) pooled = o->at;
        if (o->what == SEQUENCES) unpooled = o->at;
        if (o->what == MASK) mask = o->at;
    }
    for (int64_t k = 0; k < r->part_count; k++) {
        place *p = r->places + k;
        const feature *f = r->names->features + p->kind;
        if (!r->is_kjt) {
            p->out_at = r->outputs[k].at;
            if (r->parts[k].mask >= 0) p->found_at = r->outputs[r->parts[k].mask].at;
            continue;
        }
        if (f->is_pooled) {
            p->out_at = p->bags ? pooled + column : 0, p->out_row_bytes = r->step;
            column += f->vector_bytes;
        } else p->out_at = unpooled, unpooled += p->ids * f->vector_bytes;
        if (mask >= 0) p->found_at = mask, mask += p->ids;
    }
}

static void place_matrices(request *r) {
    const names *n = r->names;
    for (int64_t k = 0; r->has_scores && k < n->n.sources; k++) {
        int64_t from = n->sources[k];
        if (from < 0) {
            int64_t width = n->dense_widths[-1 - from];
            r->matrices[k] = (matrix){0, r->dense_at[-1 - from], 4 * width, 0, width};
            continue;
        }
        const feature *f = n->features + from;
        const place *p = r->places + r->part_of[from];
        r->matrices[k] = (matrix){1, p->out_at, p->out_row_bytes ? p->out_row_bytes : f->vector_bytes, f->is_half,
                                  f->dim};
    }
}

/* ---- all of it ---- */

static int make_room(request *r) {
    const names_counts *n = &r->names->n;
    size_t parts = (size_t)(r->is_kjt ? n->features : r->tensor_count) + 1, dense = (size_t)n->dense + 1;
    r->part_of = malloc(((size_t)n->features + 1) * sizeof(int32_t));
    r->dense_at = malloc(dense * 8), r->dense_rows = malloc(dense * 8);
    r->parts = malloc(parts * sizeof(part)), r->places = malloc(parts * sizeof(place));
    r->outputs = malloc((2 * parts + 4) * sizeof(output));
    r->matrices = malloc(((size_t)n->sources + 1) * sizeof(matrix));
    if (!r->part_of || !r->dense_at || !r->dense_rows || !r->parts || !r->places || !r->outputs || !r->matrices)
        return 0;
    for (int64_t k = 0; k < n->features; k++) r->part_of[k] = -1;
    for (int64_t k = 0; k < n->dense; k++) r->dense_at[k] = -1;
    return 1;
}

int place_all(request *r) {
    int is_elsewhere = 0;
    for (const tensor *t = r->tensors; t < r->tensors + r->tensor_count; t++) r->is_kjt |= t->role >= KJT_VALUES;
    if (!make_room(r)) return 0;
    for (int32_t k = 0; k < r->tensor_count; k++) {
        const tensor *t = r->tensors + k;
        is_elsewhere |= t->is_elsewhere;
        if (!is_readable(r, t)) return 0;
        if (t->role == DENSE ? !take_dense(r, t) : !r->is_kjt && !take_part(r, k)) return 0;
    }
    if (r->is_kjt) {
        if (!place_kjt(r)) return 0;
    } else {
        for (int64_t k = 0; k < r->part_count; k++)
            if (!place_part(r, r->parts + k, r->places + k)) return 0;
    }
    if (!r->part_count || !size_vectors(r)) return 0;
    if (r->is_kjt) join_vectors(r);
    if (!size_scores(r)) return 0;
    size_masks(r);
    if ((r->has_scores && is_elsewhere) || r->out_bytes > r->names->n.most_out_bytes) return 0;
    if (!choose_outputs(r)) return 0;
    place_outputs(r), place_lookups(r), place_matrices(r);
    return 1;
}
