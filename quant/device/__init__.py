"""What the GPU half asks of CUDA: memory, launches, and gathers by the host in the order of a stream."""
