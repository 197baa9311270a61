/* The JSON header: tensors with names, shapes and sizes, and the outputs that it asks for. Members may come in
 * any order; of two with one name the later counts, as in Python's readers. */
#include "_reader.h"
#include "_spelling.h"

/* Where a tensor lies, by its parameters. */
typedef struct {
    scalar size, region, region_size, offset, binary;
    int is_object, has_classification;
    digits size_digits;
} where;

static void begin_where(where *w) {
    w->size.kind = w->region.kind = w->region_size.kind = w->offset.kind = w->binary.kind = ABSENT;
    w->is_object = 1, w->has_classification = 0;
}

static __attribute__((noinline)) int read_key(scanner *s, text *key) { return read_string(s, key) && take(s, ':'); }

/* Takes a tensor's parameters. */
static int read_where(scanner *s, where *w) {
    text key;
    int first = 1, found;
    begin_where(w);
    skip_space(s);
    if (s->p == s->end || *s->p != '{') {
        w->is_object = 0;
        return skip_value(s);
    }
    if (!enter(s, '{')) return 0;
    while ((found = next_of(s, &first, '}')) == 1) {
        scalar ignored, *to = &ignored;
        skip_space(s);
        if (TAKE_KEY(s, "binary_data_size")) key = (text){"binary_data_size", 16};
        else if (!read_key(s, &key)) return 0;
        if (IS(key, "binary_data_size")) to = &w->size;
        else if (IS(key, "binary_data")) to = &w->binary;
        else if (IS(key, "shared_memory_region")) to = &w->region;
        else if (IS(key, "shared_memory_byte_size")) to = &w->region_size;
        else if (IS(key, "shared_memory_offset")) to = &w->offset;
        else if (IS(key, "classification")) w->has_classification = 1;
        skip_space(s);
        const char *value = s->p;
        if (!read_scalar(s, to)) return 0;
        if (to == &w->size) w->size_digits = (digits){value, s->p, &w->size.integer};
    }
    return found == 0;
}

/* Whether a region is named, and rightly: its number is put at `region`, which is -1 without one. */
static int take_region(request *r, const where *w, int32_t *region, int64_t *offset, int64_t *size) {
    *region = -1, *offset = 0, *size = 0;
    if (!w->region.kind && !w->region_size.kind && !w->offset.kind) return 1;
    if (w->region.kind != STRING || w->region_size.kind != INTEGER || w->region_size.integer < 0
        || (w->offset.kind && (w->offset.kind != INTEGER || w->offset.integer < 0)))
        return 0;
    *size = w->region_size.integer;
    if (w->offset.kind) *offset = w->offset.integer;
    text name = w->region.string;
    int64_t k = 0;
    while (k < r->region_count && !is(r->regions[k], name.p, name.n)) k++;
    if (k == r->region_count) {
        if (k == 1 << 16 || !room_for((void **)&r->regions, k, sizeof(text))) return 0;
        r->regions[r->region_count++] = name;
    }
    *region = (int32_t)k;
    return 1;
}

/* ---- inputs ---- */

/* list: the value of `data`. dims: -1 if the shape is wrong or missing. */
typedef struct {
    scalar name, datatype;
    int dims;
    int64_t shape[2];
    digits shape_digits[2];
    const char *list;
    int64_t list_bytes;
    where where;
} entry;

static int read_shape(scanner *s, entry *e) {
    int first = 1, found;
    e->dims = -1;
    skip_space(s);
    if (s->p == s->end || *s->p != '[') return skip_value(s);
    if (!enter(s, '[')) return 0;
    int dims = 0, is_right = 1;
    while ((found = next_item(s, &first)) == 1) {
        scalar n;
        skip_space(s);
        const char *value = s->p;
        if (!read_scalar(s, &n)) return 0;
        is_right &= dims < 2 && n.kind == INTEGER && n.integer >= 0 && n.integer < LARGEST_DIMENSION;
        if (!is_right) continue;
        e->shape_digits[dims] = (digits){value, s->p, e->shape + dims};
        e->shape[dims++] = n.integer;
    }
    if (is_right && dims) e->dims = dims;
    return found == 0;
}

