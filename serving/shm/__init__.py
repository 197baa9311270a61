"""Clients' shared memory, and lists that a server's processes share."""
