"""Where the keys and values of one layer lie. Slot after slot, unless `blocks` or `flat`, beside, say otherwise.

Positions, columns and ranks stay by slot whatever the layout, because they are small, and who leaves does not depend on where things
lie. So do the rotated halves of `rope cached`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kvdsl.runtime.state.room import Room
from kvdsl.runtime.state.tensors import NOTHING, Declared, in_slots, with_rows


class Slots(Protocol):
    """What a layout must know of a layer's slots: which hold a token, and how many there are to be; see `SlotState`."""

    position: Tensor
    numbers: Tensor
    evicts: bool
    room: Room

    @property
    def slots(self) -> int:
        """Slots per KV head."""


class Layout:
    """Keys and values, and where in them a slot lies.

    Tensors, which `DECLARED` names:
        key_pool [..., key_dim], value_pool [..., value_dim]: the model's dtype, or rows of bytes as `packed` makes them. A layout says
            what their other dimensions are.
    """

    DECLARED: ClassVar[tuple[Declared, ...]] = (Declared("key_pool", batch=None), Declared("value_pool", batch=None))

    key_pool: Tensor
    value_pool: Tensor

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Hold nothing."""
        for one in self.DECLARED:
            setattr(self, one.name, NOTHING)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name."""
        return {one.name: getattr(self, one.name) for one in self.DECLARED}

    @property
    def dtype(self) -> torch.dtype:
        """What keys and values are stored in."""
        return self.key_pool.dtype

    def where(self, slot: Tensor) -> tuple[Tensor, ...]:
        """The index of slots, int64 [batch, kv_heads, any] or [any], into what is stored; of a slot without a place, any other's."""
        raise NotImplementedError

    # -- what is in the slots ------------------------------------------------------------------------------------------

    def read(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of slots, given as to `where`: [batch, kv_heads, any, dim]. Copies."""
        at = self.where(slot)
        return self.key_pool[at], self.value_pool[at]

    def keys(self, slots: int) -> Tensor:
        """Of all slots, [batch, kv_heads, slots, key_dim]; what is there of one without a place means nothing, as in free slots."""
        return self.key_pool[self.where(torch.arange(slots, device=self.key_pool.device))]

    def values(self, slots: int) -> Tensor:
        """Likewise, [batch, kv_heads, slots, value_dim]."""
        return self.value_pool[self.where(torch.arange(slots, device=self.value_pool.device))]

    def write(self, slot: Tensor, key: Tensor, value: Tensor, real: Tensor) -> None:
        """Write one new token per KV head into its slot, over what is there; a padding token leaves everything as it was.

        Args:
            slot: int64 [batch, kv_heads, 1].
            key, value: [batch, kv_heads, 1, dim].
            real: bool [batch, 1].
        """
        at = self.where(slot)
        for pool, new in ((self.key_pool, key), (self.value_pool, value)):
            pool[at] = torch.where(real[:, None, :, None], new.to(pool.dtype), pool[at])

    def write_all(self, position: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write the first slots, [batch, kv_heads, any, dim], as they once were.

        Args:
            position: [batch, kv_heads, slots], as they once were already.
        """
        held = position[..., : keys.shape[2]] >= 0
        at = self.places(held)
        self.key_pool[at], self.value_pool[at] = keys[held], values[held]

    def places(self, slots: Tensor) -> tuple[Tensor, ...]:
        """`where`, of marked slots only: bool [batch, kv_heads, any]."""
        at = self.where(torch.arange(slots.shape[2], device=slots.device))
        return tuple(index.expand_as(slots)[slots] for index in at)

    def settled(self, position: Tensor) -> None:
        """A token has been served, and the slots of what left are free: [batch, kv_heads, slots]."""

    # -- allocating ----------------------------------------------------------------------------------------------------

    def lay_out(self, state: Slots, kept: Mapping[str, Tensor], order: Tensor | None) -> None:
        """Place `keys` and `values` of the first slots, as far as the state's positions say that they hold a token.

        Args:
            kept: these, [batch, kv_heads, any, dim] each.
            order: which of them, [batch, kv_heads, at most state.slots]; None where they are all, and in order.
        """
        raise NotImplementedError

    def grow(self, state: Slots, held: Tensor) -> None:
        """Have places for slots that were added.

        Args:
            held: bool [batch, kv_heads, slots], which ones held a token, of those before.
        """
        raise NotImplementedError

    def make_room(self, state: Slots, tokens: int) -> None:
        """Have places for so many tokens more, of a cache that grows; there are slots for them."""

    def select_rows(self, state: Slots, rows: Tensor) -> None:
        """Make row i what row rows[i] was; all but the layout's tensors are so already."""
        keys, values = (x.index_select(0, rows.to(x.device)) for x in (self.keys(state.slots), self.values(state.slots)))
        self.lay_out(state, {"keys": keys, "values": values}, None)


class SlotAfterSlot(Layout):
    """As slots are numbered.

    Tensors:
        key_pool [batch, kv_heads, slots, key_dim], value_pool [batch, kv_heads, slots, value_dim].
    """

    DECLARED = (Declared("key_pool", slots=2), Declared("value_pool", slots=2))

    def where(self, slot: Tensor) -> tuple[Tensor, ...]:
        batch, heads = (torch.arange(count, device=slot.device) for count in self.key_pool.shape[:2])
        return batch[:, None, None], heads[:, None], slot

    def keys(self, slots: int) -> Tensor:
        """See `Layout.keys`: the pool itself."""
        return self.key_pool

    def values(self, slots: int) -> Tensor:
        """See `Layout.values`: the pool itself."""
        return self.value_pool

    def write_all(self, position: Tensor, keys: Tensor, values: Tensor) -> None:
        """See `Layout.write_all`: what is in free slots, too."""
        self.key_pool[:, :, : keys.shape[2]] = keys
        self.value_pool[:, :, : values.shape[2]] = values

    def lay_out(self, state: Slots, kept: Mapping[str, Tensor], order: Tensor | None) -> None:
        self.key_pool = in_slots("keys", self.key_pool, kept["keys"], order, state.slots)
        self.value_pool = in_slots("values", self.value_pool, kept["values"], order, state.slots)

    def grow(self, state: Slots, held: Tensor) -> None:
        self.lay_out(state, {"keys": self.key_pool, "values": self.value_pool}, None)

    def select_rows(self, state: Slots, rows: Tensor) -> None:
        self.key_pool, self.value_pool = (with_rows(pool, 0, rows) for pool in (self.key_pool, self.value_pool))
