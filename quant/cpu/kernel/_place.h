/* Where a request has one lookup (`quant.contract.Place`). Offsets are bytes into its inputs (ids, lengths,
 * weights) or outputs. lengths_at, weights_at, found_at -1: none. out_row_bytes 0: vectors lie one after
 * another. */
#pragma once
#include <stdint.h>

#define PLACE_FIELDS(F) F(kind) F(ids_at) F(ids) F(lengths_at) F(bag_length) F(bags) F(weights_at) F(out_at) \
    F(out_row_bytes) F(found_at)
#define PLACE_MEMBER(name) int64_t name;
typedef struct { PLACE_FIELDS(PLACE_MEMBER) } place;
