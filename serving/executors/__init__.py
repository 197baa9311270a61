"""Running requests: on the CPU alone, on a GPU in batches; admission and scores."""
