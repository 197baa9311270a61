"""The kernels, the fields of their jobs, and how they are compiled and launched."""
