"""A load: checkpoint, plan, chunks, segment, version. Exports and checksums beside it."""
