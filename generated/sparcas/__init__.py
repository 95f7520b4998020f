"""SparCas: Keeps every token and attends to few: those that score best over the dims in which the query is large.

Made by kvdsl 0.1.0 from sparcas.kv (e74ebb0af390). Do not edit: `kvdsl compile` rewrites it.
"""

from .cache import SparCasCache

__all__ = ["SparCasCache"]
