"""Changes of rows: read from files, packed, applied as deltas, merged, compacted."""
