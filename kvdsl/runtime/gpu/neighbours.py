"""Device functions of `settle`: what is pooled along the text. Slots lie in no order, so each one's place is counted."""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import ops


@triton.jit
def pool(
    position,  # [N] int32, with all that follows: one KV head's
    kept,  # [N] int8: 1 for slots that stand apart
    x,  # [N] float32: what is pooled; gets what it comes to
    places,  # [N] float32: gets the place of every slot among those that do not stand apart
    order,  # [N] float32: gets what is pooled, place by place
    slots,
    size,
    MEAN: tl.constexpr,  # else the largest
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """At every slot the largest x, or the mean, of the slots at most size // 2 places before or behind it in the text. Those that stand
    apart are not counted, and keep their own.
    """
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
    """Put the slots that do not stand apart in the order of the text; says how many there are."""
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
    """Where the tokens of slots i stand in the text; below 0 where there is none, or it stands apart."""
    pos = tl.load(position + i, mask=i < slots, other=-1)
    return tl.where(tl.load(kept + i, mask=i < slots, other=1) == 0, pos, -1)
