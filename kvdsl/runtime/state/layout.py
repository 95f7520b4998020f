"""Where the keys and values of one layer lie: in slot order here, or as in `blocks` or `flat`.

Positions, columns, ranks and the rotated halves of `rope cached` are stored by slot in every layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvdsl.runtime.state.room import Room
from kvdsl.runtime.state.tensors import NOTHING, Declared, in_slots, with_rows


class Slots(Protocol):
    """What a layout reads of `SlotState`."""

    position: Tensor
    numbers: Tensor
    evicts: bool
    room: Room

    @property
    def slots(self) -> int: ...


class Layout:
    """Keys and values, and the map from slots to their places.

    Tensors, named in `DECLARED`:
        key_pool [..., key_dim], value_pool [..., value_dim]: in the model's dtype, or as bytes (see `packed`). Subclasses state the other
            dimensions.
    """

    DECLARED: ClassVar[tuple[Declared, ...]] = (Declared("key_pool", batch=None), Declared("value_pool", batch=None))

    key_pool: Tensor
    value_pool: Tensor

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop all tensors."""
        for one in self.DECLARED:
            setattr(self, one.name, NOTHING)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name."""
        return {one.name: getattr(self, one.name) for one in self.DECLARED}

    @property
    def dtype(self) -> torch.dtype:
        """The storage dtype of keys and values."""
        return self.key_pool.dtype

    def where(self, slot: Tensor) -> tuple[Tensor, ...]:
        """Return the index into the pools of slots, int64 [batch, kv_heads, any] or [any]. A slot without a place gets any valid index."""
        raise NotImplementedError

    # -- reading and writing -------------------------------------------------------------------------------------------

    def read(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of slots (see `where`), [batch, kv_heads, any, dim] each. Copies."""
        at = self.where(slot)
        return self.key_pool[at], self.value_pool[at]

    def keys(self, slots: int) -> Tensor:
        """Return all keys, [batch, kv_heads, slots, key_dim]. Free slots hold arbitrary numbers."""
        return self.key_pool[self.where(torch.arange(slots, device=self.key_pool.device))]

    def values(self, slots: int) -> Tensor:
        """Return all values, [batch, kv_heads, slots, value_dim]. Free slots hold arbitrary numbers."""
        return self.value_pool[self.where(torch.arange(slots, device=self.value_pool.device))]

    def write(self, slot: Tensor, key: Tensor, value: Tensor, real: Tensor) -> None:
        """Write one new token per KV head into its slot. Padding tokens write nothing.

        Args:
            slot: int64 [batch, kv_heads, 1].
            key, value: [batch, kv_heads, 1, dim].
            real: bool [batch, 1].
        """
        at = self.where(slot)
        for pool, new in ((self.key_pool, key), (self.value_pool, value)):
            pool[at] = torch.where(real[:, None, :, None], new.to(pool.dtype), pool[at])

    def write_all(self, position: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write the first slots, [batch, kv_heads, any, dim] each, to restore an earlier state.

        Args:
            position: [batch, kv_heads, slots], already restored.
        """
        held = position[..., : keys.shape[2]] >= 0
        at = self.places(held)
        self.key_pool[at], self.value_pool[at] = keys[held], values[held]

    def places(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Return the index into the pools of marked slots: bool [batch, kv_heads, any]."""
        at = self.where(torch.arange(slots.shape[2], device=slots.device))
        return tuple(index.expand_as(slots)[slots] for index in at)

    def settled(self, position: Tensor) -> None:
        """Update the layout after a settle that freed slots: position is [batch, kv_heads, slots]."""

    # -- allocating ----------------------------------------------------------------------------------------------------

    def lay_out(self, state: Slots, kept: Mapping[str, Tensor], order: Tensor | None) -> None:
        """Allocate, and write keys and values of the slots that hold a token.

        Args:
            kept: `keys` and `values`, [batch, kv_heads, any, dim] each.
            order: which of them, [batch, kv_heads, at most state.slots]; None for all in order.
        """
        raise NotImplementedError

    def grow(self, state: Slots, held: Tensor) -> None:
        """Allocate places for added slots.

        Args:
            held: bool [batch, kv_heads, slots before], which slots held a token.
        """
        raise NotImplementedError

    def make_room(self, state: Slots, tokens: int) -> None:
        """Allocate places for `tokens` more in a cache that grows. Their slots exist already."""

    def select_rows(self, state: Slots, rows: Tensor) -> None:
        """Replace row i by row rows[i]. The state's other tensors are already updated."""
        keys, values = (x.index_select(0, rows.to(x.device)) for x in (self.keys(state.slots), self.values(state.slots)))
        self.lay_out(state, {"keys": keys, "values": values}, None)


class SlotAfterSlot(Layout):
    """Keys and values in slot order.

    Tensors:
        key_pool [batch, kv_heads, slots, key_dim], value_pool [batch, kv_heads, slots, value_dim].
    """

    DECLARED = (Declared("key_pool", slots=2), Declared("value_pool", slots=2))

    def where(self, slot: Tensor) -> tuple[Tensor, ...]:
        batch, heads = (torch.arange(count, device=slot.device) for count in self.key_pool.shape[:2])
        return batch[:, None, None], heads[:, None], slot

    def keys(self, slots: int) -> Tensor:
        """Return the pool itself, not a copy."""
        return self.key_pool

    def values(self, slots: int) -> Tensor:
        """Return the pool itself, not a copy."""
        return self.value_pool

    def write_all(self, position: Tensor, keys: Tensor, values: Tensor) -> None:
        self.key_pool[:, :, : keys.shape[2]] = keys
        self.value_pool[:, :, : values.shape[2]] = values

    def lay_out(self, state: Slots, kept: Mapping[str, Tensor], order: Tensor | None) -> None:
        self.key_pool = in_slots("keys", self.key_pool, kept["keys"], order, state.slots)
        self.value_pool = in_slots("values", self.value_pool, kept["values"], order, state.slots)

    def grow(self, state: Slots, held: Tensor) -> None:
        self.lay_out(state, {"keys": self.key_pool, "values": self.value_pool}, None)

    def select_rows(self, state: Slots, rows: Tensor) -> None:
        self.key_pool, self.value_pool = (with_rows(pool, 0, rows) for pool in (self.key_pool, self.value_pool))
