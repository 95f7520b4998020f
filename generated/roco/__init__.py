"""RoCo: Evicts the token with the lowest mean attention, but only where attention has settled: those whose attention varies most stay.

Made by kvdsl 0.1.0 from roco.kv (106903947dca). Do not edit: `kvdsl compile` rewrites it.
"""

from .cache import RoCoCache

__all__ = ["RoCoCache"]
