"""The processes of a server: supervisor, workers, engine processes."""
