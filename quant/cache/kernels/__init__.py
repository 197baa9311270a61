"""The cache's kernels, in Triton: `find` rows, `fetch` misses, `admit` some of them, `evict` others, begin
and end a `batch`. `nodes` has addresses and chains, `scores` the eviction priorities.

Kernels of one cache run one after another on its stream, but for `batch.release`, which runs on the stream of
the lookup, and for those that move rows on the side stream; `quant.cache.pipeline` draws which one waits for
which. `state` says what they share, `tests/helpers/cache_reference.py` says in plain Python what each of them
does.
"""
