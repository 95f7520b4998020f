"""The number of the interface between generated packages and the runtime."""

ABI = 13
"""Generated code states it; the runtime refuses a package that was made for another."""
