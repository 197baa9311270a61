"""The cache of rows in a GPU's memory."""
