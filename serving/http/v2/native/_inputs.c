/* The input buffer: ids int64, lengths int32, weights and dense tensors fp32. It is the body, unless tensors
 * came as JSON or ids as INT32 or strings: then all are written to a buffer of their own. */
#define _GNU_SOURCE /* strtod_l */
#include <locale.h>
#include "_reader.h"

double nearest(const char *p) {
    static locale_t plain;
    if (!plain) {
        locale_t made = newlocale(LC_ALL_MASK, "C", (locale_t)0), none = (locale_t)0;
        if (!__atomic_compare_exchange_n(&plain, &none, made, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            freelocale(made);
    }
    return strtod_l(p, NULL, plain);
}

int plan_inputs(request *r) {
    int64_t from = 0, at;
    r->is_rebuilt = r->text_tensors || r->other_tensors;
    if (r->text_tensors && r->body_tensors) return 0;
    at = r->is_rebuilt ? 0 : r->base;
    for (tensor *t = r->tensors; t < r->tensors + r->tensor_count; t++) {
        t->from = from, t->at = at;
        if (t->source == IN_TEXT && t->elements > t->list_bytes) return 0; /* before there is room for them */
        if (t->source != IN_TEXT) from += t->bytes;
        at += is_converted(t) ? 8 * t->elements : t->bytes;
        if (from > MOST_BYTES || at > MOST_BYTES) return 0;
    }
    r->in_bytes = at;
    return from == r->body_bytes;
}

static int take_value(scanner *s, const tensor *t, char *to) {
    return t->kinds == STRING_IDS ? take_string(s, to) : take_typed(s, t->role, t->item, to);
}

/* Writes a JSON list of numbers or strings, or of lists of them, which may be of any lengths. */
static int write_list(scanner *s, const tensor *t, char *to) {
    const int64_t item = is_converted(t) ? 8 : t->item;
    int64_t left = t->elements;
    int first = 1, found, are_lists = -1;
    s->p = t->list, s->depth = 0;
    if (!enter(s, '[')) return 0;
    while ((found = next_item(s, &first)) == 1) {
        skip_space(s);
        int is_list = s->p < s->end && *s->p == '[';
        if (are_lists < 0) are_lists = is_list;
        if (is_list != are_lists) return 0;
        if (!is_list) {
            if (!left-- || !take_value(s, t, to)) return 0;
            to += item;
            continue;
        }
        int first_inside = 1, inside;
        if (!enter(s, '[')) return 0;
        while ((inside = next_item(s, &first_inside)) == 1) {
            skip_space(s);
            if (!left-- || !take_value(s, t, to)) return 0;
            to += item;
        }
        if (inside < 0) return 0;
    }
    return found == 0 && !left;
}

/* Writes the ids of strings, before each of which lies its length, uint32. */
static int hash_strings(const tensor *t, const char *from, char *to) {
    const char *end = from + t->bytes;
    for (int64_t k = 0; k < t->elements; k++, to += 8) {
        uint32_t n;
        if (end - from < 4) return 0;
        memcpy(&n, from, 4), from += 4;
        if (n > end - from) return 0;
        const int64_t id = string_id((text){from, n});
        memcpy(to, &id, 8), from += n;
    }
    return from == end;
}

int fill_inputs(request *r) {
    for (const tensor *t = r->tensors; r->is_rebuilt && t < r->tensors + r->tensor_count; t++) {
        char *to = r->built + t->at;
        if (t->source == IN_TEXT) {
            if (!write_list(&r->scan, t, to)) return 0;
        } else if (t->kinds == STRING_IDS) {
            if (!hash_strings(t, r->body + t->from, to)) return 0;
        } else if (t->is_narrow) {
            for (int64_t k = 0; k < t->elements; k++, to += 8) {
                int64_t wide = load_i32(r->body + t->from + 4 * k);
                memcpy(to, &wide, 8);
            }
        } else memcpy(to, r->body + t->from, (size_t)t->bytes);
    }
    for (const tensor *t = r->tensors; t < r->tensors + r->tensor_count; t++) {
        if ((t->role != WEIGHTS && t->role != KJT_WEIGHTS) || t->is_elsewhere) continue;
        const char *weights = values_of(r, t);
        int32_t bad = 0;
        for (int64_t k = 0; k < t->elements; k++)
            bad |= (load_i32(weights + 4 * k) & 0x7f800000) == 0x7f800000;
        if (bad) return 0;
    }
    return 1;
}
