/* A request of /v1, in JSON alone: {"model", "version", "features": {name: [[id, ...], ...], or {"values",
 * "lengths", "weights"}}, "dense": {name: rows}, "found"}. Its numbers are read at once into the input buffer;
 * whose they are is found when the model is known. Ids may be strings. */
#include "_reader.h"

static int begin_list(scanner *s) {
    skip_space(s);
    return enter(s, '[');
}

/* Room in the input buffer for the next tensor, of any type. */
static char *next_at(json_request *j) {
    j->used = (j->used + 7) & ~(int64_t)7;
    return j->inputs + j->used;
}

/* Bytes of a number of a tensor. */
static int item_of(enum role role) { return role == VALUES ? 8 : 4; }

/* Notes a tensor that ends at `end` of the input buffer; null: there is no memory. */
static tensor *add_tensor(json_request *j, text name, enum role role, char *begin, char *end) {
    request *r = &j->r;
    if (!room_for((void **)&r->tensors, r->tensor_count, sizeof(tensor))
        || !room_for((void **)&j->owners, r->tensor_count, sizeof(text)))
        return NULL;
    tensor *t = r->tensors + r->tensor_count;
    j->owners[r->tensor_count++] = name;
    *t = (tensor){.role = (int8_t)role, .source = IN_BODY, .dims = 1, .item = (int8_t)item_of(role), .region = -1};
    t->kinds = (int8_t)j->kinds;
    t->at = begin - j->inputs, t->bytes = end - begin, t->elements = t->shape[0] = t->bytes / t->item;
    j->used = end - j->inputs;
    return t;
}

/* Takes a list of numbers, or of ids that are strings, of a tensor; `*to` goes behind them. */
static int take_values(json_request *j, enum role role, char **to) {
    scanner *s = &j->r.scan;
    int first = 1, found;
    if (!begin_list(s)) return 0;
    for (; (found = next_item(s, &first)) == 1; *to += item_of(role)) {
        skip_space(s);
        const int is_string = role == VALUES && s->p < s->end && *s->p == '"';
        if (!(is_string ? take_string(s, *to) : take_typed(s, role, item_of(role), *to))) return 0;
        if (role == VALUES) j->kinds |= is_string ? STRING_IDS : INTEGER_IDS;
    }
    return found == 0;
}

/* [[id, ...], ...] of a feature: its ids, and how many each bag has. */
static int read_bags(json_request *j, text name) {
    scanner *s = &j->r.scan;
    char *begin = next_at(j), *to = begin;
    int64_t bags = 0;
    int first = 1, found;
    if (!begin_list(s)) return 0;
    while ((found = next_item(s, &first)) == 1) {
        const char *bag = to;
        if (!room_for((void **)&j->lengths, bags, sizeof(int32_t)) || !take_values(j, VALUES, &to)) return 0;
        j->lengths[bags++] = (int32_t)((to - bag) / 8);
    }
    tensor *ids = found ? NULL : add_tensor(j, name, VALUES, begin, to);
    if (!ids) return 0;
    ids->is_bags = 1;
    char *lengths = next_at(j);
    if (bags) memcpy(lengths, j->lengths, (size_t)bags * 4);
    return add_tensor(j, name, LENGTHS, lengths, lengths + 4 * bags) != NULL;
}

/* {"values", "lengths", "weights"} of a feature; null is as if it were left out. */
static int read_jagged(json_request *j, text name) {
    static const struct { text key; enum role role; } parts[] = {
        {{"values", 6}, VALUES}, {{"lengths", 7}, LENGTHS}, {{"weights", 7}, WEIGHTS}};
    scanner *s = &j->r.scan;
    text key;
    int first = 1, found, seen[3] = {0};
    if (!enter(s, '{')) return 0;
    while ((found = next_member(s, &first, &key)) == 1) {
        int k = 0;
        while (k < 3 && !is_name(key, parts[k].key)) k++;
        if (k == 3 || seen[k]++) return 0;
        skip_space(s);
        if (k && take_word(s, "null", 4)) continue;
        char *begin = next_at(j), *to = begin;
        if (!take_values(j, parts[k].role, &to) || !add_tensor(j, name, parts[k].role, begin, to)) return 0;
    }
    return found == 0 && seen[0];
}

static int read_feature(json_request *j, text name) {
    scanner *s = &j->r.scan;
    j->kinds = 0;
    skip_space(s);
    return s->p < s->end && *s->p == '{' ? read_jagged(j, name) : read_bags(j, name);
}

