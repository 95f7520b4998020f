"""EQUIPBlocks: EQUIP_H2O in blocks: every layout of the language that kernels have.

Made by kvdsl 0.1.0 from equip_blocks.kv (326b154d2363). Do not edit: `kvdsl compile` makes it anew.
"""

from .cache import EQUIPBlocksCache

__all__ = ["EQUIPBlocksCache"]
