"""Addresses of a KV head's slots: contiguous, or in blocks of a pool that all rows of the batch share.

Each row's table maps its blocks to the pool (see `kvdsl.runtime.state.blocks`). The kernels `take` and `give_back` update the tables.

Legend:
    B, H, N: rows, KV heads, slots per KV head. S: splits of `attend`. SIZE: slots per block; 0 without blocks.
    T: blocks per row, N / SIZE rounded up. P: blocks of the pool.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import ops, packed


@triton.jit
def table_of(table, row, slots, SIZE: tl.constexpr):
    """Return one row's table, [T], of the tables, [B, T]. Call it only if there are blocks: Triton 3.3 cannot return None."""
    return table + row.to(tl.int64) * tl.cdiv(slots, SIZE)


@triton.jit
def first_row(first_rows, pair, slots, SCATTERED: tl.constexpr):
    """Return the first row of a KV head's keys and values, int64. If SCATTERED, it comes from `first_rows`."""
    at = pair * slots
    if SCATTERED:
        at = tl.load(first_rows + pair)
    return at


@triton.jit
def rows(slot, held, table, SIZE: tl.constexpr):
    """Return the offsets of slots from their head's first row, in rows, int64; undefined where `held` is false."""
    at = slot.to(tl.int64)
    if SIZE > 0:
        slot = slot.to(tl.int32)
        at = tl.load(table + slot // SIZE, mask=held, other=0) * SIZE + slot % SIZE
    return at


@triton.jit
def vectors(of, first_row, slot, held, table, SIZE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, KV: tl.constexpr):
    """Return the slots' keys or values, float32 [slots, D_PAD]; zeros where `held` is false. `first_row`: the head's."""
    at = first_row + rows(slot, held, table, SIZE)
    return packed.plain(packed.load(of, at, held, D, D_PAD, KV), D, D_PAD, KV).to(tl.float32)


# -- the tables --------------------------------------------------------------------------------------------------------


@triton.jit
def take(
    table,  # [B, T] int64: blocks of the pool; -1: none
    first_free,  # [B, H, S] int32: the split's first free slot
    real,  # [B] bool: false for padding, which needs no slot
    wanted,  # [B, T] int32, scratch: 1 for blocks that a row lacks
    owned,  # [P] int32, scratch: 1 for blocks that a row owns
    free,  # [P] int32, scratch: the blocks that no row owns
    batch,
    heads,
    slots,
    splits,
    blocks,  # P
    SIZE: tl.constexpr,
    S_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,  # KV heads per iteration
):
    """Allocate the blocks that the new tokens need, the lowest free ones first, as `Blocks._take` does. The grid is (1,).

    In most steps no row lacks a block, and the kernel returns early.
    """
    heads_of_all, entries = batch * heads, batch * tl.cdiv(slots, SIZE)
    short = tl.zeros([PAIRS], tl.int32)
    for start in range(0, heads_of_all, PAIRS):
        _, lacks = _lacking(table, first_free, real, start, heads_of_all, heads, slots, splits, SIZE, S_PAD, PAIRS)
        short = short | lacks.to(tl.int32)
    if tl.max(short, 0) == 0:
        return
    _clear(wanted, entries, BLOCK)
    _clear(owned, blocks, BLOCK)
    tl.debug_barrier()
    for start in range(0, heads_of_all, PAIRS):
        entry, lacks = _lacking(table, first_free, real, start, heads_of_all, heads, slots, splits, SIZE, S_PAD, PAIRS)
        tl.store(wanted + entry, 1, mask=lacks)
    for start in range(0, entries, BLOCK):
        i = start + tl.arange(0, BLOCK)
        block = tl.load(table + i, mask=i < entries, other=-1)
        tl.store(owned + block, 1, mask=block >= 0)
    tl.debug_barrier()
    count = 0
    for start in range(0, blocks, BLOCK):
        i = start + tl.arange(0, BLOCK)
        is_free = tl.load(owned + i, mask=i < blocks, other=1) == 0
        tl.store(free + count + tl.cumsum(is_free.to(tl.int32), 0) - 1, i, mask=is_free)
        count += tl.sum(is_free.to(tl.int32), 0)
    tl.debug_barrier()
    taken = 0
    for start in range(0, entries, BLOCK):
        i = start + tl.arange(0, BLOCK)
        gets = tl.load(wanted + i, mask=i < entries, other=0) != 0
        nth = taken + tl.cumsum(gets.to(tl.int32), 0) - 1
        # A free block always exists unless foreign code wrote to the cache's tensors. The mask keeps reads inside `free` even then.
        block = tl.load(free + nth, mask=gets & (nth < count), other=0)
        tl.store(table + i, block.to(tl.int64), mask=gets)
        taken += tl.sum(gets.to(tl.int32), 0)


@triton.jit
def _lacking(
    table,
    first_free,
    real,
    start,
    heads_of_all,
    heads,
    slots,
    splits,
    SIZE: tl.constexpr,
    S_PAD: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Return the table entries of the first free slots of PAIRS heads, from `start` on, and whether each lacks a block; [PAIRS] each."""
    pair, s = start + tl.arange(0, PAIRS), tl.arange(0, S_PAD)
    inside = pair < heads_of_all
    found = tl.load(
        first_free + pair[:, None] * splits + s[None, :], mask=inside[:, None] & (s < splits)[None, :], other=ops.INT_MAX
    )
    slot = tl.minimum(tl.min(found, 1), slots - 1)
    row = pair // heads
    entry = row.to(tl.int64) * tl.cdiv(slots, SIZE) + slot // SIZE
    comes = inside & (tl.load(real + row, mask=inside, other=0) != 0)
    return entry, comes & (tl.load(table + entry, mask=comes, other=0) < 0)


@triton.jit
def _clear(x, count, BLOCK: tl.constexpr):
    """Set the first `count` elements to 0."""
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(x + i, 0, mask=i < count)


@triton.jit
def give_back(
    table,  # [B, T] int64
    position,  # [B, H, N] int32; negative: free
    heads,
    slots,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Free a row's block if no head of the row holds a token in it. The grid is (T, B)."""
    number, row = tl.program_id(0), tl.program_id(1)
    entry = table_of(table, row, slots, SIZE) + number
    if tl.load(entry) < 0:
        return
    position += row.to(tl.int64) * heads * slots
    first = number * SIZE
    end = tl.minimum(first + SIZE, slots)
    held = tl.zeros([BLOCK], tl.int32)
    for head in range(heads):
        for start in range(first, end, BLOCK):
            i = start + tl.arange(0, BLOCK)
            held += (tl.load(position + head * slots + i, mask=i < end, other=-1) >= 0).to(tl.int32)
    if tl.sum(held, 0) == 0:
        tl.store(entry, tl.full([], -1, tl.int64))
