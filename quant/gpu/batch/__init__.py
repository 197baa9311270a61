"""Requests of one batch: laid out, merged, staged, launched, waited for."""
