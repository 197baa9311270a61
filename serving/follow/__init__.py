"""Streams of changes that are applied until somebody stops it: `tableside follow`.

Where a stream was read to is kept in the model's state, beside the rows. So a batch and its position become
visible together, and a follower that was killed goes on where the last whole batch ended: no row is lost,
none is applied twice.
"""
