"""Launches that select what a query attends to, before `kvdsl.runtime.gpu.attend`; see `kvdsl.runtime.gpu.select`.

`look`: one program scores the units, slots or pages, of one of S splits of a KV head, and counts the scores in each of 256 levels.
`vote`: one program replaces a split's scores by a reduction over the KV heads of a row.
`choose`: PIECES programs share a KV head's units and collect candidates; the last one to finish selects the highest.

Legend, in addition to the one of `kvdsl.runtime.gpu.kernels.settle`:
    BY: the score. `dot` and `sketch_dot` of slots, over the dims of the sketch; `page_bound` and `page_mean` of pages.
    GROUP: the reduction over the query heads of a KV head. VOTE: over the KV heads; empty without `vote`.
    dims: the sketch's dims, padded with -1. With pages nothing is evicted, so the token at position p is in slot p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import evicting, layout, ops, packed, select
from kvdsl.runtime.gpu.kernels.hooks import ends, find_sketch, page_size, read_numbers, selected


@triton.jit
def look(
    which,  # [B] int32: with SOME, each row's index in the cache
    query,  # [B, H * G, D]
    new_key,  # [B, H, D]
    keys,  # [R, H, N, D]; with SIZE > 0 [H, blocks, SIZE, D]
    first_rows,  # [R, H] int64: index of the KV head's first row in `keys`
    table,  # [R, blocks of a row] int64: with SIZE > 0, index in the pool of each block of slots
    page_bounds,  # [R, H, P, 2, D]: by page_bound, minimum and maximum of each page's keys, per dim
    position,  # [R, H, N] int32
    sketch,  # [R, H, W] int32: dims in ascending order, padded with -1
    sketch_keys,  # [R, H, N, W]: keys restricted to these dims
    prompt,  # [R] int32: prompt length in tokens
    grades,  # [B, H, N + 16] int32, output: scores of the units, and of the new token, in an order-preserving encoding
    levels,  # [B, H, S, LEVELS] int32, output: number of the split's units per level
    candidates,  # [B, H, N + 16] int32, output by page_mean: bits of products with the tokens' keys; `choose` overwrites them
    first_free,  # [B, H, S] int32, output: first free slot of the split; N or more: none
    held,  # [B, H, S] int32, output: tokens in the split
    seen,  # [R] int32: position of the new token
    real,  # [B] bool: False for padding
    numbers,  # [R, numbers] or [R, H, numbers] float64
    copied,  # [R] int32: whether the sketched keys or the page bounds are valid; otherwise they are rebuilt from the keys
    slots,
    pages,
    per_split,  # slots per split
    width,  # W
    window,  # tokens that a query sees; 2**30: all
    SOME: tl.constexpr,  # whether the step covers only some rows of the cache
    SIZE: tl.constexpr,  # slots per block of the pool; 0 without blocks
    K_AS: tl.constexpr,  # storage type of keys, see `kvdsl.runtime.gpu.packed`
    G: tl.constexpr,
    G_PAD: tl.constexpr,  # sizes rounded up to powers of two
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    W_PAD: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK: tl.constexpr,
    BY: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Score one split's units; the grid is (S, H, B)."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, heads = tl.num_programs(0), tl.num_programs(1)
    pair = (row * heads + head).to(tl.int64)
    if tl.load(real + row) == 0:
        return
    own_row = ops.row_of(which, row, SOME)
    own_pair = (own_row * heads + head).to(tl.int64)
    now = tl.load(seen + own_row)
    query += pair * G * D
    new_key += pair * D
    keys += layout.first_row(first_rows, own_pair, slots, SIZE > 0) * packed.row(D, K_AS)
    if SIZE > 0:
        table = layout.table_of(table, own_row, slots, SIZE)
    grades += pair * (slots + 16)
    mine = pair * splits + split
    if BY == "page_mean" or BY == "page_bound":
        size = page_size(numbers, own_row, own_pair)
        oldest = tl.maximum(now - window + 1, 0)
        pages_each = tl.cdiv(now // size + 1, splits)
        first = split * pages_each
        end = tl.minimum(first + pages_each, now // size + 1)
        if BY == "page_mean":
            products = candidates + pair * (slots + 16)
            select.look_at_means(
                query, new_key, keys, products, grades, first, end, size, now, oldest,
                G, G_PAD, D, W_PAD, GROUP, DOT, BLOCK, table, SIZE, K_AS,
            )  # fmt: skip
        else:
            own_bounds, anew = page_bounds + own_pair * pages * 2 * D, tl.load(copied + own_row) == 0
            select.look_at_pages(
                query, new_key, keys, own_bounds, grades, first, end, size, now, oldest, anew,
                G, D, D_PAD, GROUP, BLOCK, table, SIZE, K_AS,
            )  # fmt: skip
        tl.store(first_free + mine, tl.where(split == 0, now, ops.INT_MAX))
        tl.store(held + mine, tl.where(split == 0, now, 0))
    else:
        position += own_pair * slots
        g, j = tl.arange(0, G_PAD), tl.arange(0, W_PAD)
        first = split * per_split
        end = tl.minimum(first + per_split, slots)
        if BY == "sketch_dot":
            sketch_keys += own_pair * slots * width
            dims, due = find_sketch(query, sketch, prompt, numbers, own_pair, own_row, now, width, G, G_PAD, D, D_PAD, W_PAD)
            tl.store(sketch + own_pair * width + j, dims, mask=j < tl.where((split == 0) & due, width, 0))
            if (tl.load(copied + own_row) == 0) | due:
                select.gather_keys(
                    keys, sketch_keys, position, first, end, dims, j, width, D, D_PAD, BLOCK, table, SIZE, K_AS
                )
        else:
            dims = tl.where(j < D, j, -1)
        q = tl.load(query + g[:, None] * D + dims[None, :], mask=(g[:, None] < G) & (dims[None, :] >= 0), other=0.0)
        gap = tl.full([BLOCK], ops.INT_MAX, tl.int32)
        live = tl.zeros([BLOCK], tl.int32)
        for start in range(first, end, BLOCK):
            i = start + tl.arange(0, BLOCK)
            inside = i < end
            pos = tl.load(position + i, mask=inside, other=-1)
            gap = tl.where(inside & (pos < 0), tl.minimum(gap, i), gap)
            live += (pos >= 0).to(tl.int32)
            if BY == "sketch_dot":
                k = select.sketched_keys(sketch_keys, i.to(tl.int64), inside & (i < now), pos >= 0, dims, j, width)
            else:
                k = packed.over(keys, layout.rows(i, pos >= 0, table, SIZE), pos >= 0, dims, D, W_PAD, K_AS)
            by = select.product(q, k, g, G, GROUP, DOT)
            select.grade_slots(grades, i, inside, pos, now, window, by)
        if split == 0:
            key = packed.over_new(new_key, dims, D, D_PAD if BY == "sketch_dot" else W_PAD, K_AS)
            select.grade_new(grades, slots, q, key, g, G, GROUP)
        tl.store(first_free + mine, tl.min(gap, 0))
        tl.store(held + mine, tl.sum(live, 0))
    select.count_levels(levels + mine * select.LEVELS, grades, first, end)


@triton.jit
def vote(
    which,  # [B] int32: with SOME, each row's index in the cache
    grades,  # [B, H, N + 16] int32, in place: each KV head's scores, then their reduction over the KV heads
    levels,  # [B, H, S, LEVELS] int32, output: number of the split's units per level
    seen,  # [R] int32: position of the new token
    real,  # [B] bool: False for padding
    numbers,  # [R, numbers] float64
    slots,
    heads,
    per_split,  # slots per split
    SOME: tl.constexpr,  # whether the step covers only some rows of the cache
    BLOCK: tl.constexpr,
    BY: tl.constexpr,
    VOTE: tl.constexpr,
):
    """Reduce the scores of one split's units over the KV heads of a row; the grid is (S, B)."""
    split, row = tl.program_id(0), tl.program_id(1)
    splits = tl.num_programs(0)
    if tl.load(real + row) == 0:
        return
    grades += row.to(tl.int64) * heads * (slots + 16)
    if BY == "page_mean" or BY == "page_bound":
        own_row = ops.row_of(which, row, SOME)
        units = tl.load(seen + own_row) // page_size(numbers, own_row, own_row * heads) + 1
        each = tl.cdiv(units, splits)
    else:
        units, each = slots, per_split
        if split == 0:  # the new token's scores lie behind those of all slots
            select.vote(grades, slots, slots + 1, slots, heads, VOTE, BLOCK)
    first = split * each
    end = tl.minimum(first + each, units)
    select.vote(grades, first, end, slots, heads, VOTE, BLOCK)
    for head in range(heads):
        mine = (row.to(tl.int64) * heads + head) * splits + split
        select.count_levels(levels + mine * select.LEVELS, grades + head * (slots + 16), first, end)


