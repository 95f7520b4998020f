"""What backends keep beside the slots of a layer, made from them: it holds until something else changes the slots.

A backend that reads a copy updates it with every token that it serves; one that does not calls `SlotState.forget_copies`. `SlotState`
says what each tensor is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.runtime.rope import Rope
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.tensors import stays_where_it_is

# -- keys over a sketch's dims, bounds of pages ------------------------------------------------------------------------


def keep(state: SlotState, tile: int) -> None:
    """Have room for what kernels keep beside the keys, where this layer selects.

    Args:
        tile: slots of a tile of `sketch_keys`.
    """
    if not state.selects or "copied" not in state.declared:
        return
    batch, heads, slots = state.position.shape
    if state.spec.sketches:
        _have(state, "sketch_keys", (batch, heads, -(-slots // tile), state.sketch.shape[-1], tile))
    if state.spec.bounds_pages and state.paged != slots:  # the size of a page is the device's to know
        pages = int(slots // float(state.settings.named(state.numbers)["page"].min())) + 1
        _have(state, "page_bounds", (batch, heads, pages, 2, state.dims[0]))
        state.paged = slots


def _have(state: SlotState, name: str, shape: tuple[int, ...]) -> None:
    """Have a tensor of that name and shape, with whatever in it if it had another."""
    if getattr(state, name).shape != shape:
        setattr(state, name, state.layout.key_pool.new_empty(shape, dtype=state.dtype))
        state.copied.zero_()
        if not state.room.grows:
            stays_where_it_is(getattr(state, name))


# -- rotated halves ----------------------------------------------------------------------------------------------------


def keep_halves(state: SlotState, rope: Rope | None) -> None:
    """Make the rotated halves from the keys, of a policy that keeps them, unless they are there; what reads them keeps them so."""
    if state.spec.rope_cached and rope is not None and state.allocated and not state.half_keys.numel():
        state.half_keys = rope.rotate_half(state.keys)
        stays_where_it_is(state.half_keys)


def keep_room_for_halves(state: SlotState) -> None:
    """Have a tensor for the rotated halves, of a policy that keeps them, with whatever in it."""
    if state.spec.rope_cached:
        state.half_keys = torch.empty_like(state.keys)


# -- how many tokens a head holds --------------------------------------------------------------------------------------


def keep_length(state: SlotState) -> Tensor:
    """How many tokens every head of a compact cache holds, counted unless the last step has left it; int32 [batch, kv_heads, 1]."""
    if not state.length.numel():
        state.length = (state.position >= 0).sum(-1, keepdim=True, dtype=torch.int32)
    return state.length


def forget_length(state: SlotState) -> None:
    """It is to be counted anew."""
    if state.spec.compact:
        state.length = state.length[..., :0]
