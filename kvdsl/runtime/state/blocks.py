"""Slots in blocks: one pool of keys and values for all rows of a batch, found through a table.

As in paged attention, a row's slots s lie in the block `table[row, s // size]` of the pool, at `s % size`, and a new token is written
there, over what left (EQUIP, figure 18). A block holds the same slots of all KV heads. A row has the blocks in which any of its
slots is in use; a block in which none is any more goes back to the pool, for whichever row needs one next. So rows of different
lengths, or with different budgets, take what they use and not what the largest does.

Under a policy that evicts while it decodes, the pool has as many blocks as each row can ever need by its own budget: it never moves,
and no step waits for the host to enlarge it. Where the slots are not yet as many as they will be, the pool grows like them.
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
        key_pool [kv_heads, blocks, size, key_dim], value_pool [kv_heads, blocks, size, value_dim]: a head's blocks lie together, so
            that those that a row was given one after the other can be read in one go.
        table [batch, blocks of a row] int64: where each block of a row's slots lies in the pools; -1 where it has none.
    """

    DECLARED = (*Layout.DECLARED, Declared("table"))

    table: Tensor

    @property
    def size(self) -> int:
        """Slots of a block."""
        return self.key_pool.shape[2]

    @property
    def blocks(self) -> int:
        """Blocks in the pool."""
        return self.key_pool.shape[1]

    def used(self, position: Tensor) -> Tensor:
        """Which blocks of every row hold a token: bool [batch, blocks of a row]."""
        return _blocks_of(position >= 0, self.size)

    def where(self, slot: Tensor) -> tuple[Tensor, ...]:
        heads, rows = (torch.arange(count, device=slot.device) for count in (len(self.key_pool), len(self.table)))
        return heads[:, None], self.table.clamp(min=0)[rows[:, None, None], slot // self.size], slot % self.size

    def write(self, slot: Tensor, key: Tensor, value: Tensor, real: Tensor) -> None:
        """See `Layout.write`; the row has the block from here on."""
        self._take(torch.zeros_like(self.table, dtype=torch.bool).scatter_(1, (slot // self.size).flatten(1), True))
        super().write(slot, key, value, real)

    def write_all(self, position: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `Layout.write_all`; the rows have the blocks that they had."""
        self.settled(position)
        self._take(self.used(position))
        super().write_all(position, keys, values)

    def settled(self, position: Tensor) -> None:
        """Give back the blocks in which nothing is left."""
        self.table.masked_fill_(~self.used(position), FREE)

    def _take(self, wanted: Tensor) -> None:
        """Give rows the blocks that they want, bool [batch, blocks of a row], and lack, of those that are in no row."""
        held = torch.zeros(self.blocks, dtype=torch.int32, device=wanted.device)
        held.scatter_add_(0, self.table.clamp(min=0).flatten(), (self.table >= 0).int().flatten())
        free = held.argsort(stable=True)  # those first, the lowest first
        missing = wanted & (self.table < 0)
        nth = missing.flatten().cumsum(0).sub_(1).clamp_(0, len(free) - 1).view_as(missing)
        self.table.copy_(torch.where(missing, free[nth], self.table))

    # -- allocating ----------------------------------------------------------------------------------------------------

    def lay_out(self, state: Slots, kept: Mapping[str, Tensor], order: Tensor | None) -> None:
        """See `Layout.lay_out`: pools with the blocks in use, or with all that the rows can ever need."""
        batch, heads, slots = state.position.shape
        size = state.room.block_size(state.numbers)
        blocks = int((_blocks_of(state.position >= 0, size) if state.room.grows else _most_blocks(state, size)).sum())
        keys, values = (kept[name] if order is None else taken(name, kept[name], order) for name in ("keys", "values"))
        self.table = filled(self.table, state.position, (batch, -(-slots // size)), FREE, torch.int64)
        self.key_pool = filled(self.key_pool, keys, (heads, max(1, blocks), size, keys.shape[3]), 0)
        self.value_pool = filled(self.value_pool, values, (heads, max(1, blocks), size, values.shape[3]), 0)
        self.write_all(state.position, keys, values)

    def grow(self, state: Slots, held: Tensor) -> None:
        """See `Layout.grow`: their blocks will come, at once where the slots are enough for ever."""
        more = -(-state.slots // self.size) - self.table.shape[1]
        self.table = torch.nn.functional.pad(self.table, (0, more), value=FREE)
        if not state.room.grows:
            self._add_blocks(int(_most_blocks(state, self.size).sum()) - self.blocks)

    def make_room(self, state: Slots, tokens: int) -> None:
        """See `Layout.make_room`; a pool with too few blocks grows by half."""
        batch, heads, _ = state.position.shape
        free = self.blocks - int((self.table >= 0).sum())
        if free >= batch * heads * tokens:  # a block for every token would do
            return
        empty = state.position < 0
        coming = empty & (empty.cumsum(-1) <= tokens)
        short = int((_blocks_of(coming, self.size) & (self.table < 0)).sum()) - free
        if short > 0:
            with plain_tensors():
                self._add_blocks(max(short, self.blocks // 2))

    def _add_blocks(self, count: int) -> None:
        """Enlarge the pools."""
        if count > 0:
            self.key_pool, self.value_pool = (
                torch.cat([pool, allocated(pool, (len(pool), count, *pool.shape[2:]), 0)], 1)
                for pool in (self.key_pool, self.value_pool)
            )


def _blocks_of(slots: Tensor, size: int) -> Tensor:
    """The blocks of every row in which some of these slots lie, bool [batch, kv_heads, slots]: bool [batch, blocks of a row]."""
    batch, heads, count = slots.shape
    whole = torch.nn.functional.pad(slots, (0, -count % size))
    return whole.view(batch, heads, -1, size).any(3).any(1)


def _most_blocks(state: Slots, size: int) -> Tensor:
    """How many blocks each row can ever need, [batch]: new tokens take the lowest free slots."""
    slots = state.slots
    live = state.position >= 0
    behind_last = (live * torch.arange(1, slots + 1, device=live.device)).amax((1, 2))
    by_head = state.room.most_by_head(state.numbers, evicts=state.evicts)
    most = by_head.amax(1).floor().clamp(max=slots).long()
    needed = torch.stack([most, behind_last, live.sum(-1).amax(1) + 1]).amax(0).clamp(max=slots)
    return -(-needed // size)
