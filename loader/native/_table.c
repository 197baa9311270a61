/* Attaches a table, gathers its rows, detaches it: tableside/tableside.h says how these are used. */
#define EXPORTED __attribute__((visibility("default")))
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
#include "../../tableside/tableside.h"
#include "_attach.h"
#include "_execute.h"

enum { RECORD_BYTES = 1 << 16, FILE_HEAD_BYTES = 4096, TRIES = 100 };

struct tableside_table { mapping file; stored at; row_map ids; runner with; };

/* Whether a file begins as that of the table (loader/segment/layout.py). */
static int is_file_of(const mapping *file, const stored *t) {
    uint64_t head[3];
    if (file->size != t->file_bytes || file->size < FILE_HEAD_BYTES) return 0;
    memcpy(head, file->bytes, sizeof head);
    return !memcmp(head, "TABLROWS", 8) && head[1] == (uint64_t)file->size && head[2] == t->checksum;
}

/* Maps the file that has the table's rows. -2: the version was removed meanwhile. */
static int map_table(int folder, int64_t version, const char *name, tableside_table *to, const reason *why) {
    char file[64];
    mapping segment;
    snprintf(file, sizeof file, "%lld.segment", (long long)version);
    int found = map_file(folder, file, &segment, why);
    if (found < 0) return found;
    found = find_table(&segment, name, &to->at, why) ? 1 : -1;
    if (found == 1 && to->at.version != version)
        found = refuse(why, "%s holds version %lld; remove it", file, (long long)to->at.version) - 1;
    if (found == 1 && !to->at.file) {
        to->file = segment;
        return 1;
    }
    unmap_file(&segment);
    if (found != 1) return -1;
    snprintf(file, sizeof file, "%lld.%lld.rows", (long long)version, (long long)to->at.file);
    found = map_file(folder, file, &to->file, why);
    if (found != 1 || is_file_of(&to->file, &to->at)) return found;
    unmap_file(&to->file);
    return refuse(why, "%s is not the table's file that version %lld names; publish it again", file,
                  (long long)version) - 1;
}

/* Maps the table of the live version. A version may be replaced and removed between the record and its files: then
 * the record is read again. */
static int map_live(int folder, const char *model, const char *name, tableside_table *to, const reason *why) {
    for (int tries = 0; tries < TRIES; tries++) {
        char text[RECORD_BYTES];
        record live;
        const int64_t bytes = read_file(folder, "current", text, sizeof text, why);
        if (bytes == -1) return 0;
        if (bytes >= 0 && !read_record(text, bytes, &live))
            return refuse(why, "the record of model %s is unreadable; tableside activate writes it anew", model);
        if (bytes == -2 || !live.version) return refuse(why, "no version of model %s is live", model);
        if (live.sequence)
            return refuse(why, "deltas lie over version %lld of model %s; tableside compact %s makes one version of them",
                          (long long)live.version, model, model);
        const int found = map_table(folder, live.version, name, to, why);
        if (found != -2) return found == 1;
    }
    return refuse(why, "the files of model %s are gone; publish it again", model);
}

EXPORTED tableside_table *tableside_attach(const char *root, const char *model, const char *name,
                                           tableside_shape *shape, char *error, size_t error_bytes) {
    const reason why = {error, error ? error_bytes : 0};
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const kernel *kernels[MOST_KERNELS];
    pthread_once(&once, open_pool);
    if (!root) root = getenv("TABLESIDE_ROOT");
    if (!root || !*root) root = "/dev/shm/tableside";
    if (!model || !name) return refuse(&why, "model or table is NULL; expected a name"), NULL;
    tableside_table *made = calloc(1, sizeof *made);
    if (!made) return refuse(&why, "no memory"), NULL;
    const int folder = open_folder(root, model, &why);
    const int is_mapped = folder >= 0 && map_live(folder, model, name, made, &why);
    if (folder >= 0) close(folder);
    if (!is_mapped) return free(made), NULL;
    find_kernels(kernels);
    made->with.kernel = kernels[0];
    made->ids = (row_map){.id_count = made->at.count, .default_row = made->at.default_row, .first = made->at.first,
                          .own = made->at.own};
    if (shape) *shape = (tableside_shape){made->at.version, made->at.rows, made->at.dim};
    return made;
}

EXPORTED int64_t tableside_gather(const tableside_table *t, const int64_t *ids, int64_t n, void *out,
                                  tableside_type type, int threads) {
    const stored *at = &t->at;
    int64_t bytes;
    if (n < 0 || threads < 1 || (int)type < TABLESIDE_FP32 || type > TABLESIDE_BF16
        || __builtin_mul_overflow(n, 4 * at->dim + 8, &bytes))
        return -1;
    job j = {.table = t->file.bytes + at->offset, .rows = at->rows, .row_bytes = at->row_bytes, .dim = at->dim,
             .format = at->format, .pooling = POOL_NONE, .ids = (const uint8_t *)ids, .n_ids = n, .n_bags = n,
             .out = out, .precision = (int)type, .map = at->count < 0 ? NULL : &t->ids};
    j.out_row_bytes = at->dim * value_bytes(&j);
    job room[1 + MAX_PARTS];
    int failed = 0;
    int64_t *numbers = make_rows(&j, 1, &failed);
    const verdict v = failed ? (verdict){0, NO_MEMORY, 0, 0} : execute(t->with, &j, 1, threads, room);
    free(numbers);
    return !v.problem ? n : v.problem == NO_MEMORY ? -1 : v.position;
}

EXPORTED void tableside_detach(tableside_table *table) {
    if (table) unmap_file(&table->file);
    free(table);
}
