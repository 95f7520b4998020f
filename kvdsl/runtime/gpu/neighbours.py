"""Device functions of `settle` that pool values along the text. Slots are unordered, so the kernel counts each one's place."""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import ops


@triton.jit
def pool(
    position,  # [N] int32; this and the following belong to one KV head
    kept,  # [N] int8: 1 for slots that pooling excludes
    x,  # [N] float32: the values; receives the pooled ones
    places,  # [N] float32: receives each slot's place among the slots that take part
    order,  # [N] float32: receives the values in the order of places
    slots,
    size,
    MEAN: tl.constexpr,  # otherwise the maximum
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replace x by its maximum or mean over the slots at most size // 2 places away in the text. Excluded slots keep their value."""
    members = _count_places(position, kept, x, places, order, slots, TILE)
    tl.debug_barrier()
    radius = tl.minimum(size // 2, members)
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        apart = (tl.load(position + i, mask=i < slots, other=-1) < 0) | (tl.load(kept + i, mask=i < slots, other=1) != 0)
        place = tl.load(places + i, mask=(i < slots) & ~apart, other=0.0).to(tl.int32)
        pooled = tl.zeros([BLOCK], tl.float32) if MEAN else tl.full([BLOCK], float("-inf"), tl.float32)
        for n in range(-radius, radius + 1):
            there = (place + n >= 0) & (place + n < members) & ~apart
            near = tl.load(order + place + n, mask=there, other=0.0 if MEAN else float("-inf"))
            pooled = pooled + near if MEAN else ops.maximum(pooled, near)
        if MEAN:
            near = tl.minimum(place + radius + 1, members) - tl.maximum(place - radius, 0)
            pooled = tl.div_rn(pooled, tl.maximum(near, 1).to(tl.float32))
        tl.store(x + i, pooled, mask=(i < slots) & ~apart)


@triton.jit
def _count_places(position, kept, x, places, order, slots, TILE: tl.constexpr):
    """Write the places and the ordered values of the slots that take part. Return their number."""
    members = 0
    for start in range(0, slots, TILE):
        i = start + tl.arange(0, TILE)
        pos = _position(position, kept, i, slots)
        before = tl.zeros([TILE, TILE], tl.int32)
        for opposite in range(0, slots, TILE):
            other = _position(position, kept, opposite + tl.arange(0, TILE), slots)
            before += ((other >= 0)[None, :] & (other[None, :] < pos[:, None])).to(tl.int32)
        place = tl.sum(before, 1)
        tl.store(places + i, place.to(tl.float32), mask=pos >= 0)
        tl.store(order + place, tl.load(x + i, mask=pos >= 0, other=0.0), mask=pos >= 0)
        members += tl.sum((pos >= 0).to(tl.int32), 0)
    return members


@triton.jit
def _position(position, kept, i, slots):
    """Return the text positions of slots i; negative where a slot is free or excluded."""
    pos = tl.load(position + i, mask=i < slots, other=-1)
    return tl.where(tl.load(kept + i, mask=i < slots, other=1) == 0, pos, -1)
