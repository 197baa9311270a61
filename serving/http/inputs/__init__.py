"""Inputs of requests of both protocols: tensors, JSON lists, jagged pairs."""
