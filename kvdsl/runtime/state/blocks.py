"""Slots in blocks, as in paged attention: a pool of keys and values for all rows of a batch, and a block table.

Slot s of a row lies in block `table[row, s // size]` of the pool, at `s % size`. A new token overwrites an evicted one there (EQUIP,
figure 18). A block holds the same slots of all KV heads. A row owns the blocks in which any of its slots is in use; an empty block
returns to the pool. So every row takes the memory that it uses, not that of the largest row.

If the policy evicts while it decodes, the pool has as many blocks as all rows can ever need by their budgets. Then it never moves, and
no step waits for the host to enlarge it. Otherwise the pool grows with the slots.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvdsl.runtime.lifetimes import plain_tensors
from kvdsl.runtime.state.layout import Layout, Slots
from kvdsl.runtime.state.order import FREE
from kvdsl.runtime.state.tensors import Declared, allocated, filled, taken


class Blocks(Layout):
    """Keys and values in blocks.

    Tensors:
        key_pool [kv_heads, blocks, size, key_dim], value_pool [kv_heads, blocks, size, value_dim]: a head's blocks are contiguous, so
            that blocks allocated one after the other can be read in one go.
        table [batch, blocks per row] int64: the pool's block for each block of a row; -1 for none.
    """

    DECLARED = (*Layout.DECLARED, Declared("table"))

    table: Tensor

    @property
    def size(self) -> int:
        """Slots per block."""
        return self.key_pool.shape[2]

    @property
    def blocks(self) -> int:
        """Blocks in the pool."""
        return self.key_pool.shape[1]

    @property
    def head_rows(self) -> int:
        """Rows of the pools from a KV head's first to the next one's."""
        return self.blocks * self.size

    def used(self, position: Tensor) -> Tensor:
        """Return which blocks of each row hold a token: bool [batch, blocks per row]."""
        return _blocks_of(position >= 0, self.size)

    def where(self, slot: Tensor) -> tuple[Tensor, ...]:
        heads, rows = (torch.arange(count, device=slot.device) for count in (len(self.key_pool), len(self.table)))
        return heads[:, None], self.table.clamp(min=0)[rows[:, None, None], slot // self.size], slot % self.size

    def write(self, slot: Tensor, key: Tensor, value: Tensor, real: Tensor) -> None:
        """Write a token as in `Layout.write`, after allocating its block."""
        self._take(torch.zeros_like(self.table, dtype=torch.bool).scatter_(1, (slot // self.size).flatten(1), True))
        super().write(slot, key, value, real)

    def write_all(self, position: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write all slots as in `Layout.write_all`, after allocating their blocks."""
        self.settled(position)
        self._take(self.used(position))
        super().write_all(position, keys, values)

    def settled(self, position: Tensor) -> None:
        """Free the blocks without tokens."""
        self.table.masked_fill_(~self.used(position), FREE)

    def _take(self, wanted: Tensor) -> None:
        """Allocate free blocks to the rows that need them.

        Args:
            wanted: bool [batch, blocks per row]; blocks that a row already has stay.
        """
        held = torch.zeros(self.blocks, dtype=torch.int32, device=wanted.device)
        held.scatter_add_(0, self.table.clamp(min=0).flatten(), (self.table >= 0).int().flatten())
        free = held.argsort(stable=True)  # free blocks first, in ascending order
        missing = wanted & (self.table < 0)
        nth = missing.flatten().cumsum(0).sub_(1).clamp_(0, len(free) - 1).view_as(missing)
        self.table.copy_(torch.where(missing, free[nth], self.table))

    # -- allocating ----------------------------------------------------------------------------------------------------

    def lay_out(self, state: Slots, kept: Mapping[str, Tensor], order: Tensor | None) -> None:
        """Allocate pools for the blocks in use, or for all blocks that the rows can ever need."""
        batch, heads, slots = state.position.shape
        size = state.room.block_size(state.numbers)
        blocks = int((_blocks_of(state.position >= 0, size) if state.room.grows else _most_blocks(state, size)).sum())
        keys, values = (kept[name] if order is None else taken(name, kept[name], order) for name in ("keys", "values"))
        self.table = filled(self.table, state.position, (batch, -(-slots // size)), FREE, torch.int64)
        self.key_pool = filled(self.key_pool, keys, (heads, max(1, blocks), size, keys.shape[3]), 0)
        self.value_pool = filled(self.value_pool, values, (heads, max(1, blocks), size, values.shape[3]), 0)
        self.write_all(state.position, keys, values)

    def grow(self, state: Slots, held: Tensor) -> None:
        """Extend the table, and the pools too if the slots have reached their final number."""
        more = -(-state.slots // self.size) - self.table.shape[1]
        self.table = torch.nn.functional.pad(self.table, (0, more), value=FREE)
        if not state.room.grows:
            self._add_blocks(int(_most_blocks(state, self.size).sum()) - self.blocks)

    def make_room(self, state: Slots, tokens: int) -> None:
        """Enlarge a pool that is short of blocks, by half at least."""
        batch, heads, _ = state.position.shape
        free = self.blocks - int((self.table >= 0).sum())
        if free >= batch * heads * tokens:  # enough even with one block per token
            return
        empty = state.position < 0
        coming = empty & (empty.cumsum(-1) <= tokens)
        short = int((_blocks_of(coming, self.size) & (self.table < 0)).sum()) - free
        if short > 0:
            with plain_tensors():
                self._add_blocks(max(short, self.blocks // 2))

    def _add_blocks(self, count: int) -> None:
        if count > 0:
            self.key_pool, self.value_pool = (
                torch.cat([pool, allocated(pool, (len(pool), count, *pool.shape[2:]), 0)], 1)
                for pool in (self.key_pool, self.value_pool)
            )


def _blocks_of(slots: Tensor, size: int) -> Tensor:
    """Return which blocks of each row contain a marked slot: bool [batch, kv_heads, slots] -> bool [batch, blocks per row]."""
    batch, heads, count = slots.shape
    whole = torch.nn.functional.pad(slots, (0, -count % size))
    return whole.view(batch, heads, -1, size).any(3).any(1)


def _most_blocks(state: Slots, size: int) -> Tensor:
    """Return how many blocks each row can ever need, [batch]. New tokens take the lowest free slots."""
    slots = state.slots
    live = state.position >= 0
    behind_last = (live * torch.arange(1, slots + 1, device=live.device)).amax((1, 2))
    by_head = state.room.most_by_head(state.numbers, evicts=state.evicts)
    most = by_head.amax(1).floor().clamp(max=slots).long()
    needed = torch.stack([most, behind_last, live.sum(-1).amax(1) + 1]).amax(0).clamp(max=slots)
    return -(-needed // size)
