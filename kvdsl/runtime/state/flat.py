"""Heads of different lengths: one flat array of keys and one of values, and where in them every head begins.

Under a budget that the heads of a layer share (`budget B across heads`), some keep many times what others do. Where that is decided once,
at the end of the prompt, each head gets room for what it has kept and for the tokens to come, of which all heads get as many; what
was evicted is freed and not masked. Nothing moves until that room is used up, and then everything at once.

There are as many slots for every head as the longest one has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.runtime.state.pooled import POOLS, PooledState
from kvdsl.runtime.state.slots import allocated
from kvdsl.runtime.state.tensors import Declared


class FlatState(PooledState):
    """`PooledState` with keys and values of heads that differ in length; of policies that evict in the prompt only.

    Tensors beside the others:
        key_pool [rows, key_dim], value_pool [rows, value_dim]: the model's dtype.
        first_rows [batch, kv_heads] int64: the row of a head's first slot. Its last one lies before the next head's first.
    """

    LAYOUT = (*PooledState.LAYOUT, Declared("first_rows"))

    first_rows: Tensor

    @property
    def room(self) -> Tensor:
        """Slots of every head: int64 [batch, kv_heads]."""
        end = torch.cat([self.first_rows.flatten()[1:], self.first_rows.new_tensor([len(self.key_pool)])])
        return end.view_as(self.first_rows) - self.first_rows

    def write(self, slot: Tensor, key: Tensor, value: Tensor, real: Tensor) -> None:
        """See `SlotState.write`."""
        row = (self.first_rows + slot[..., 0]).clamp(max=len(self.key_pool) - 1)  # padding needs no slot, and may find none
        for pool, new in ((self.key_pool, key), (self.value_pool, value)):
            pool[row] = torch.where(real[..., None], new[:, :, 0], pool[row])

    def write_all(self, keys: Tensor, values: Tensor) -> None:
        """See `SlotState.write_all`."""
        rows, inside = self._rows(keys.shape[2]), self._inside(keys.shape[2])
        for pool, dense in ((self.key_pool, keys), (self.value_pool, values)):
            pool[rows[inside]] = dense[inside]

    # -- where things lie ----------------------------------------------------------------------------------------------

    def _gathered(self, pool: Tensor) -> Tensor:
        """See `PooledState._gathered`; slots that a head does not have show its last one."""
        return pool[self._rows()]

    def _lay_out(self, dense: dict[str, Tensor]) -> None:
        """See `PooledState._lay_out`."""
        held = self.position >= 0
        self._fill({name: x[held[..., : x.shape[2]]] for name, x in dense.items()})

    def _grow(self, held: Tensor) -> None:
        """See `PooledState._grow`."""
        rows = self._rows(held.shape[2])[held]
        self._fill({name: getattr(self, pool)[rows] for name, pool in POOLS.items()})

    def _fill(self, live: dict[str, Tensor]) -> None:
        """Fresh pools with the live tokens, head by head [any, dim]; every head gets as many free slots as the longest one has."""
        slots = self.position.shape[2]
        used = ((self.position >= 0) * torch.arange(1, slots + 1, device=self.position.device)).amax(2)
        room = used + (slots - used.max())
        ends = room.flatten().cumsum(0)
        self.first_rows = (ends - room.flatten()).view_as(room)
        total, places = int(ends[-1]), self.first_rows[..., None] + torch.arange(slots, device=room.device)
        for name, pool in POOLS.items():
            setattr(self, pool, allocated(live[name], (total, live[name].shape[1]), 0))
            getattr(self, pool)[places[self.position >= 0]] = live[name]

    def _rows(self, slots: int | None = None) -> Tensor:
        """Where the first slots lie, all unless told otherwise: int64 [batch, kv_heads, slots]."""
        slot = torch.arange(self.position.shape[2] if slots is None else slots, device=self.first_rows.device)
        return self.first_rows[..., None] + torch.minimum(slot, self.room[..., None] - 1)

    def _inside(self, slots: int) -> Tensor:
        """Which of the first slots the heads have: bool [batch, kv_heads, slots]."""
        return torch.arange(slots, device=self.first_rows.device) < self.room[..., None]
