"""Lookups on the CPU: the native kernel, FBGEMM's operators, and plain torch (the specification)."""
