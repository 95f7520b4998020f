"""Launches of a prompt: `over_slots` reduces the values of each query over the slots that it sees, `observe` folds queries into columns.

`kvdsl.runtime.gpu.observing` has the legend. Constants that depend on the policy:
    REDUCTIONS: rows of `reduced`; 0: the policy has none, and only `observe` runs.
    COUNTS: whether the policy reads the number of live slots. DRAWS: whether it draws random numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import observing, ops
from kvdsl.runtime.gpu.kernels.hooks import find_columns, fold_queries, read_numbers, reduce_queries


@triton.jit(do_not_specialize=["tokens", "slots", "layer", "first_head", "seed"])
def over_slots(
    query,  # this and the following as in `observe`
    keys,
    position,
    lse,
    columns,
    ring_rows,
    live_slots,
    numbers,
    constants,
    reduced,  # [REDUCTIONS, B, H, T] float32, output
    first_new,
    first_asked,
    behind,
    order,
    tokens,
    slots,
    scaling,
    softcap,
    window,
    seed,
    layer,
    first_head,
    query_row,
    query_head,
    query_token,
    key_row,
    key_head,
    key_slot,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SLOTS: tl.constexpr,
    QUERIES: tl.constexpr,
    PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
    COUNTS: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """Reduce the values of each prompt query over the slots that it sees; the grid is (H, B, blocks of QUERIES)."""
    head, row, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(0)
    pair = (row * heads + head).to(tl.int64)
    first, begin, end = tl.load(first_new + row), tl.load(first_asked + row), tl.load(behind + row)
    if PADDED:
        order += row.to(tl.int64) * tokens
    query += row.to(tl.int64) * query_row + (head * G).to(tl.int64) * query_head
    keys += row.to(tl.int64) * key_row + head.to(tl.int64) * key_head
    position += pair * slots
    lse += pair * G * tokens
    if COUNTS:
        live_slots += pair * tokens
    reduced += pair * tokens
    reduced_stride = tl.num_programs(1).to(tl.int64) * heads * tokens
    column_stride = tl.num_programs(1).to(tl.int64) * heads * slots
    own_columns = find_columns(columns, ring_rows, column_stride, pair * slots)
    own_numbers = read_numbers(numbers, constants, row, pair, head, heads, D)
    random_key = ops.random_key(seed, layer, first_head + head) if DRAWS else 0

    low = begin + block * QUERIES
    if low >= end:
        return
    high = tl.minimum(low + QUERIES, end) - 1
    now = low + tl.arange(0, QUERIES)
    asked = now <= high
    t = observing.place(order, now, first, asked, PADDED)
    start, stop = observing.reach(order, low, high, first, slots - tokens, window, PADDED)
    reduce_queries(
        own_numbers, own_columns, column_stride, query, keys, position, lse, live_slots, reduced, reduced_stride, start, stop,
        now[None, :], asked, t, tokens, scaling, softcap, window, random_key, query_head, query_token, key_slot,
        G, D, D_PAD, SLOTS, QUERIES, CAPPED, DOT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "slots", "layer", "first_head", "seed"])
def observe(
    query,  # [B, H * G, T, D]
    keys,  # [B, H, N, D]: those of the T new tokens come last
    position,  # [B, H, N] int32: negative for a free slot
    lse,  # [B, H, G, T] float32: log-sum-exp of each query's logits
    columns,  # [C, B, H, N] float32: state columns
    ring_rows,  # [rings] int32: first row of each ring in `columns`
    live_slots,  # [B, H, T] int32: with COUNTS, number of live slots at each query
    numbers,  # [B, numbers] or [B, H, numbers] float64
    constants,  # [tensors, H, D] float32: tensors of the policy's files
    reduced,  # [REDUCTIONS, B, H, T] float32: each query's reductions over the slots that it sees
    first_new,  # [B] int32: position of the row's first new token
    first_asked,  # [B] int32: position of the first query that counts
    behind,  # [B] int32: one past the position of the last query
    order,  # [B, T] int32: with PADDED, index of each new token among the queries
    tokens,
    slots,
    scaling,
    softcap,  # read only with CAPPED
    window,  # tokens that a query sees; 2**30: all
    seed,
    layer,
    first_head,  # index in the layer of the first KV head on this device
    query_row,  # strides, in elements
    query_head,
    query_token,
    key_row,
    key_head,
    key_slot,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,  # D rounded up to a power of two
    SLOTS: tl.constexpr,
    QUERIES: tl.constexpr,
    PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,  # dtype of matrix products
    COUNTS: tl.constexpr,
    DRAWS: tl.constexpr,
    REDUCTIONS: tl.constexpr,
):
    """Fold the queries of a prompt into the columns; the grid is (H, B, blocks of SLOTS)."""
    head, row, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(0)
    pair = (row * heads + head).to(tl.int64)
    first, begin, end = tl.load(first_new + row), tl.load(first_asked + row), tl.load(behind + row)
    if PADDED:
        order += row.to(tl.int64) * tokens
    query += row.to(tl.int64) * query_row + (head * G).to(tl.int64) * query_head
    keys += row.to(tl.int64) * key_row + head.to(tl.int64) * key_head
    position += pair * slots
    lse += pair * G * tokens
    if COUNTS:
        live_slots += pair * tokens
    if REDUCTIONS > 0:
        reduced += pair * tokens
    reduced_stride = tl.num_programs(1).to(tl.int64) * heads * tokens
    column_stride = tl.num_programs(1).to(tl.int64) * heads * slots
    own_columns = find_columns(columns, ring_rows, column_stride, pair * slots)
    own_numbers = read_numbers(numbers, constants, row, pair, head, heads, D)
    random_key = ops.random_key(seed, layer, first_head + head) if DRAWS else 0

    i = block * SLOTS + tl.arange(0, SLOTS)[:, None]
    inside = i < slots
    pos = tl.load(position + i, mask=inside, other=-1)
    since, until = observing.interval(pos, begin, end, window)
    d = tl.arange(0, D_PAD)[None, :]
    k = tl.load(keys + i.to(tl.int64) * key_slot + d, mask=inside & (d < D), other=0.0).to(DOT)
    fold_queries(
        own_numbers, own_columns, column_stride, query, lse, live_slots, reduced, reduced_stride, order, i, inside, pos, since,
        until, k, first, end, tokens, scaling, softcap, window, random_key, query_head, query_token,
        G, D, SLOTS, QUERIES, PADDED, CAPPED,
    )  # fmt: skip
