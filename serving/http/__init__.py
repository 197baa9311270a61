"""The doors over HTTP: the connection's limits, /v1 (JSON) and /v2 (the Open Inference Protocol)."""
