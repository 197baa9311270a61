"""What /metrics shows: counters, their files, gauges of the processes."""
