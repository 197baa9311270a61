/* Objects of a header that are spelled as the one before them, but for names and numbers. */
#include "_reader.h"

/* The digits of a number, and where its value is kept. */
typedef struct { const char *begin, *end; int64_t *value; } digits;
enum { NUMBERS = 3 };

/* A named object in its text: what comes before its name, what from the name's closing quote on, and the numbers
 * in that, in order. */
typedef struct { const char *begin, *rest; int64_t before, after; digits numbers[NUMBERS]; int count; } spelling;

/* Notes how the object that ends at `s->p` is spelled; not, if its name has escapes. */
static void note_spelling(const scanner *s, const char *begin, text name, spelling *of) {
    const char *rest = name.p + name.n;
    of->before = of->count = 0;
    if (*rest != '"' || (uintptr_t)name.p < (uintptr_t)begin || (uintptr_t)rest >= (uintptr_t)s->p) return;
    of->begin = begin, of->rest = rest, of->before = name.p - begin, of->after = s->p - rest;
}

/* Notes one of its numbers, if it stands behind its name. */
static void note_number(spelling *of, digits number) {
    int k = of->count;
    if (!of->before || (uintptr_t)number.begin < (uintptr_t)of->rest) return;
    for (; k && of->numbers[k - 1].begin > number.begin; k--) of->numbers[k] = of->numbers[k - 1];
    of->numbers[k] = number, of->count++;
}

static int take_same(scanner *s, const char *begin, int64_t n) {
    if (s->end - s->p < n || !are_same(s->p, begin, n)) return 0;
    s->p += n;
    return 1;
}

/* Takes what follows the name with other numbers, which are kept. */
static int take_numbers(scanner *s, spelling *of) {
    const char *from = of->rest, *begin = s->p;
    digits found[NUMBERS];
    int64_t values[NUMBERS];
    for (int k = 0; k < of->count; k++) {
        if (!take_same(s, from, of->numbers[k].begin - from)) return 0;
        found[k] = (digits){s->p, NULL, of->numbers[k].value};
        if (!read_small(s, values + k) || values[k] >= LARGEST_DIMENSION) return 0;
        found[k].end = s->p, from = of->numbers[k].end;
    }
    if (!of->count || !take_same(s, from, of->rest + of->after - from)) return 0;
    for (int k = 0; k < of->count; k++) of->numbers[k] = found[k], *found[k].value = values[k];
    of->rest = begin, of->after = s->p - begin;
    return 1;
}

/* Takes an object that differs in its name and numbers alone from the one before, of which nothing else is read
 * again: most of a request's tensors are such. 0: it is another, and nothing is taken. */
static int take_again(scanner *s, spelling *of, text *name) {
    const char *begin = s->p;
    const int64_t used = s->arena_used;
    if (!of->before || !take_same(s, of->begin, of->before)) return 0;
    s->p--; /* to the quote that opens the name */
    if (read_string(s, name) && name->p == begin + of->before) {
        const char *rest = --s->p;
        if (take_same(s, of->rest, of->after)) return 1;
        s->p = rest;
        if (take_numbers(s, of)) return 1;
    }
    s->p = begin, s->arena_used = used;
    return 0;
}
