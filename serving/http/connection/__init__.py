"""A connection: its parser, its limits and refusals, the hand-over of its requests."""
