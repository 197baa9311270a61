/* Reads an infer request of the Open Inference Protocol V2: its JSON header, then what its tensors say.
 * The steps, and what is known after each:
 *   read_header   (_header.c)   tensors with names, shapes and sizes; the outputs that are asked for
 *   plan_inputs   (_inputs.c)   where each tensor lies in the input buffer, which may be the body
 *   fill_inputs   (_inputs.c)   that buffer, if it is not the body: JSON, INT32 ids, strings (_string_ids.c)
 *   place_all     (_places.c)   places of lookups, the outputs, the scorer's inputs
 *   write_answer  (_answer.c)   the response's JSON
 * Each returns 0 where the request is wrong or unusual: `serving.http.v2.request` says what is wrong. None
 * calls Python, so that large requests are read without its lock. */
#pragma once
#include <stdint.h>
#include "_json.h"
#include "_place.h"

static const int64_t LARGEST_DIMENSION = 1LL << 40, LARGEST_LENGTH = INT32_MAX, MOST_BYTES = 1LL << 50;

/* ---- a version's names (_names.c) ---- */

typedef struct { int64_t is_pooled, is_half, dim, vector_bytes, row_bytes, has_strings; } feature;

/* What Python says of a version, int64 each, before its features, dense tensors and scorer's inputs.
 * score_values: of a row; 0: there is no scorer. score_width: the second dimension of scores, or 0. */
#define NAMES_FIELDS(F) F(features) F(dense) F(sources) F(score_values) F(score_width) F(has_kjt_feature) \
    F(has_score_feature) F(most_out_bytes)
#define FIELD_MEMBER(name) int64_t name;
typedef struct { NAMES_FIELDS(FIELD_MEMBER) } names_counts;

/* label: a feature's name as JSON. dense_widths: of dense tensors. sources: the scorer's inputs, features by
 * their number and dense tensors as -1 - number. slots: an open hash of all names, entries as `find` returns
 * them, NO_NAME: free. */
typedef struct {
    names_counts n;
    const feature *features;
    const int64_t *dense_widths, *sources;
    text *named, *label, *dense_named, schema, opening;
    int has_dots; /* a dense tensor's name has one */
    int64_t longest_label;
    int32_t *slots;
    uint64_t mask;
    int64_t *words;
    char *held;
} names;

enum { NO_NAME = INT32_MIN };

/* The number of a feature, -1 - number of a dense tensor, or NO_NAME. last: the feature that was found before,
 * or -1; it or the next one is looked at first. */
int32_t find(const names *n, text name, int32_t last);
names *make_names(const int64_t *words, int64_t count, const char *held, int64_t bytes);
void free_names(names *n);

/* ---- a request ---- */

enum role { IDS, VALUES, LENGTHS, WEIGHTS, DENSE, KJT_VALUES, KJT_LENGTHS, KJT_WEIGHTS };
enum source { IN_BODY, IN_TEXT, IN_REGION };
enum ids { INTEGER_IDS = 1, STRING_IDS = 2 }; /* what ids came as */

/* owner: the number of a feature or dense tensor. from: where its bytes begin in the body; list: where its
 * numbers do in the header. at: where they are in the inputs. bytes: of its datatype. region: its number.
 * is_elsewhere: it lies in a region that this process does not read. is_bags: of /v1, a list of lists. kinds: what
 * its ids came as; of /v1 both, or neither where there are none. */
typedef struct {
    int8_t role, source, is_narrow, is_elsewhere, is_bags, dims, item, kinds;
    int32_t owner, region;
    int64_t shape[2], elements, bytes, offset, from, at, list_bytes;
    const char *list;
} tensor;

/* An output that the header names. binary: YES, NO or ABSENT. */
typedef struct { text name; enum kind binary; int32_t region; int64_t offset, size; } wanted;

enum what { VECTORS, KJT, SEQUENCES, OFFSETS, SCORES, MASK };

/* An output that the request has. feature: of vectors and masks. second: the second dimension, or -1. */
typedef struct { enum what what; int32_t feature; int64_t at, bytes, first, second; int is_half, is_taken; } output;

/* An output that is sent: number among the outputs. */
typedef struct { int32_t output, region; int is_binary; int64_t offset, size; } sent;

/* A feature's tensors, by number; -1: none. ids: of IDS or VALUES. mask: the output with its found mask, or
 * NOT_WANTED, or WANTED as long as it has no place. */
typedef struct { int32_t feature, ids, lengths, weights, mask; } part;
enum { NOT_WANTED = -1, WANTED = -2 };

/* Bytes between a region and the inputs or outputs: region -1 is the body. limit: where the tensors of the
 * run end in the region at most. */
typedef struct { int64_t region, offset, size, at, limit; } run;

/* As quant.contract.MatrixPlace. */
typedef struct { int64_t is_output, at, row_bytes, is_half, width; } matrix;

