/* Lookups as jobs of the GPU's kernel (`_native_jobs.c`): int64 fields of inputs and outputs, and the
 * functions. */
#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

/* The request-independent part of a lookup. cache_table: its number in the cache, or -1. columns: of one
 * vector, as quant.gpu.batch.layout.columns. row_map: of its NativeRowMap on the device, or 0: none.
 * is_gathered: the CPU gathers the rows of
 * requests with many ids. */
#define GPU_KIND_FIELDS(F) \
    F(table) F(rows) F(row_bytes) F(dim) F(row_format) F(mean) F(precision) F(hbm_rows) F(hbm_share) \
    F(cache_table) \
    F(is_pooled) F(columns) F(row_map) F(is_on_device) F(is_gathered)
/* The fields of a job, those of quant.gpu.kernels.job.JobField. */
#define JOB_FIELDS(F) \
    F(table) F(rows) F(row_bytes) F(dim) F(format) F(mean) F(ids_at) F(ids) F(lengths_at) F(bag_length) \
    F(vectors) F(weights_at) \
    F(out_at) F(precision) F(first_program) F(starts_at) F(hbm_rows) F(locations_at) F(hbm_share) F(out_step)
/* Parts to be copied: `rows` of `bytes` bytes, so many bytes apart. */
#define MOVE_FIELDS(F) F(source) F(target) F(bytes) F(rows) F(source_step) F(target_step)
/* What `measure` finds of a request, named as in quant.gpu.batch.layout.Layout. *_block: of a program.
 * *_traits: bits of has_lengths, is_weighted, is_indirect. on_host: lookups that the CPU does. */
#define MEASURED_FIELDS(F) \
    F(pooled_block) F(unpooled_block) F(probe_block) F(resolve_block) F(in_bytes) F(out_bytes) \
    F(asked_bytes) F(scratch) F(cached_ids) \
    F(pooled_jobs) F(pooled_programs) F(pooled_traits) F(unpooled_jobs) F(unpooled_programs) \
    F(unpooled_traits) \
    F(cached) F(probe_blocks) F(resolved) F(resolve_programs) F(all_found) F(is_direct) \
    F(rows_bytes) F(gather_bytes) F(on_host)
/* Where the parts of a request begin in the buffers of a batch. */
#define BASE_FIELDS(F) F(inputs) F(outputs) F(scratch) F(rows) F(locations)
/* Job fields of other kernels: quant.cache.kernels.state.ProbeField, and ResolveField and FillField of
 * quant.gpu.kernels.job. */
#define PROBE_FIELDS(F) F(table) F(ids_at) F(ids) F(locations_at) F(first_block)
#define MATRIX_FIELDS(F) F(is_output) F(at) F(row_bytes) F(is_half) F(width) /* quant.contract.MatrixPlace */
#define FILL_FIELDS(F) F(source) F(is_half) F(values) F(width) F(step) F(target) F(first_program) F(precision)
#define RESOLVE_FIELDS(F) F(row_map) F(ids_at) F(target_at) F(ids) F(found_at) F(first_program)

