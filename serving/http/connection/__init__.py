"""A connection: parser, limits, refusals, and the hand-over of requests."""
