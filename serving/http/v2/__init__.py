"""The Open Inference Protocol, /v2: infer requests, templates of their headers, regions, models."""
