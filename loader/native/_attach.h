/* The parts of `tableside_attach`. Each function that can refuse returns 0 and says why. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* Why a call failed, for people. */
typedef struct { char *text; size_t bytes; } reason;
int refuse(const reason *why, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A file that is mapped whole, aligned to its pages or 2 MiB. */
typedef struct { const uint8_t *bytes; int64_t size; void *span; size_t span_bytes; } mapping;

/* Opens the folder of a model, through which its files are reached; -1: refused. */
int open_folder(const char *root, const char *model, const reason *why);
/* Reads up to `bytes` - 1 bytes of a file, and a zero behind them; -1: refused, -2: it is not there. */
int64_t read_file(int folder, const char *name, char *to, int64_t bytes, const reason *why);
/* -1: refused, -2: it is not there. */
int map_file(int folder, const char *name, mapping *to, const reason *why);
void unmap_file(mapping *of);

/* What the record of a model says. */
typedef struct { int64_t version, sequence; } record;
int read_record(const char *text, int64_t bytes, record *to);

/* Where a table lies, as a segment's header says. file: the number of its own file; 0: it lies in the segment.
 * offset: in that file. checksum: of the file's head. first, count, own, default_row: of its ids (_ids.h). */
typedef struct {
    int64_t version, rows, row_bytes, dim, offset, file, file_bytes, first, count, own, default_row;
    uint64_t checksum;
    int format;
} stored;
int find_table(const mapping *segment, const char *table, stored *to, const reason *why);
