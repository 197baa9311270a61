"""Imports what workers need, once, in the process that they are forked from, so that they share its
memory."""

import gc

import tableside.serving.http.app
import tableside.serving.http.connection.connection
import tableside.serving.metrics.metrics  # noqa: F401
from tableside.serving.kept_memory import keep_freed_memory

gc.collect()
gc.set_threshold(20_000, 20, 20)  # requests make few cycles, and looking for them took 3 % of a worker
gc.freeze()  # a collection in a worker would otherwise write to, and so copy, every page that was shared

keep_freed_memory()  # bodies and outputs of some 100 KB come and go with each request
