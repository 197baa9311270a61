"""A served version of a model: placement, requests laid out, scorers."""
