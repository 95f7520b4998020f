"""The C++ backend: the fused decode step. `include/` is what a policy's kernels see, `src/` the driver that all are linked with."""
