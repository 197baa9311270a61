/* What a segment's header and a model's record say of a table (loader/segment/header.py, docs/format.md). */
#include "_attach.h"
#include "_json.h"
#include "_rows.h"
#include "_xxh3.h"

enum { PRELUDE_BYTES = 64, LAST_FORMAT_VERSION = 10 };
static const char *const formats[] = {"int2", "int4", "int8", "fp8", "fp16", "fp32",
                                      "fp8_e4m3", "fp8_e4m3_block32", "nvfp4"};

double nearest(const char *p) { return (void)p, 0.0; } /* only asked whether a number is finite */

/* ---- objects of which some members are wanted ---- */

/* take: takes the value of a member; 0: it is no JSON. */
typedef struct { const char *name; int (*take)(scanner *s, void *to); void *to; } member;

static int take_members(scanner *s, const member *of, int n) {
    int first = 1, found;
    text key;
    if (!enter(s, '{')) return 0;
    while ((found = next_member(s, &first, &key)) == 1) {
        const member *m = of;
        while (m < of + n && !is(key, m->name, (int64_t)strlen(m->name))) m++;
        if (!(m < of + n ? m->take(s, m->to) : skip_value(s))) return 0;
    }
    return !found;
}
#define TAKE(s, ...) \
    take_members(s, (const member[]){__VA_ARGS__}, (int)(sizeof((const member[]){__VA_ARGS__}) / sizeof(member)))

/* -1: it is no integer. */
static int take_integer(scanner *s, void *to) {
    scalar value;
    if (!read_scalar(s, &value)) return 0;
    *(int64_t *)to = value.kind == INTEGER ? value.integer : -1;
    return 1;
}

static int take_text(scanner *s, void *to) { return read_string(s, to); }

/* All 64 bits; 0 for a number that has more. */
static int take_checksum(scanner *s, void *to) {
    uint64_t value = 0;
    number n;
    skip_space(s);
    if (!read_number(s, &n)) return 0;
    for (const char *p = n.p; p < n.end; p++)
        if (!is_digit(*p) || __builtin_mul_overflow(value, 10, &value)
            || __builtin_add_overflow(value, (uint64_t)(*p - '0'), &value)) {
            value = 0;
            break;
        }
    *(uint64_t *)to = value;
    return 1;
}

static int take_presence(scanner *s, void *to) { return *(int *)to = 1, skip_value(s); }

/* ---- a record ---- */

int read_record(const char *from, int64_t bytes, record *to) {
    scanner s = {.p = from, .end = from + bytes, .arena_bytes = bytes + 1};
    *to = (record){-1, 0};
    const int is_json = TAKE(&s, {"current", take_integer, &to->version}, {"sequence", take_integer, &to->sequence});
    free(s.arena);
    return is_json && to->version >= 0 && to->sequence >= 0;
}

/* ---- a header ---- */

typedef struct { int64_t rows, chunk_rows; } chunks;
typedef struct { text name, format; stored at; chunks of_rows, of_index; int64_t backfilled; int has_ids; } table_entry;
typedef struct { text table; int64_t offset, bytes, sums_at; uint64_t checksum; } file_entry;
/* table, file: of the table that is wanted. sums: checksums of all chunks. */
typedef struct {
    text wanted;
    table_entry table;
    file_entry file;
    int64_t file_number, files, version, sums;
    int is_delta;
} header;

static int take_index(scanner *s, void *to) {
    chunks *c = to;
    skip_space(s);
    return take_word(s, "null", 4)
           || TAKE(s, {"rows", take_integer, &c->rows}, {"chunk_rows", take_integer, &c->chunk_rows});
}

static int take_ids(scanner *s, void *to) {
    table_entry *t = to;
    skip_space(s);
    if (take_word(s, "null", 4)) return 1;
    t->has_ids = 1;
    return TAKE(s, {"count", take_integer, &t->at.count}, {"first", take_integer, &t->at.first},
                {"default_row", take_integer, &t->at.default_row}, {"backfilled", take_integer, &t->backfilled},
                {"index", take_index, &t->of_index});
}

/* Adds the checksums of rows; 0: impossible. */
static int add_sums(header *h, const chunks *c) {
    if (!c->rows && !c->chunk_rows) return 1;
    return c->rows > 0 && c->chunk_rows > 0
           && !__builtin_add_overflow(h->sums, (c->rows - 1) / c->chunk_rows + 1, &h->sums);
}

static int take_table(scanner *s, header *h) {
    table_entry t = {.at = {.count = -1, .default_row = -1}};
    if (!TAKE(s, {"name", take_text, &t.name}, {"row_format", take_text, &t.format},
              {"rows", take_integer, &t.of_rows.rows}, {"chunk_rows", take_integer, &t.of_rows.chunk_rows},
              {"row_bytes", take_integer, &t.at.row_bytes}, {"dim", take_integer, &t.at.dim},
              {"offset", take_integer, &t.at.offset}, {"ids", take_ids, &t}))
        return 0;
    if (is_name(t.name, h->wanted)) {
        if (h->table.name.p) return 0; /* it is there twice */
        h->table = t;
    }
    return add_sums(h, &t.of_rows) && add_sums(h, &t.of_index);
}

