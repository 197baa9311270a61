"""The content of /metrics: counters, their files, gauges of the processes."""
