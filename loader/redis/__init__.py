"""Rows of tables in Redis or Valkey (docs/redis.md)."""
