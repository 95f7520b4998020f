"""RoCo: Evicts the token with the lowest mean attention among those whose attention has settled; tokens whose attention varies most are kept.

Made by kvdsl 0.1.0 from roco.kv (5994bd044d6d). Do not edit: `kvdsl compile` rewrites it.
"""

from .cache import RoCoCache

__all__ = ["RoCoCache"]
