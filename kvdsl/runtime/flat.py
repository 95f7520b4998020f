"""Heads of different lengths: one flat array of keys and one of values, and where in them every head begins.

Under a budget that the heads of a layer share (`budget B across heads`), some keep many times what others do. Where that is decided once,
at the end of the prompt, each head gets room for what it has kept and for the tokens to come, of which all heads get as many; what
was evicted is freed and not masked. Nothing moves until that room is used up, and then everything at once.

Positions and columns stay by slot, with as many slots for every head as the longest one has: they are small beside the keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.runtime.slots import SlotState, allocated, taken

FLAT = {"keys": "flat_keys", "values": "flat_values"}
"""What lies flat, and its name."""


class FlatState(SlotState):
    """`SlotState` with keys and values of heads that differ in length; of policies that evict in the prompt only.

    Tensors beside the others:
        flat_keys [rows, key_dim], flat_values [rows, value_dim]: the model's dtype.
        first_rows [batch, kv_heads] int64: the row of a head's first slot. Its last one lies before the next head's first.

    Reading `keys` or `values` gathers all slots; those that a head does not have show its last one, as free slots may.
    """

    TENSORS = ("flat_keys", "flat_values", "first_rows", "position", "columns", "seen", "numbers")
    PLAIN = ("position", "columns")

    flat_keys: Tensor
    flat_values: Tensor
    first_rows: Tensor

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        """[batch, kv_heads, slots, key_dim]; a copy."""
        return self.flat_keys[self._rows()]

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """[batch, kv_heads, slots, value_dim]; a copy."""
        return self.flat_values[self._rows()]

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """See `SlotState.stored`."""
        return self.flat_keys[None, None], self.flat_values[None, None]

    @property
    def room(self) -> Tensor:
        """Slots of every head: int64 [batch, kv_heads]."""
        end = torch.cat([self.first_rows.flatten()[1:], self.first_rows.new_tensor([len(self.flat_keys)])])
        return end.view_as(self.first_rows) - self.first_rows

    def write(self, slot: Tensor, key: Tensor, value: Tensor, real: Tensor) -> None:
        """See `SlotState.write`."""
        row = (self.first_rows + slot[..., 0]).clamp(max=len(self.flat_keys) - 1)  # padding needs no slot, and may find none
        for flat, new in ((self.flat_keys, key), (self.flat_values, value)):
            flat[row] = torch.where(real[..., None], new[:, :, 0], flat[row])

    def write_all(self, keys: Tensor, values: Tensor) -> None:
        """See `SlotState.write_all`."""
        rows, inside = self._rows(keys.shape[2]), self._inside(keys.shape[2])
        for flat, dense in ((self.flat_keys, keys), (self.flat_values, values)):
            flat[rows[inside]] = dense[inside]

    def select_rows(self, rows: Tensor) -> None:
        """See `SlotState.select_rows`."""
        if not self.allocated:
            return
        rows = rows.to(self.first_rows.device)
        dense = {name: getattr(self, name).index_select(0, rows) for name in FLAT}
        super().select_rows(rows)
        self._lay_out({name: x[self.position >= 0] for name, x in dense.items()})

    def batch_dim(self, name: str) -> int | None:
        """See `SlotState.batch_dim`; what is flat belongs to all rows."""
        return None if name in FLAT.values() else super().batch_dim(name)

    # -- where things lie ----------------------------------------------------------------------------------------------

    def _allocate(self, kept: dict[str, Tensor], order: Tensor | None, slots: int) -> None:
        if order is None:  # more slots for what is there
            rows = self._rows()[self.position >= 0]
            live = {name: getattr(self, flat)[rows] for name, flat in FLAT.items()}
            super()._allocate(kept, order, slots)
        else:
            super()._allocate(kept, order, slots)
            filled = (self.position >= 0)[..., : order.shape[2]]
            live = {name: taken(name, kept[name], order)[filled] for name in FLAT}
        self._lay_out(live)

    def forget_copies(self) -> None:
        """See `SlotState.forget_copies`: such policies keep none."""

    def _lay_out(self, live: dict[str, Tensor]) -> None:
        """Fresh arrays with the live tokens, head by head [any, dim]; every head gets as many free slots as the longest one has."""
        slots = self.position.shape[2]
        used = ((self.position >= 0) * torch.arange(1, slots + 1, device=self.position.device)).amax(2)
        room = used + (slots - used.max())
        ends = room.flatten().cumsum(0)
        self.first_rows = (ends - room.flatten()).view_as(room)
        total, places = int(ends[-1]), self.first_rows[..., None] + torch.arange(slots, device=room.device)
        for name, flat in FLAT.items():
            setattr(self, flat, allocated(live[name], (total, live[name].shape[1]), 0))
            getattr(self, flat)[places[self.position >= 0]] = live[name]

    def _rows(self, slots: int | None = None) -> Tensor:
        """Where the first slots lie, all unless told otherwise: int64 [batch, kv_heads, slots]."""
        slot = torch.arange(self.position.shape[2] if slots is None else slots, device=self.first_rows.device)
        return self.first_rows[..., None] + torch.minimum(slot, self.room[..., None] - 1)

    def _inside(self, slots: int) -> Tensor:
        """Which of the first slots the heads have: bool [batch, kv_heads, slots]."""
        return torch.arange(slots, device=self.first_rows.device) < self.room[..., None]
