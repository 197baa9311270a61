"""HTTP: connection limits, /v1 (JSON) and /v2 (Open Inference Protocol)."""
