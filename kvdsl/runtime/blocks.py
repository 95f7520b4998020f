"""Slots in blocks: one pool of keys and values for all rows of a batch, found through a table.

As in paged attention, a row's slots s lie in the block `table[row, s // size]` of the pool, at `s % size`, and a new token is written
there, over what left (EQUIP, figure 18). A block holds the same slots of all KV heads. A row has the blocks in which any of its
slots is in use; a block in which none is any more goes back to the pool, for whichever row needs one next. So rows of different
lengths, or with different budgets, take what they use and not what the largest does.

Positions, columns and ranks stay by slot: they are small, and who leaves does not depend on where things lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.runtime.slots import FREE, SlotState, taken

POOLS = {"keys": "key_pool", "values": "value_pool"}
"""What lies in blocks, and the name of its pool."""


class BlockState(SlotState):
    """`SlotState` with keys and values in blocks.

    Tensors beside the others:
        key_pool [blocks, kv_heads, size, key_dim], value_pool [blocks, kv_heads, size, value_dim]: the model's dtype.
        table [batch, blocks of a row] int64: where each block of a row's slots lies in the pools; -1 where it has none.

    Reading `keys` or `values` gathers all slots; those without a block show what others keep, as free slots may.

    Attributes:
        size: slots of a block.
    """

    TENSORS = ("key_pool", "value_pool", "table", "position", "columns", "seen", "numbers")
    PLAIN = ("position", "columns")

    key_pool: Tensor
    value_pool: Tensor
    table: Tensor
    size: int

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        """[batch, kv_heads, slots, key_dim]; a copy."""
        return self._gathered(self.key_pool)

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """[batch, kv_heads, slots, value_dim]; a copy."""
        return self._gathered(self.value_pool)

    @property
    def dtype(self) -> torch.dtype:
        """What keys and values are stored in."""
        return self.key_pool.dtype

    def stays_fixed(self) -> bool:
        """See `SlotState.stays_fixed`: the table is filled by the host, which a graph cannot wait for."""
        return False

    @property
    def used(self) -> Tensor:
        """Which blocks of every row hold a token: bool [batch, blocks of a row]."""
        batch, heads, slots = self.position.shape
        whole = torch.nn.functional.pad(self.position, (0, self.table.shape[1] * self.size - slots), value=FREE)
        return (whole.view(batch, heads, -1, self.size) >= 0).any(3).any(1)

    def write(self, slot: Tensor, key: Tensor, value: Tensor, real: Tensor) -> None:
        """See `SlotState.write`: in place, at block and offset."""
        block, offset = slot // self.size, slot % self.size
        self._take(torch.zeros_like(self.table, dtype=torch.bool).scatter_(1, block.flatten(1), True))
        physical = self.table.gather(1, block.flatten(1)).view_as(block)
        heads = torch.arange(slot.shape[1], device=slot.device).view(1, -1, 1)
        for pool, new in ((self.key_pool, key), (self.value_pool, value)):
            old = pool[physical, heads, offset]
            pool[physical, heads, offset] = torch.where(real[:, None, :, None], new.to(pool.dtype), old)

    def write_all(self, keys: Tensor, values: Tensor) -> None:
        """See `SlotState.write_all`."""
        self.settled()
        self._take(self.used)
        for pool, dense in ((self.key_pool, keys), (self.value_pool, values)):
            self._scatter(pool, dense)

    def settled(self) -> None:
        """Give back the blocks in which nothing is left."""
        self.table.masked_fill_(~self.used, FREE)

    def select_rows(self, rows: Tensor) -> None:
        """See `SlotState.select_rows`; the rows' blocks are copied."""
        if not self.allocated:
            return
        rows = rows.to(self.table.device)
        dense = {name: getattr(self, name).index_select(0, rows) for name in POOLS}
        super().select_rows(rows)
        self._lay_out(dense)

    def batch_dim(self, name: str) -> int | None:
        """See `SlotState.batch_dim`; pools belong to no row."""
        return None if name in POOLS.values() else super().batch_dim(name)

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _allocate(self, kept: dict[str, Tensor], order: Tensor | None, slots: int) -> None:
        super()._allocate(kept, order, slots)
        if order is None:  # more slots: their blocks will come
            more = -(-slots // self.size) - self.table.shape[1]
            self.table = torch.nn.functional.pad(self.table, (0, more), value=FREE)
        else:
            self._lay_out({name: taken(name, kept[name], order) for name in POOLS})
            self.forget_copies()

    def forget_copies(self) -> None:
        """See `SlotState.forget_copies`."""
        if "key_pool" in self.__dict__:  # else they are still to come
            super().forget_copies()

    def _lay_out(self, dense: dict[str, Tensor]) -> None:
        """Fresh pools with the blocks in use of the first slots, [batch, kv_heads, any, dim]."""
        self.size = min(int(self.named(self.numbers)["block"].max()), max(1, self.position.shape[2]))
        self.table = self.position.new_full(
            (len(self.position), -(-self.position.shape[2] // self.size)), FREE, dtype=torch.int64
        )
        used = self.used
        blocks = int(used.sum())
        self.table[used] = torch.arange(blocks, device=used.device)
        for name, pool in POOLS.items():
            heads, dim = dense[name].shape[1], dense[name].shape[3]
            setattr(self, pool, dense[name].new_zeros(max(1, blocks), heads, self.size, dim))
            self._scatter(getattr(self, pool), dense[name])

    def _take(self, wanted: Tensor) -> None:
        """Give rows the blocks that they want, bool [batch, blocks of a row], and lack; the pool grows by half when it is empty."""
        missing = wanted & (self.table < 0)
        count = int(missing.sum())
        if count == 0:
            return
        free = torch.ones(len(self.key_pool), dtype=torch.bool, device=missing.device)
        free[self.table[self.table >= 0]] = False
        short = count - int(free.sum())
        if short > 0:
            more = max(short, len(free) // 2)
            for pool in POOLS.values():
                old: Tensor = getattr(self, pool)
                setattr(self, pool, torch.cat([old, old.new_zeros(more, *old.shape[1:])]))
            free = torch.cat([free, free.new_ones(more)])
        self.table[missing] = free.nonzero()[:count, 0]

    def _gathered(self, pool: Tensor) -> Tensor:
        """[batch, kv_heads, slots, dim], slot after slot in memory as where there are no blocks."""
        slot = torch.arange(self.position.shape[2], device=pool.device)
        heads = torch.arange(pool.shape[1], device=pool.device)
        physical = self.table.clamp(min=0)[:, slot // self.size]
        return pool[physical[:, None], heads[:, None], slot % self.size]

    def _scatter(self, pool: Tensor, dense: Tensor) -> None:
        """Write the first slots into the blocks that the rows have."""
        batch, heads, slots, dim = dense.shape
        whole = torch.nn.functional.pad(dense, (0, 0, 0, self.table.shape[1] * self.size - slots))
        blocks = whole.view(batch, heads, -1, self.size, dim).transpose(1, 2)
        has = self.table >= 0
        pool[self.table[has]] = blocks[has]
