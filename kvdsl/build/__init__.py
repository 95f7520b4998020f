"""Compile and cache the C++ kernels. Needs only the standard library and platformdirs: generated packages use it at run time."""
