"""Versions of a model in its folder: the live record, states, retention, parts of tables."""
