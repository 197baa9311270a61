"""The cache's Triton kernels: `find` rows, `fetch` misses, `admit` some, `evict` others, begin and end a
`batch`. `nodes` has addresses and chains, `scores` the eviction priorities. They run one after another on the
cache's stream, except `batch.release` (the lookup's stream) and the row copies (the side stream);
`quant.cache.pipeline` draws the order. `state` has the shared records; `tests/helpers/cache_reference.py` is
their specification in plain Python."""
