"""Heads of different lengths: one flat array of keys and one of values, and where in them every head begins.

Under a budget that the heads of a layer share (`budget B across heads`), some keep many times what others do. Where that is decided once,
at the end of the prompt, each head gets room for what it has kept and for the tokens to come, of which all heads get as many; what
was evicted is freed and not masked. Nothing moves until that room is used up, and then everything at once.

There are as many slots for every head as the longest one has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvdsl.runtime.state.layout import Layout
from kvdsl.runtime.state.tensors import Declared, allocated, taken

if TYPE_CHECKING:
    from kvdsl.runtime.state.slots import SlotState


class Flat(Layout):
    """Keys and values of heads that differ in length; of policies that evict in the prompt only.

    Tensors:
        key_pool [rows, key_dim], value_pool [rows, value_dim].
        first_rows [batch, kv_heads] int64: the row of a head's first slot. Its last one lies before the next head's first.
    """

    DECLARED = (*Layout.DECLARED, Declared("first_rows"))

    first_rows: Tensor

    @property
    def room(self) -> Tensor:
        """Slots of every head: int64 [batch, kv_heads]."""
        end = torch.cat([self.first_rows.flatten()[1:], self.first_rows.new_tensor([len(self.key_pool)])])
        return end.view_as(self.first_rows) - self.first_rows

    def where(self, slot: Tensor) -> tuple[Tensor, ...]:
        """See `Layout.where`; slots that a head does not have are its last one, into which nobody but padding writes."""
        return (self.first_rows[..., None] + torch.minimum(slot, self.room[..., None] - 1),)

    # -- allocating ----------------------------------------------------------------------------------------------------

    def lay_out(self, state: SlotState, kept: Mapping[str, Tensor], order: Tensor | None) -> None:
        keys, values = (kept[name] if order is None else taken(name, kept[name], order) for name in ("keys", "values"))
        held = (state.position >= 0)[..., : keys.shape[2]]
        self._fill(state.position, keys[held], values[held])

    def grow(self, state: SlotState, held: Tensor) -> None:
        at = self.places(held)
        self._fill(state.position, self.key_pool[at], self.value_pool[at])

    def _fill(self, position: Tensor, keys: Tensor, values: Tensor) -> None:
        """Fresh pools with the live tokens, head by head [any, dim]; every head gets as many free slots as the longest one has."""
        slots = position.shape[2]
        used = ((position >= 0) * torch.arange(1, slots + 1, device=position.device)).amax(2)
        room = used + (slots - used.max())
        ends = room.flatten().cumsum(0)
        self.first_rows = (ends - room.flatten()).view_as(room)
        self.key_pool, self.value_pool = (allocated(live, (int(ends[-1]), live.shape[1]), 0) for live in (keys, values))
        at = self.places(position >= 0)
        self.key_pool[at], self.value_pool[at] = keys, values
