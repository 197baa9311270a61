"""How ids become row numbers: the id index, and overlays of changed rows."""
