"""Tensors derived from a layer's slots, cached for kernels. `SlotState` describes each.

A backend that reads such a tensor updates it with every token. A backend that does not calls `SlotState.forget_copies`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.runtime.rope import Rope
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.tensors import stays_where_it_is

# -- sketched keys, page bounds ----------------------------------------------------------------------------------------


def keep(state: SlotState, tile: int) -> None:
    """Allocate `sketch_keys` and `page_bounds` if this layer selects by them.

    Args:
        tile: slots per tile of `sketch_keys`.
    """
    if not state.selects or "copied" not in state.declared:
        return
    batch, heads, slots = state.position.shape
    if state.spec.sketches:
        _have(state, "sketch_keys", (batch, heads, -(-slots // tile), state.sketch.shape[-1], tile))
    if state.spec.bounds_pages and state.paged != slots:  # reading the page size waits for the device
        pages = int(slots // float(state.settings.named(state.numbers)["page"].min())) + 1
        _have(state, "page_bounds", (batch, heads, pages, 2, state.dims[0]))
        state.paged = slots


def _have(state: SlotState, name: str, shape: tuple[int, ...]) -> None:
    """Allocate a tensor of this name and shape, uninitialized, unless it exists."""
    if getattr(state, name).shape != shape:
        setattr(state, name, state.layout.key_pool.new_empty(shape, dtype=state.dtype))
        state.copied.zero_()
        if not state.room.grows:
            stays_where_it_is(getattr(state, name))


# -- rotated halves ----------------------------------------------------------------------------------------------------


def keep_halves(state: SlotState, rope: Rope | None) -> None:
    """Compute the rotated halves from the keys if the policy caches them and they are missing. Their readers keep them up to date."""
    if state.spec.rope_cached and rope is not None and state.allocated and not state.half_keys.numel():
        state.half_keys = rope.rotate_half(state.keys)
        stays_where_it_is(state.half_keys)


def forget_halves(state: SlotState) -> None:
    """Drop the rotated halves, for a backend that does not keep them up to date."""
    if state.spec.rope_cached and state.half_keys.numel():
        state.half_keys = state.half_keys.new_empty(*state.half_keys.shape[:2], 0, 0)


# -- lengths of heads --------------------------------------------------------------------------------------------------


def keep_length(state: SlotState) -> Tensor:
    """Return the tokens per head of a cache with compact positions, int32 [batch, kv_heads, 1]; count them only if they are not cached."""
    if not state.length.numel():
        state.length = (state.position >= 0).sum(-1, keepdim=True, dtype=torch.int32)
    return state.length


def forget_length(state: SlotState) -> None:
    """Drop the cached lengths."""
    if state.spec.compact:
        state.length = state.length[..., :0]
