"""Lookups on a GPU: residences of tables, batches of requests, and the kernels."""