enum member { OF_NAME, OF_SHAPE, OF_DATATYPE, OF_PARAMETERS, OF_DATA, UNKNOWN };

/* Takes the key of a tensor's member. */
static int read_member_key(scanner *s, enum member *which) {
    text key;
    skip_space(s);
    if (TAKE_KEY(s, "name")) *which = OF_NAME;
    else if (TAKE_KEY(s, "shape")) *which = OF_SHAPE;
    else if (TAKE_KEY(s, "datatype")) *which = OF_DATATYPE;
    else if (TAKE_KEY(s, "parameters")) *which = OF_PARAMETERS;
    else {
        if (!read_key(s, &key)) return 0;
        *which = IS(key, "name") ? OF_NAME : IS(key, "shape") ? OF_SHAPE : IS(key, "datatype") ? OF_DATATYPE
            : IS(key, "parameters") ? OF_PARAMETERS : IS(key, "data") ? OF_DATA : UNKNOWN;
    }
    return 1;
}

static int read_entry(scanner *s, entry *e) {
    enum member which;
    int first = 1, found, is_read;
    scalar ignored;
    e->name.kind = e->datatype.kind = ABSENT, e->dims = -1, e->list = NULL;
    begin_where(&e->where);
    if (!enter(s, '{')) return 0;
    while ((found = next_of(s, &first, '}')) == 1) {
        if (!read_member_key(s, &which)) return 0;
        switch (which) {
        case OF_NAME: is_read = read_scalar(s, &e->name); break;
        case OF_SHAPE: is_read = read_shape(s, e); break;
        case OF_DATATYPE: is_read = read_scalar(s, &e->datatype); break;
        case OF_PARAMETERS: is_read = read_where(s, &e->where); break;
        case OF_DATA:
            skip_space(s), e->list = s->p;
            is_read = skip_value(s), e->list_bytes = s->p - e->list;
            break;
        default: is_read = read_scalar(s, &ignored);
        }
        if (!is_read) return 0;
    }
    return found == 0;
}

/* Which tensor a name is; 0: none of this version's. */
static int take_name(request *r, text name, tensor *t) {
    int64_t dot = name.n - 1;
    while (dot > 0 && name.p[dot] != '.') dot--;
    if (dot <= 0 || r->names->has_dots) {
        int32_t entry = find(r->names, name, r->last);
        t->role = entry >= 0 ? IDS : DENSE, t->owner = entry >= 0 ? entry : -1 - entry;
        if (entry >= 0) r->last = entry;
        if (entry != NO_NAME || dot <= 0) return entry != NO_NAME;
    }
    text part = {name.p + dot + 1, name.n - dot - 1}, owner = {name.p, dot};
    if (IS(part, "values")) t->role = VALUES;
    else if (IS(part, "lengths")) t->role = LENGTHS;
    else if (IS(part, "weights")) t->role = WEIGHTS;
    else return 0;
    if (!r->names->n.has_kjt_feature && IS(owner, "kjt")) {
        t->role = t->role == VALUES ? KJT_VALUES : t->role == LENGTHS ? KJT_LENGTHS : KJT_WEIGHTS;
        t->owner = 0;
        return 1;
    }
    t->owner = find(r->names, owner, r->last);
    if (t->owner >= 0) r->last = t->owner;
    return t->owner >= 0;
}

static int take_datatype(text name, tensor *t) {
    int is_ids = t->role == IDS || t->role == VALUES || t->role == KJT_VALUES;
    int is_lengths = t->role == LENGTHS || t->role == KJT_LENGTHS;
    t->item = is_ids ? 8 : 4;
    if (is_ids) t->kinds = IS(name, "BYTES") ? STRING_IDS : INTEGER_IDS;
    if (t->kinds == STRING_IDS) return 1;
    if (is_ids && IS(name, "INT32")) t->item = 4, t->is_narrow = 1;
    else if (!(is_ids ? IS(name, "INT64") : is_lengths ? IS(name, "INT32") : IS(name, "FP32"))) return 0;
    return 1;
}

