/* A batch for the GPU's lookup kernel: the parts of all its requests one after another, and the header. */
#pragma once
#include "_layout.h"

typedef struct { BASE_FIELDS(MEMBER) } base;
typedef struct { PROBE_FIELDS(MEMBER) } probe;
typedef struct { RESOLVE_FIELDS(MEMBER) } resolve;

/* A request of a batch. alike: keys of the launches that its pooled and unpooled lookups share, compared
 * by identity. */
typedef struct {
    const kind *kinds;
    const measured *sizes;
    const place *places;
    int64_t count;
    PyObject *alike[2];
    int64_t group[2];
} asked;

/* Jobs that share a launch. jobs_at, programs_at: in the header. written_*: while it is written. */
typedef struct {
    PyObject *alike;
    int is_unpooled;
    int64_t jobs, programs, traits, first_flag, jobs_at, programs_at, written_jobs, written_programs;
} group;

/* What a batch has. Where nothing of a kind is read, its place in the header is -1. */
typedef struct {
    asked *requests;
    group *groups;
    int64_t count, group_count, cached, cached_ids, probe_blocks, resolved, resolve_programs, resolve_at,
        probe_at, header_bytes, most;
} batch;

/* Reads requests, each (kinds, what `measure` made of it, what its pooled lookups share a launch by, and its
 * unpooled ones, and more); 0: an error was raised. */
int take_batch(PyObject *list, batch *b);
void free_batch(batch *b);

/* Reads one request's kinds and what `measure` made of them; 0: they are something else. */
int take_measured(PyObject *kinds, PyObject *sizes, asked *a);
static inline void lay_out_again(room *m, const asked *a, laid_out *to) {
    const measured *s = a->sizes;
    lay_out_in(m, a->kinds, a->places, a->count, s->pooled_block, s->unpooled_block, s->gather_bytes, to);
}
