"""JSON requests, /v1."""