static int take_entry(request *r, const entry *e) {
    int64_t size;
    if (r->tensor_count == r->tensor_room) {
        tensor *grown = realloc(r->tensors, (size_t)(2 * r->tensor_room + 8) * sizeof(tensor));
        if (!grown) return 0;
        r->tensors = grown, r->tensor_room = 2 * r->tensor_room + 8;
    }
    tensor *t = r->tensors + r->tensor_count;
    t->source = IN_BODY, t->is_narrow = t->is_elsewhere = t->kinds = 0, t->list = e->list;
    t->dims = e->dims, t->shape[0] = e->shape[0], t->shape[1] = e->shape[1];
    if (e->datatype.kind != STRING || e->dims < 1 || !e->where.is_object) return 0;
    if (!take_name(r, e->name.string, t) || !take_datatype(e->datatype.string, t)) return 0;
    t->elements = t->shape[0];
    if (t->dims == 2 && __builtin_mul_overflow(t->elements, t->shape[1], &t->elements)) return 0;
    if (!t->elements) t->kinds = 0;
    if (__builtin_mul_overflow(t->elements, t->item, &t->bytes) || t->bytes > MOST_BYTES) return 0;
    if (!take_region(r, &e->where, &t->region, &t->offset, &size)) return 0;
    if (t->kinds == STRING_IDS && !t->list) {
        t->bytes = t->region >= 0 ? size : e->where.size.kind == INTEGER ? e->where.size.integer : -1;
        if (t->bytes < 4 * t->elements || t->bytes > MOST_BYTES) return 0; /* before there is room for their ids */
    }
    if (t->region >= 0) {
        if (t->list || e->where.size.kind || size != t->bytes) return 0;
        t->source = IN_REGION, t->is_elsewhere = is_on_device(r, t->region);
    } else if (t->list) {
        if (e->where.size.kind) return 0;
        t->source = IN_TEXT, t->list_bytes = e->list_bytes, r->text_tensors++;
    } else {
        if (e->where.size.kind != INTEGER || e->where.size.integer != t->bytes) return 0;
        r->body_tensors++;
    }
    r->other_tensors += is_converted(t);
    r->tensor_count++;
    return 1;
}

/* Notes how a tensor without data is spelled. */
static void note_entry(const scanner *s, const char *begin, const entry *e, spelling *of) {
    note_spelling(s, begin, e->name.string, of);
    if (e->list) of->before = 0;
    for (int k = 0; k < e->dims; k++) note_number(of, e->shape_digits[k]);
    if (e->where.size.kind == INTEGER) note_number(of, e->where.size_digits);
}

/* Two spellings are remembered, since ids and lengths often take turns. */
static int read_inputs(request *r) {
    scanner *s = &r->scan;
    entry entries[2];
    spelling spellings[2] = {{0}, {0}};
    int first = 1, found;
    r->tensor_count = r->text_tensors = r->body_tensors = r->other_tensors = 0, r->last = -1;
    if (!enter(s, '[')) return 0;
    for (int turn = 0; (found = next_item(s, &first)) == 1; turn = !turn) {
        entry *e = entries + turn;
        skip_space(s);
        if (!take_again(s, spellings + turn, &e->name.string)) {
            const char *begin = s->p;
            if (!read_entry(s, e) || e->name.kind != STRING) return 0;
            note_entry(s, begin, e, spellings + turn);
        }
        if (!take_entry(r, e)) return 0;
    }
    return found == 0;
}

/* ---- outputs ---- */

static int read_wanted(request *r, wanted *one) {
    scanner *s = &r->scan;
    scalar name = {.kind = ABSENT}, ignored;
    where w;
    enum member which;
    int first = 1, found;
    begin_where(&w);
    if (!enter(s, '{')) return 0;
    while ((found = next_of(s, &first, '}')) == 1) {
        if (!read_member_key(s, &which)) return 0;
        if (!(which == OF_PARAMETERS ? read_where(s, &w) : read_scalar(s, which == OF_NAME ? &name : &ignored)))
            return 0;
    }
    if (found || name.kind != STRING || !w.is_object || w.has_classification) return 0;
    one->name = name.string, one->binary = w.binary.kind;
    if (one->binary != ABSENT && one->binary != YES && one->binary != NO) return 0;
    return take_region(r, &w, &one->region, &one->offset, &one->size) && (one->region < 0 || one->binary != YES);
}