/* [[number, ...], ...] of a dense tensor, of one width. */
static int read_rows(json_request *j, text name) {
    scanner *s = &j->r.scan;
    char *begin = next_at(j), *to = begin;
    int64_t rows = 0, width = -1;
    int first = 1, found;
    if (!begin_list(s)) return 0;
    while ((found = next_item(s, &first)) == 1) {
        const char *row = to;
        if (!take_values(j, DENSE, &to) || (rows++ && (to - row) / 4 != width)) return 0;
        width = (to - row) / 4;
    }
    tensor *t = found ? NULL : add_tensor(j, name, DENSE, begin, to);
    if (!t) return 0;
    t->dims = 2, t->shape[0] = rows, t->shape[1] = width; /* -1: the width is the model's */
    return 1;
}

static int read_named(json_request *j, int (*read)(json_request *, text)) {
    scanner *s = &j->r.scan;
    text name;
    int first = 1, found;
    if (!enter(s, '{')) return 0;
    while ((found = next_member(s, &first, &name)) == 1)
        if (!read(j, name)) return 0;
    return found == 0;
}

/* The fields of a request, a bit each. */
enum { HAS_MODEL = 1, HAS_FEATURES = 2, HAS_DENSE = 4, HAS_VERSION = 8, HAS_FOUND = 16 };

static int read_field(json_request *j, text key, int *seen) {
    scanner *s = &j->r.scan;
    const int field = IS(key, "features") ? HAS_FEATURES : IS(key, "dense") && j->is_score ? HAS_DENSE
                    : IS(key, "model") ? HAS_MODEL : IS(key, "version") ? HAS_VERSION
                    : IS(key, "found") && !j->is_score ? HAS_FOUND : 0;
    scalar value;
    if (!field || *seen & field) return 0;
    *seen |= field;
    if (field == HAS_FEATURES || field == HAS_DENSE)
        return read_named(j, field == HAS_FEATURES ? read_feature : read_rows);
    skip_space(s);
    if (field == HAS_VERSION && take_word(s, "null", 4)) {
        j->version.kind = ABSENT;
        return 1;
    }
    if (!read_scalar(s, &value)) return 0;
    if (field == HAS_VERSION) {
        j->version = value;
        return value.kind == INTEGER;
    }
    if (field == HAS_MODEL) {
        j->model = value.string;
        return value.kind == STRING;
    }
    j->r.wants_masks = value.kind == YES;
    return value.kind == YES || value.kind == NO;
}

int read_json(json_request *j) {
    request *r = &j->r;
    scanner *s = &r->scan;
    text key;
    int first = 1, found, seen = 0;
    *s = (scanner){.p = r->header, .end = r->header + r->header_bytes, .arena_bytes = 2 * r->header_bytes + 16};
    j->version.kind = ABSENT;
    if (!is_utf8(r->header, r->header_bytes) || !enter(s, '{')) return 0;
    while ((found = next_member(s, &first, &key)) == 1)
        if (!read_field(j, key, &seen)) return 0;
    skip_space(s);
    return found == 0 && s->p == s->end && (seen & HAS_MODEL) && r->tensor_count;
}

int lay_out_json(json_request *j, const names *of) {
    static const wanted score = {.name = {"score", 5}, .binary = ABSENT, .region = -1};
    request *r = &j->r;
    if (r->places || (j->is_score && of->n.has_score_feature)) return 0;
    r->names = of, r->last = -1, r->is_rebuilt = 1, r->built = j->inputs, r->is_binary_by_default = 1;
    r->vectors_alone = !j->is_score;
    if (j->is_score) {
        if (!room_for((void **)&r->wanted, 0, sizeof(wanted))) return 0;
        r->wanted[r->wanted_count++] = score;
    }
    for (tensor *t = r->tensors; t < r->tensors + r->tensor_count; t++) {
        const int32_t entry = find(of, j->owners[t - r->tensors], r->last);
        if (entry == NO_NAME || (entry < 0) != (t->role == DENSE)) return 0;
        if (entry >= 0) r->last = entry;
        t->owner = entry < 0 ? -1 - entry : entry;
        if (t->role == DENSE && t->shape[1] < 0) t->shape[1] = of->dense_widths[t->owner];
    }
    return place_all(r);
}
