"""Lookups from callers' tensors: modules and captured calls."""
