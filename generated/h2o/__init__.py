"""H2O: Keeps the heavy hitters, to which the most attention was paid in all, and the most recent tokens.

Made by kvdsl 0.1.0 from h2o.kv (0ae6c0ce7df6). Do not edit: run `kvdsl compile h2o.kv`.
"""

from .cache import H2OCache

__all__ = ["H2OCache"]
