"""SparCas: Keeps every token and attends to few: those with the best scores over the dims in which the query is large.

Made by kvdsl 0.1.0 from sparcas.kv (7aefa5e84f82). Do not edit: `kvdsl compile` rewrites it.
"""

from .cache import SparCasCache

__all__ = ["SparCasCache"]
