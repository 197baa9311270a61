"""The segment file and the delta file: header, tables, memory, registration."""