static int read_outputs(request *r) {
    scanner *s = &r->scan;
    wanted one;
    spelling as = {0};
    int first = 1, found;
    r->wanted_count = 0;
    if (!enter(s, '[')) return 0;
    while ((found = next_item(s, &first)) == 1) {
        skip_space(s);
        if (!take_again(s, &as, &one.name)) {
            const char *begin = s->p;
            if (!read_wanted(r, &one)) return 0;
            note_spelling(s, begin, one.name, &as);
        }
        if (!room_for((void **)&r->wanted, r->wanted_count, sizeof(wanted))) return 0;
        r->wanted[r->wanted_count++] = one;
    }
    return found == 0;
}

/* ---- the whole header ---- */

static int read_parameters(request *r) {
    scanner *s = &r->scan;
    text key;
    scalar schema = {0}, binary = {0}, timeout = {0}, ignored;
    int first = 1, found;
    r->kjt_features = NULL;
    if (!enter(s, '{')) return 0;
    while ((found = next_member(s, &first, &key)) == 1) {
        int is_read;
        if (IS(key, "kjt.features")) skip_space(s), r->kjt_features = s->p, is_read = skip_value(s);
        else is_read = read_scalar(s, IS(key, "kjt.schema") ? &schema
                                      : IS(key, "binary_data_output") ? &binary
                                      : IS(key, "timeout") ? &timeout : &ignored);
        if (!is_read) return 0;
    }
    if (found || (binary.kind != ABSENT && binary.kind != YES && binary.kind != NO)) return 0;
    if (timeout.kind != ABSENT && (timeout.kind != INTEGER || timeout.integer < 0)) return 0;
    r->is_binary_by_default = binary.kind == YES;
    r->timeout_us = timeout.kind == ABSENT ? 0 : timeout.integer;
    r->has_schema = schema.kind != ABSENT;
    r->kjt_schema = schema.kind == STRING ? schema.string : (text){"", 0};
    return 1;
}

/* Takes a member by `read`, or notes that it is wrong: another of its name may follow, which counts. */
static int read_member(request *r, int (*read)(request *), int *is_wrong) {
    const char *begin = r->scan.p;
    const int depth = r->scan.depth;
    if ((*is_wrong = !read(r))) r->scan.p = begin, r->scan.depth = depth;
    return !*is_wrong || skip_value(&r->scan);
}

int read_header(request *r) {
    scanner *s = &r->scan;
    text key;
    scalar id = {0}, ignored;
    int first = 1, found, are_wrong[3] = {0};
    const int64_t guess = r->header_bytes / 64; /* tensors, in the shortest of usual headers */
    r->tensors = malloc((size_t)(guess + 1) * sizeof(tensor)), r->tensor_room = guess;
    if (!r->tensors) return 0;
    *s = (scanner){.p = r->header, .end = r->header + r->header_bytes, .arena_bytes = 2 * r->header_bytes + 16};
    if (!is_utf8(r->header, r->header_bytes) || !enter(s, '{')) return 0;
    while ((found = next_member(s, &first, &key)) == 1) {
        int is_read = IS(key, "inputs") ? read_member(r, read_inputs, are_wrong)
            : IS(key, "outputs") ? read_member(r, read_outputs, are_wrong + 1)
            : IS(key, "parameters") ? read_member(r, read_parameters, are_wrong + 2)
            : read_scalar(s, IS(key, "id") ? &id : &ignored);
        if (!is_read) return 0;
    }
    skip_space(s);
    if (are_wrong[0] || are_wrong[1] || are_wrong[2]) return 0;
    if (found || s->p != s->end || !r->tensor_count || (id.kind && id.kind != STRING)) return 0;
    if (id.kind) r->id = id.string;
    return 1;
}
