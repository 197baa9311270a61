"""One engine process per GPU, and the workers' (doors') way to it. Doors parse, validate and answer. The
engine process has the GPU's only context, its tables and cache, and batches over all doors."""
