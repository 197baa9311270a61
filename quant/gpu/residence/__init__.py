"""Residences: where a table's rows live for a device, and its copy of the row map."""
