"""Offline evaluation: data sets scored by a pool of processes over the published segment, and what the scores are worth."""
