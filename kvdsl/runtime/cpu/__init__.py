"""The C++ backend: a fused decode step. `include/` has the interface for policies' kernels, `src/` the driver that all link with."""
