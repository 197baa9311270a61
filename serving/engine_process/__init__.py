"""One process for each GPU, the engine process, and the workers' way to it.

Workers are its doors: they parse, validate and answer. The engine process has the GPU's only context, its
tables and its cache, and it batches over all doors. `memory` and `messages` are what both ends share,
`described` is a request as bytes, `link` and `versions` are a door's end, `doors` is the engine's, and `main`
the process.
"""
