"""Slots in blocks: one pool of keys and values for all rows of a batch, found through a table.

As in paged attention, a row's slots s lie in the block `table[row, s // size]` of the pool, at `s % size`, and a new token is written
there, over what left (EQUIP, figure 18). A block holds the same slots of all KV heads. A row has the blocks in which any of its
slots is in use; a block in which none is any more goes back to the pool, for whichever row needs one next. So rows of different
lengths, or with different budgets, take what they use and not what the largest does.

Under a policy that evicts while it decodes, the pool has as many blocks as each row can ever need by its own budget: it never moves,
and no step waits for the host to enlarge it. Where the slots are not yet as many as they will be, the pool grows like them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.runtime.state.pooled import POOLS, PooledState
from kvdsl.runtime.state.slots import FREE, allocated
from kvdsl.runtime.state.tensors import Declared


class BlockState(PooledState):
    """`PooledState` with keys and values in blocks.

    Tensors beside the others:
        key_pool [kv_heads, blocks, size, key_dim], value_pool [kv_heads, blocks, size, value_dim]: the model's dtype. A head's blocks
            lie together, so that those that a row was given one after the other can be read in one go.
        table [batch, blocks of a row] int64: where each block of a row's slots lies in the pools; -1 where it has none.
    """

    LAYOUT = (*PooledState.LAYOUT, Declared("table"))

    table: Tensor

    @property
    def size(self) -> int:
        """Slots of a block."""
        return self.key_pool.shape[2]

    @property
    def blocks(self) -> int:
        """Blocks in the pool."""
        return self.key_pool.shape[1]

    @property
    def used(self) -> Tensor:
        """Which blocks of every row hold a token: bool [batch, blocks of a row]."""
        return self._blocks_of(self.position >= 0, self.size)

    def write(self, slot: Tensor, key: Tensor, value: Tensor, real: Tensor) -> None:
        """See `SlotState.write`: in place, at block and offset."""
        block, offset = slot // self.size, slot % self.size
        self._take(torch.zeros_like(self.table, dtype=torch.bool).scatter_(1, block.flatten(1), True))
        physical = self.table.gather(1, block.flatten(1)).view_as(block)
        heads = torch.arange(slot.shape[1], device=slot.device).view(1, -1, 1)
        for pool, new in ((self.key_pool, key), (self.value_pool, value)):
            old = pool[heads, physical, offset]
            pool[heads, physical, offset] = torch.where(real[:, None, :, None], new.to(pool.dtype), old)

    def write_all(self, keys: Tensor, values: Tensor) -> None:
        """See `SlotState.write_all`."""
        self.settled()
        self._take(self.used)
        for pool, dense in ((self.key_pool, keys), (self.value_pool, values)):
            self._scatter(pool, dense)

    def settled(self) -> None:
        """Give back the blocks in which nothing is left."""
        self.table.masked_fill_(~self.used, FREE)

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _grow(self, held: Tensor) -> None:
        """See `PooledState._grow`: their blocks will come."""
        more = -(-self.position.shape[2] // self.size) - self.table.shape[1]
        self.table = torch.nn.functional.pad(self.table, (0, more), value=FREE)

    def _lay_out(self, dense: dict[str, Tensor]) -> None:
        """See `PooledState._lay_out`: pools with the blocks in use, in place of older ones of that size."""
        batch, heads, slots = self.position.shape
        size = int(self.settings.named(self.numbers)["block"].max())
        size = size if self.limit is None else min(size, self.limit)
        self.table = self._filled("table", self.position, (batch, -(-slots // size)), FREE, torch.int64)
        wanted = int((self._blocks_of(self.position >= 0, size) if self.grows else self._most_blocks(size)).sum())
        for name, pool in POOLS.items():
            shape = (heads, max(1, wanted), size, dense[name].shape[3])
            setattr(self, pool, self._filled(pool, dense[name], shape, 0, dense[name].dtype))
        self._take(self.used)
        for name, pool in POOLS.items():
            self._scatter(getattr(self, pool), dense[name])

    @staticmethod
    def _blocks_of(slots: Tensor, size: int) -> Tensor:
        """The blocks of every row in which some of these slots lie, bool [batch, kv_heads, slots]: bool [batch, blocks of a row]."""
        batch, heads, count = slots.shape
        whole = torch.nn.functional.pad(slots, (0, -count % size))
        return whole.view(batch, heads, -1, size).any(3).any(1)

    def _most_blocks(self, size: int) -> Tensor:
        """How many blocks each row can ever need, [batch]: new tokens take the lowest free slots."""
        slots = self.position.shape[2]
        live = self.position >= 0
        behind_last = (live * torch.arange(1, slots + 1, device=live.device)).amax((1, 2))
        most = self.settings.most_while_attending(self.numbers).floor().clamp(max=slots).long()
        needed = torch.stack([most, behind_last, live.sum(-1).amax(1) + 1]).amax(0).clamp(max=slots)
        return -(-needed // size)

    def _take(self, wanted: Tensor) -> None:
        """Give rows the blocks that they want, bool [batch, blocks of a row], and lack, of those that are in no row."""
        held = torch.zeros(self.blocks, dtype=torch.int32, device=wanted.device)
        held.scatter_add_(0, self.table.clamp(min=0).flatten(), (self.table >= 0).int().flatten())
        free = held.argsort(stable=True)  # those first, the lowest first
        missing = wanted & (self.table < 0)
        nth = missing.flatten().cumsum(0).sub_(1).clamp_(0, len(free) - 1).view_as(missing)
        self.table.copy_(torch.where(missing, free[nth], self.table))

    def make_room(self, tokens: int) -> None:
        """See `SlotState.make_room`; the pool of a cache that grows does so by half, when it has too few blocks."""
        super().make_room(tokens)
        if not self.grows:
            return
        batch, heads, _ = self.position.shape
        free = self.blocks - int((self.table >= 0).sum())
        if free >= batch * heads * tokens:  # a block for every token would do
            return
        empty = self.position < 0
        coming = empty & (empty.cumsum(-1) <= tokens)
        short = int((self._blocks_of(coming, self.size) & (self.table < 0)).sum()) - free
        if short > 0:
            self._add_blocks(max(short, self.blocks // 2))

    def _extend(self, slots: int) -> None:
        """See `SlotState._extend`; a pool whose slots are enough for ever has enough blocks as well."""
        super()._extend(slots)
        if not self.grows:
            self._add_blocks(int(self._most_blocks(self.size).sum()) - self.blocks)

    def _add_blocks(self, count: int) -> None:
        """Enlarge the pools."""
        for pool in POOLS.values() if count > 0 else ():
            old: Tensor = getattr(self, pool)
            setattr(self, pool, torch.cat([old, allocated(old, (len(old), count, *old.shape[2:]), 0)], 1))

    def _gathered(self, pool: Tensor) -> Tensor:
        """See `PooledState._gathered`; slots without a block show what others keep."""
        slot = torch.arange(self.position.shape[2], device=pool.device)
        heads = torch.arange(len(pool), device=pool.device)
        physical = self.table.clamp(min=0)[:, slot // self.size]
        return pool[heads[:, None], physical[:, None], slot % self.size]

    def _scatter(self, pool: Tensor, dense: Tensor) -> None:
        """Write the first slots into the blocks that the rows have."""
        batch, heads, slots, dim = dense.shape
        whole = torch.nn.functional.pad(dense, (0, 0, 0, self.table.shape[1] * self.size - slots))
        blocks = whole.view(batch, heads, -1, self.size, dim).transpose(0, 1)
        has = self.table >= 0
        pool[:, self.table[has]] = blocks[:, has]