typedef struct {
    const names *names;
    scanner scan;
    const char *header, *body; /* body: what follows the header, or what was gathered from regions */
    int64_t header_bytes, body_bytes, base; /* base: where `body` begins in the buffer that places count in */
    int is_gathered;
    const char *is_on_device; /* of each region; null: none is, or nobody knows yet */
    int64_t device_count;
    /* of the header */
    text id, *regions, kjt_schema;
    int has_schema, is_binary_by_default;
    int64_t timeout_us; /* 0: none is said */
    int32_t last; /* feature that was named */
    const char *kjt_features; /* the value of the parameter, or null */
    tensor *tensors;
    wanted *wanted;
    int64_t tensor_room, tensor_count, wanted_count, region_count, text_tensors, body_tensors, other_tensors;
    /* of the inputs */
    int is_rebuilt;
    int64_t in_bytes;
    char *built; /* the input buffer, where it is rebuilt */
    /* of the places */
    part *parts;
    place *places;
    output *outputs;
    sent *sent;
    matrix *matrices;
    int32_t *part_of; /* of each feature: its part, or -1 */
    int64_t *dense_at, *dense_rows; /* of each dense tensor: in the inputs, or -1 */
    int64_t part_count, output_count, sent_count, rows, step; /* step: from one bag's vectors of a kjt to the next */
    int64_t ids, vectors, row_bytes, out_bytes, sent_bytes; /* sent_bytes: of the outputs that follow the JSON */
    int is_kjt, has_scores, scores_alone;
    int vectors_alone, wants_masks; /* of /v1: no scores; found masks of all features */
} request;

int read_header(request *r);
int plan_inputs(request *r);
int fill_inputs(request *r);
int place_all(request *r);

/* ---- a request of /v1 (_json_request.c) ---- */

enum { INPUTS_PER_BYTE = 4 }; /* bytes of inputs that one of JSON makes: a number has two at least */

/* owners: the name of each tensor's feature or dense tensor. inputs: room for INPUTS_PER_BYTE x the text. */
typedef struct {
    request r;
    text *owners, model;
    scalar version; /* INTEGER, or ABSENT */
    int32_t *lengths;
    char *inputs;
    int64_t used;
    int is_score, kinds; /* of the ids of the feature that is read */
} json_request;

int read_json(json_request *j);
int lay_out_json(json_request *j, const names *of);

/* Room in the answer, which grows. */
typedef struct { char *p; int64_t used, room; int failed; } buffer;
void write_answer(const request *r, const char *tail, int64_t tail_bytes, buffer *to);

/* Where tensors of the request lie in regions, joined where they lie one after another: as many as there are,
 * at most one for each tensor. */
int64_t input_runs(const request *r, run *to);
int64_t elsewhere_runs(const request *r, run *to); /* of tensors that are elsewhere, as they lie in the inputs */
int64_t output_runs(const request *r, run *to);

/* Whether the ids of a tensor came as something else than int64. */
static inline int is_converted(const tensor *t) { return t->is_narrow || t->kinds == STRING_IDS; }

/* Whether ids that came so are those of a feature. */
static inline int are_of(const feature *f, int kinds) { return !(kinds & (f->has_strings ? INTEGER_IDS : STRING_IDS)); }

int64_t string_id(text t);

/* Takes a string and writes its id. 0: it is none. */
static inline int take_string(scanner *s, char *to) {
    const int64_t used = s->arena_used;
    text found;
    if (!read_string(s, &found)) return 0;
    const int64_t id = string_id(found);
    memcpy(to, &id, 8);
    s->arena_used = used;
    return 1;
}

/* The values of a tensor in the inputs. */
static inline const char *values_of(const request *r, const tensor *t) {
    return r->is_rebuilt ? r->built + t->at : r->body + t->at - r->base;
}

static inline int is_on_device(const request *r, int32_t region) {
    return region >= 0 && region < r->device_count && r->is_on_device[region];
}

static inline int32_t load_i32(const char *p) {
    int32_t value;
    memcpy(&value, p, 4);
    return value;
}

/* Takes a number of a tensor's type and writes it: ids of `item` bytes as int64, lengths int32, others finite fp32.
 * 0: it is none. */
static inline int take_typed(scanner *s, enum role role, int item, char *to) {
    number n;
    int64_t value;
    if (role == WEIGHTS || role == DENSE || role == KJT_WEIGHTS) {
        if (!read_number(s, &n)) return 0;
        float found = (float)double_of(&n);
        memcpy(to, &found, 4);
        return isfinite(found);
    }
    if (!read_small(s, &value) && (!read_number(s, &n) || !integer_of(&n, &value))) return 0;
    if (item == 4 && (value < INT32_MIN || value > INT32_MAX)) return 0;
    int32_t small = (int32_t)value;
    if (role == LENGTHS || role == KJT_LENGTHS) memcpy(to, &small, 4);
    else memcpy(to, &value, 8);
    return 1;
}

/* Room for one more item of an array that doubles; null: there is no memory. */
static inline void *room_for(void **array, int64_t count, size_t size) {
    if (count & (count - 1)) return *array;
    void *grown = realloc(*array, (size_t)(count ? 2 * count : 1) * size);
    if (grown) *array = grown;
    return grown;
}
