"""What every worker needs, imported once in the process that workers are forked from, so that they share its memory."""

import gc

import serving.app
import serving.http
import serving.metrics  # noqa: F401

gc.collect()
gc.freeze()  # a collection in a worker would otherwise write to, and so copy, every page that was shared
