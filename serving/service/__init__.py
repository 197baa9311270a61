"""A worker's engines and models, and the check of rows."""
