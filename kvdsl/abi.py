"""The version of kvdsl, and of the interface between generated packages and the runtime."""

VERSION = "0.1.0"

ABI = 15
"""Generated code states it, and the runtime refuses packages of another version."""
