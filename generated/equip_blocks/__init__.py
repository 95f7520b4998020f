"""EQUIPBlocks: EQUIP_H2O in blocks: every layout of the language that kernels have.

Made by kvdsl 0.1.0 from equip_blocks.kv (0153a53bb0b7). Do not edit: run `kvdsl compile equip_blocks.kv`.
"""

from .cache import EQUIPBlocksCache

__all__ = ["EQUIPBlocksCache"]