static int take_file(scanner *s, header *h) {
    file_entry f = {.offset = -1};
    h->files++;
    if (!TAKE(s, {"table", take_text, &f.table}, {"offset", take_integer, &f.offset},
              {"bytes", take_integer, &f.bytes}, {"sums_at", take_integer, &f.sums_at},
              {"checksum", take_checksum, &f.checksum}))
        return 0;
    if (is_name(f.table, h->wanted)) h->file = f, h->file_number = h->files;
    return 1;
}

static int take_list(scanner *s, header *h, int (*take_one)(scanner *, header *)) {
    int first = 1, found;
    if (!enter(s, '[')) return 0;
    while ((found = next_item(s, &first)) == 1)
        if (!take_one(s, h)) return 0;
    return !found;
}
static int take_tables(scanner *s, void *to) { return take_list(s, to, take_table); }
static int take_files(scanner *s, void *to) { return take_list(s, to, take_file); }

static int take_header(scanner *s, header *h) {
    return TAKE(s, {"version", take_integer, &h->version}, {"tables", take_tables, h}, {"files", take_files, h},
                {"delta", take_presence, &h->is_delta})
           && !h->is_delta;
}

/* Whether the ids of a table are possible: all row numbers, or `count` from `first` on and a policy's row. */
static int are_possible(const table_entry *t, const stored *at) {
    if (!t->has_ids) return 1;
    return at->count >= 0 && at->count <= at->rows && at->first >= 0 && t->backfilled >= 0
           && t->backfilled <= at->count && (at->default_row == -1 || at->default_row == at->rows - 1);
}

/* Whether the numbers of a table are possible, and its rows lie in a file of `size` bytes. */
static int is_possible(const stored *t, int64_t size) {
    int64_t bytes, end;
    const int in_a_byte = t->format == INT2 ? 4 : t->format == INT4 ? 2 : 1;
    return t->format <= LAST_FORMAT && t->dim > 0 && t->dim < INT32_MAX && t->dim % in_a_byte == 0
           && t->dim % BLOCK_OF(t->format) == 0
           && t->row_bytes >= USED_BYTES(t->format, t->dim) && t->offset >= PRELUDE_BYTES
           && !__builtin_mul_overflow(t->rows, t->row_bytes, &bytes)
           && !__builtin_add_overflow(bytes, t->offset, &end) && end <= size;
}

static int place_table(const header *h, int64_t segment_bytes, stored *to, const reason *why) {
    const text name = h->wanted;
    const int n = name.n < 200 ? (int)name.n : 200;
    if (!h->table.name.p) return refuse(why, "there is no table '%.*s'; tableside inspect shows which", n, name.p);
    if (h->table.of_index.rows)
        return refuse(why, "table '%.*s' has raw ids; a program in C reads rows by their numbers", n, name.p);
    if (h->file_number && h->file.sums_at)
        return refuse(why, "table '%.*s' lies on a disk; a program in C reads memory", n, name.p);
    *to = h->table.at;
    to->rows = h->table.of_rows.rows, to->version = h->version, to->file = h->file_number;
    int is_sound = are_possible(&h->table, to);
    if (h->table.has_ids && is_sound) to->own = to->count - h->table.backfilled;
    for (to->format = 0; to->format <= LAST_FORMAT; to->format++)
        if (is(h->table.format, formats[to->format], (int64_t)strlen(formats[to->format]))) break;
    if (to->file) {
        to->file_bytes = h->file.bytes, to->checksum = h->file.checksum;
        is_sound &= !__builtin_sub_overflow(to->offset, h->file.offset, &to->offset);
    }
    if (is_sound && is_possible(to, to->file ? to->file_bytes : segment_bytes)) return 1;
    return refuse(why, "the header says what cannot be of table '%.*s'; publish it again", n, name.p);
}

int find_table(const mapping *segment, const char *table, stored *to, const reason *why) {
    static const char damaged[] = "the %s of the segment is damaged; publish the version again";
    const uint8_t *p = segment->bytes;
    uint32_t format_version, bytes;
    uint64_t size, checksum;
    if (segment->size < PRELUDE_BYTES || memcmp(p, "TABLSIDE", 8)) return refuse(why, damaged, "magic");
    memcpy(&format_version, p + 8, 4), memcpy(&bytes, p + 12, 4);
    memcpy(&size, p + 16, 8), memcpy(&checksum, p + 24, 8);
    if (!format_version || format_version > LAST_FORMAT_VERSION)
        return refuse(why, "the segment has format version %u; expected 1 to %d; publish the version again",
                      format_version, LAST_FORMAT_VERSION);
    const int64_t room = segment->size - PRELUDE_BYTES;
    if (size != (uint64_t)segment->size || bytes > room) return refuse(why, damaged, "size");
    const char *const from = (const char *)p + PRELUDE_BYTES;
    scanner s = {.p = from, .end = from + bytes, .arena_bytes = bytes};
    header h = {.wanted = {table, (int64_t)strlen(table)}, .version = -1};
    int is_whole = take_header(&s, &h) && h.sums <= (room - bytes) / 8;
    const int64_t hashed = is_whole ? bytes + 8 * h.sums : 0;
    is_whole = hashed > XXH3_SHORT && xxh3(p + PRELUDE_BYTES, hashed) == checksum;
    const int is_placed = is_whole ? place_table(&h, segment->size, to, why) : refuse(why, damaged, "header");
    free(s.arena);
    return is_placed;
}
