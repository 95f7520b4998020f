"""TOVA: Evicts what the newest token attends to least, the newest token itself not excepted.

Made by kvdsl 0.1.0 from tova.kv (c7607d628662). Do not edit: run `kvdsl compile tova.kv`.
"""

from .cache import TOVACache

__all__ = ["TOVACache"]
