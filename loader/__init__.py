"""Bytes with names: checkpoints, segments, versions, and the load that turns one into the other.

Knows nothing of HTTP or metrics, and not which version a server answers from.
"""
