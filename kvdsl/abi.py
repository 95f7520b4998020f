"""The numbers of this release: of kvdsl, and of the interface between generated packages and the runtime."""

VERSION = "0.1.0"

ABI = 15
"""Generated code states it; the runtime refuses a package that was made for another."""
