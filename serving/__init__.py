"""Time: engine, batching, HTTP, workers, metrics, client and command line.

Knows versions and requests; never how a row is packed.
"""
