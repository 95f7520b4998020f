"""EQUIPBlocks: EQUIP_H2O as its paper has it in memory. Edition 1 states it: the two last lines are the defaults of the options of its caches.

Made by kvdsl 0.1.0 from equip_blocks.kv (3b7000443c68). Do not edit: `kvdsl compile` rewrites it.
"""

from .cache import EQUIPBlocksCache

__all__ = ["EQUIPBlocksCache"]