@triton.jit
def choose(
    which,  # [B] int32: with SOME, each row's index in the cache
    position,  # [R, H, N] int32
    grades,  # [B, H, N + 16] int32: scores
    levels,  # [B, H, S, LEVELS] int32: number of scores per level
    candidates,  # [B, H, N + 16] int32, output: candidates of each program's share, in order
    listed,  # [B, H, PIECES] int32, output: number of these candidates
    arrived,  # [B, H] int32: number of the KV head's programs that have finished; 0 before and after the launch
    chosen,  # [B, H, N] int32, output: selected slots, in order
    found,  # [B, H] int32, output: number of selected slots
    joins,  # [B, H] int32, output: whether the new token is selected
    taken,  # [B, H, N] int8, output with OBSERVED: 1 for selected slots
    held,  # [B, H, S] int32: tokens in the split
    seen,  # [R] int32: position of the new token
    real,  # [B] bool: False for padding
    numbers,  # [R, numbers] or [R, H, numbers] float64
    constants,  # [tensors, H, D] float32: tensors of the policy's files
    slots,
    splits,
    window,
    SOME: tl.constexpr,  # whether the step covers only some rows of the cache
    D: tl.constexpr,
    S_PAD: tl.constexpr,
    PIECES_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    BY: tl.constexpr,
    PROTECTS: tl.constexpr,  # whether first or last tokens are always selected
    OBSERVED: tl.constexpr,
):
    """Select the units with the highest scores; the grid is (PIECES, H, B)."""
    PAGES: tl.constexpr = BY == "page_mean" or BY == "page_bound"
    piece, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pieces, heads = tl.num_programs(0), tl.num_programs(1)
    pair = (row * heads + head).to(tl.int64)
    found += pair
    joins += pair
    if tl.load(real + row) == 0:
        tl.store(found, 0)
        tl.store(joins, 0)
        return
    own_row = ops.row_of(which, row, SOME)
    own_pair = (own_row * heads + head).to(tl.int64)
    now = tl.load(seen + own_row)
    own_numbers = read_numbers(numbers, constants, own_row, own_pair, head, heads, D)
    wanted = selected(own_numbers)
    position += own_pair * slots
    grades += pair * (slots + 16)
    candidates += pair * (slots + 16)
    chosen += pair * slots
    taken += pair * slots
    first, last = -1, ops.INT_MAX
    if PROTECTS:
        live = select.tokens_with_new(held, pair, splits, S_PAD)
        n_first, n_last = ends(own_numbers, now, live)
        first = evicting.first_protected(position, slots, now, live, n_first, BLOCK)
        last = evicting.last_protected(position, slots, now, live, n_last, BLOCK)
    if PAGES:
        size, oldest = page_size(numbers, own_row, own_pair), tl.maximum(now - window + 1, 0)
        units, wanted = now // size + 1, wanted // size
    else:
        size, oldest = 1, 0
        units = tl.minimum(slots, now)  # a token's slot is never above its position

    # Collect the candidates of this program's share.
    lowest = select.lowest_level(levels, pair, splits, wanted, S_PAD)
    per_piece, begin, end = select.share(units, piece, pieces, BLOCK)
    count = select.narrow(
        position, grades, candidates, begin, end, lowest, slots, units, size, now, oldest, first, last, PAGES, BLOCK
    )
    if OBSERVED:
        select.clear(taken, slots, piece, pieces, BLOCK)
    listed += pair * pieces
    tl.store(listed + piece, count)

    # The last program to finish selects among the candidates.
    if ops.last_to_arrive(arrived, pair, pieces):
        total, certain = select.gather(grades, candidates, listed, pieces, per_piece, PIECES_PAD, BLOCK)
        if not PAGES:
            total, certain = select.add_new(grades, candidates, total, certain, slots, now, first, last)
        select.pick(
            position, grades, candidates, chosen, found, joins, taken, total, certain, slots, units, size, now, oldest, wanted,
            OBSERVED, PAGES, BLOCK,
        )  # fmt: skip
