"""Heads of different lengths: one flat array of keys and one of values, with each head's first row.

Under a budget shared by the heads of a layer (`budget B across heads`), some heads keep many times what others keep. If the policy
evicts in the prompt only, each head gets room for what it keeps and for the tokens to come; evicted tokens are freed, not masked. All
heads move together when a head's room is used up.

Under a budget per head from a tensor, each head gets room for its own budget, also while decoding.

Positions and columns have the longest head's number of slots for every head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvdsl.runtime.state.layout import Layout, Slots
from kvdsl.runtime.state.tensors import Declared, allocated, taken

_AHEAD = 64
"""Spare slots per head, so that not every token moves all heads."""


class Flat(Layout):
    """Keys and values of heads of different lengths.

    Tensors:
        key_pool [rows, key_dim], value_pool [rows, value_dim].
        first_rows [batch, kv_heads] int64: the row of a head's first slot. A head ends where the next one begins.
    """

    DECLARED = (*Layout.DECLARED, Declared("first_rows"))

    first_rows: Tensor

    @property
    def room(self) -> Tensor:
        """Slots per head, int64 [batch, kv_heads]."""
        end = torch.cat([self.first_rows.flatten()[1:], self.first_rows.new_tensor([len(self.key_pool)])])
        return end.view_as(self.first_rows) - self.first_rows

    def where(self, slot: Tensor) -> tuple[Tensor, ...]:
        """Map slots beyond a head's room to its last slot. Only padding writes there."""
        return (self.first_rows[..., None] + torch.minimum(slot, self.room[..., None] - 1),)

    # -- allocating ----------------------------------------------------------------------------------------------------

    def lay_out(self, state: Slots, kept: Mapping[str, Tensor], order: Tensor | None) -> None:
        keys, values = (kept[name] if order is None else taken(name, kept[name], order) for name in ("keys", "values"))
        held = (state.position >= 0)[..., : keys.shape[2]]
        self._fill(state, keys[held], values[held], 0)

    def grow(self, state: Slots, held: Tensor) -> None:
        at = self.places(held)
        self._fill(state, self.key_pool[at], self.value_pool[at], self.room)

    def make_room(self, state: Slots, tokens: int) -> None:
        """Move the heads if one is full. Only budgets that depend on the data need this: their heads may have shrunk."""
        if not state.room.shrinks:
            return
        held = state.position >= 0
        wanted = held.sum(2) + tokens
        if bool((wanted > self.room).any()):
            at = self.places(held)
            self._fill(state, self.key_pool[at], self.value_pool[at], (wanted + _AHEAD).clamp(max=state.slots))

    def _fill(self, state: Slots, keys: Tensor, values: Tensor, least: Tensor | int) -> None:
        """Allocate new pools and write the live tokens, [any, dim], head by head.

        Every head gets as many free slots as the longest head, at most what its budget fills, and at least `least` slots in all.
        """
        position, slots, live = state.position, state.slots, state.position >= 0
        used = (live * torch.arange(1, slots + 1, device=position.device)).amax(2)
        most = state.room.most_by_head(state.numbers, evicts=state.evicts).to(used.device).expand_as(used)
        own = torch.stack([most, used.double(), live.sum(2) + 1.0]).amax(0).clamp(max=slots).long()
        room = torch.where(most.isfinite(), own, used + (slots - used.max())).clamp(min=least)
        ends = room.flatten().cumsum(0)
        self.first_rows = (ends - room.flatten()).view_as(room)
        self.key_pool, self.value_pool = (allocated(held, (int(ends[-1]), held.shape[1]), 0) for held in (keys, values))
        at = self.places(live)
        self.key_pool[at], self.value_pool[at] = keys, values
