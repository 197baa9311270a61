"""`tableside follow`: applies streams of changes. The model's state keeps the position beside the rows, so
each batch is applied exactly once."""
