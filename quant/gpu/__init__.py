"""Lookups on a GPU: where tables' rows live for it, how requests are laid out in batches, and the lookup
kernel."""
