"""The Triton backend: what generated `kernels_triton.py` call. Imported only where triton is and serves."""
