"""model.toml: read, proposed from a checkpoint or a module, or from HugeCTR's ps.json."""
