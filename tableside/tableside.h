/* Rows of a table that Tableside holds in shared memory, for programs that are not in Python.
 *
 *     char error[256];
 *     tableside_shape shape;
 *     tableside_table *table = tableside_attach(NULL, "lm", "ngram", &shape, error, sizeof error);
 *     if (!table) ...error says why
 *     uint16_t vectors[48 * 256];                       // bf16 [48, shape.dim]
 *     if (tableside_gather(table, ids, 48, vectors, TABLESIDE_BF16, 1) != 48) ...
 *     tableside_detach(table);
 *
 * All processes of the host that attach a table read the same memory. Link with libtableside.abi3.so, which
 * lies beside this file. */
#ifndef TABLESIDE_H
#define TABLESIDE_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct tableside_table tableside_table;

/* version: its number, by which a caller sees that another one is live. rows: ids are 0 to rows - 1, unless the
 * table has a first id of its own or a policy for missing ids. dim: values of a row. */
typedef struct { int64_t version, rows, dim; } tableside_shape;

typedef enum { TABLESIDE_FP32 = 0, TABLESIDE_FP16 = 1, TABLESIDE_BF16 = 2 } tableside_type;

/* Maps a table of a model's live version; costs some 100 us, whatever the table's size. root: the folder of the
 * models; NULL: TABLESIDE_ROOT of the environment, or /dev/shm/tableside. Checks the header's checksum and who
 * owns the files; rows are verified by `tableside verify`, or by the first server or module that attaches.
 * NULL: error has a text of at most error_bytes: there is no such model or table, its files are damaged or
 * another user's, its ids are raw, deltas lie over it, or it is a large one on a disk. Thread-safe; this and
 * `gather` take up to 128 KiB of stack. */
tableside_table *tableside_attach(const char *root, const char *model, const char *table,
                                  tableside_shape *shape, char *error, size_t error_bytes);

/* Writes the vectors of n ids to out, [n, dim] of a type, each value rounded once. threads: for calls of 2 MiB
 * and more. Returns n. A number k below n: ids[k] is the first that is no row's, and nothing was written. -1: a
 * type or number is impossible, or there is no memory. Thread-safe. */
int64_t tableside_gather(const tableside_table *table, const int64_t *ids, int64_t n, void *out,
                         tableside_type type, int threads);

/* Unmaps the table, of which no call may be running; NULL: does nothing. The rows live on for others, and after
 * the version was removed for whoever has them mapped. */
void tableside_detach(tableside_table *table);

#ifdef __cplusplus
}
#endif
#endif
