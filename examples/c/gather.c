/* Prints the vectors of rows of a published table:  ./gather MODEL TABLE ID...  */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include "tableside.h"

int main(int argc, char **argv) {
    char error[256];
    tableside_shape shape;
    if (argc < 4) return fprintf(stderr, "usage: %s MODEL TABLE ID...\n", argv[0]), 2;
    tableside_table *table = tableside_attach(NULL, argv[1], argv[2], &shape, error, sizeof error);
    if (!table) return fprintf(stderr, "%s\n", error), 1;
    const int64_t n = argc - 3;
    int64_t *ids = malloc((size_t)n * sizeof *ids);
    float *vectors = malloc((size_t)(n * shape.dim) * sizeof *vectors);
    if (!ids || !vectors) return 1;
    for (int64_t k = 0; k < n; k++) ids[k] = strtoll(argv[3 + k], NULL, 10);
    const int64_t done = tableside_gather(table, ids, n, vectors, TABLESIDE_FP32, 1);
    if (done != n) {
        fprintf(stderr, "id %" PRId64 " is no row of %s; it has %" PRId64 "\n", done < 0 ? done : ids[done], argv[2],
                shape.rows);
        return 1;
    }
    printf("version %" PRId64 "\n", shape.version);
    for (int64_t k = 0; k < n; k++) {
        printf("%" PRId64 ":", ids[k]);
        for (int64_t c = 0; c < shape.dim; c++) printf(" %.9g", (double)vectors[k * shape.dim + c]);
        printf("\n");
    }
    tableside_detach(table);
    free(ids), free(vectors);
    return 0;
}
