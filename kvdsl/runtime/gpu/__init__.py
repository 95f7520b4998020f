"""The Triton backend: the functions that generated `kernels_triton.py` call. Importing it requires triton."""
