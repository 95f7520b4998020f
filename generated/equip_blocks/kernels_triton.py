"""EQUIPBlocks on GPUs: the second launch of a decode step. The first is `kvdsl.runtime.gpu.attend`.

Made by kvdsl 0.1.0 from equip_blocks.kv (3b7000443c68). Do not edit: `kvdsl compile` rewrites it.

EQUIP_H2O as its paper has it in memory. Edition 1 states it: the two last lines are the defaults of the options of its caches.

"EQUIP: EQUivariant preserving In-Place updates for Efficient Token Pruning", section 4.3 and figure 18: rotated halves
are kept, and a new token is written at block and offset.

Evicts the lowest first: sum(attn)
keep last recent

Legend:
    One program per KV head and row combines the splits of `attend`.
    PIECES others share the head's slots.
    The one with the first free slot stores the new token, each updates statistics for its slots, and the last one to finish evicts.
    B, H, N: rows, KV heads, slots per KV head. G: query heads per KV head. D, E: dims of a key, of a value. S: splits of `attend`.
    R: rows of the cache; equals B unless the step covers some of them. own_row, own_pair: indices into these rows.
    now: position of the new token in the text. pos: positions of the tokens in slots i, negative for a free slot.
    SIZE: slots per block, for the block layout; `kvdsl.runtime.gpu.layout` maps slots to blocks and has allocated the new token's.
    rank: the position that attention uses for a token's rotation; see `kvdsl.runtime.gpu.rotate`.
    sum_attn: sum of attn
"""

import triton
import triton.language as tl

from kvdsl.runtime.gpu import evicting, layout, observing, ops, packed, rotate

SCORES = 1  # rows of `work` per KV head
SPREADS = True  # whether several programs of `settle` share a KV head's slots


@triton.jit(do_not_specialize=["layer", "first_head", "seed"])
def settle(
    which,  # [B] int32: with SOME, each row's index in the cache
    out,  # [B, H * G, E], output: attention output
    part,  # [B, H, S, G, E] float32: partial outputs of the splits of `attend`
    top,  # [B, H, S, G] float32: maximum logit of each split
    total,  # [B, H, S, G] float32: softmax denominator of each split
    sinks,  # [H * G]: with SINKS, sink logits that join the softmax
    first_free,  # [B, H, S] int32: first free slot of the split
    held,  # [B, H, S] int32: tokens in the split
    logits,  # [B, H, G, N] float32: attention logits before softmax
    new_logits,  # [B, H, G] float32: logits of the new token
    new_key,  # [B, H, D]
    new_value,  # [B, H, E]
    keys,  # [R, H, N, D]; with SIZE > 0 [H, blocks, SIZE, D]
    values,  # [R, H, N, E], in the same layout
    first_rows,  # [R, H] int64: index of the KV head's first row in `keys` and `values`
    table,  # [R, blocks of a row] int64: with SIZE > 0, index in the pool of each block of slots
    position,  # [R, H, N] int32
    rank,  # [R, H, N] int32: number of earlier live tokens, -1 for a free slot
    length,  # [R, H] int32, output: tokens of the KV head
    gaps,  # [B, H, N] int32, output: number of slots freed up to each rank
    half_keys,  # [R, H, N, 2 * PAIRS]: with HALVES, rotated halves of the keys
    columns,  # [1, R, H, N] float32: state columns
    cache_rows,  # R
    work,  # [B, H, SCORES, N] float32, output: slot scores
    kept,  # [B, H, N] int8, output: protection class per slot
    arrived,  # [B, H] int32: number of the KV head's programs that have finished; 0 before and after the launch
    lowest_found,  # [B, H, PIECES] int64, output: sort key of each program's first victim
    victims,  # [B, H, PIECES] int32, output: slot of that victim
    at_ends,  # [B, H, PIECES] int32, output: number of the program's tokens protected as first or last ones
    newest,  # [B] int32: position of the new token
    seen,  # [R] int32, output: position of the next token
    real,  # [B] bool: False for padding, whose output is zero
    numbers,  # [R, 3] float64
    slots,
    splits,
    per_piece,  # slots per program
    window,  # tokens that a query sees; 2**30: all
    SOME: tl.constexpr,  # whether the step covers only some rows of the cache
    SIZE: tl.constexpr,  # slots per block of the pool; 0 without blocks
    KV: tl.constexpr,  # the cache's `kv_dtype`
    G: tl.constexpr,
    G_PAD: tl.constexpr,  # sizes rounded up to powers of two
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    PIECES_PAD: tl.constexpr,
    HALVES: tl.constexpr,
    PAIRS: tl.constexpr,  # number of rotated pairs of dims, the first at OFFSET
    P_PAD: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,  # whether a pair is (2j, 2j + 1), not (j, j + PAIRS)
    SINKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combine splits, place the token, update statistics, rank slots; the grid is (PIECES + 1, H, B)."""
    piece, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pieces, heads = tl.num_programs(0) - 1, tl.num_programs(1)
    pair = (row * heads + head).to(tl.int64)
    if piece == pieces:  # combines the splits
        if tl.load(real + row) == 0:
            ops.nothing(out, pair, G, G_PAD, E, E_PAD)
        else:
            ops.combine(out, part, top, total, sinks, pair, head, splits, G, G_PAD, E, E_PAD, S_PAD, SINKS, KV)
        return
    if tl.load(real + row) == 0:
        return
    own_row = ops.row_of(which, row, SOME)
    own_pair = (own_row * heads + head).to(tl.int64)
    now = tl.load(newest + row)
    if (piece == 0) & (head == 0):
        tl.store(seen + own_row, now + 1)
    position += own_pair * slots
    logits += pair * G * slots
    rank += own_pair * slots
    gaps += pair * slots
    work += pair * slots
    kept += pair * slots
    column_stride = heads.to(tl.int64) * slots * cache_rows
    sum_attn_at = columns + own_pair * slots
    number_recent = tl.load(numbers + own_row * 3)
    number_capacity = tl.load(numbers + own_row * 3 + 1)
    slot, live = ops.free_slot(first_free, held, pair, slots, splits, S_PAD)
    live += 1
    leaving = evicting.overflow(live, ops.count(number_capacity), 1, 0, 0)
    base, above = ops.log_sum_exp(top, total, sinks, pair, head, splits, G, G_PAD, S_PAD, SINKS)
    begin = piece * per_piece
    end = tl.minimum(begin + per_piece, slots)

    # The program with the first free slot stores the new token.
    if (slot >= begin) & (slot < end):
        d, e = tl.arange(0, D_PAD), tl.arange(0, E_PAD)
        key = tl.load(new_key + pair * D + d, mask=d < D, other=0.0)
        value = tl.load(new_value + pair * E + e, mask=e < E, other=0.0)
        at = layout.first_row(first_rows, own_pair, slots, SIZE > 0)
        at += layout.rows(slot, True, layout.table_of(table, own_row, slots, SIZE), SIZE)
        key = packed.place(keys, at, key, D, D_PAD, KV)
        value = packed.place(values, at, value, E, E_PAD, KV)
        tl.store(position + slot, now)
        tl.store(rank + slot, live - 1)
        tl.store(length + own_pair, live - leaving)
        if HALVES:
            rotate.place_half(half_keys + (own_pair * slots + slot) * (2 * PAIRS), new_key + pair * D, PAIRS, P_PAD, OFFSET, INTERLEAVED)
        ops.place_logits(logits, new_logits + pair * G, slot, slots, G, G_PAD)
        tl.store(sum_attn_at + slot, 0.0)
    tl.debug_barrier()

    # Update the statistics of the slots that the query sees.
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < slots
        pos = tl.load(position + i, mask=inside, other=-1)
        visible = (pos >= 0) & (now - pos < window)
        attn = ops.attn(logits, base, above, i, slots, G, G_PAD, "mean")
        sum_attn = tl.load(sum_attn_at + i, mask=inside, other=0.0)
        tl.store(sum_attn_at + i, sum_attn + attn, mask=visible)
    tl.debug_barrier()

    # Rank the slots; the last program to finish evicts.
    if leaving == 0:
        return
    first, last = evicting.ends(now, live, 0, ops.count(number_recent))
    lowest, where = tl.full([BLOCK], ops.ABOVE_ALL, tl.int64), tl.full([BLOCK], -1, tl.int32)
    certain = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < slots
        pos = tl.load(position + i, mask=inside, other=-1)
        sum_attn = tl.load(sum_attn_at + i, mask=inside, other=0.0)
        score = sum_attn
        keep = pos >= last
        tl.store(work + i, score, mask=inside)
        tl.store(kept + i, keep, mask=inside)
        lowest, where, certain = evicting.lower(lowest, where, certain, i, pos, score, keep, first, last)
    if evicting.arrive(arrived, lowest_found, victims, at_ends, pair, piece, pieces, lowest, where, certain):
        victim, found = evicting.found_by_all(lowest_found, victims, at_ends, pair, pieces, PIECES_PAD)
        victim = evicting.unless_some_left(position, kept, victim, found, slots, now, live, 0, ops.count(number_recent), 1, BLOCK)
        gone = evicting.evict(position, work, kept, slots, leaving, victim, (), 0, BLOCK)
        tl.debug_barrier()
        evicting.close_gaps(position, rank, gaps, slots, gone, BLOCK)


@triton.jit(do_not_specialize=["tokens", "slots"])
def observe(
    query,  # [B, H * G, T, D]
    keys,  # [B, H, N, D]: those of the T new tokens come last
    position,  # [B, H, N] int32: negative for a free slot
    lse,  # [B, H, G, T] float32: log-sum-exp of each query's logits
    columns,  # [1, B, H, N] float32: state columns
    first_new,  # [B] int32: position of the row's first new token
    first_asked,  # [B] int32: position of the first query that counts
    behind,  # [B] int32: one past the position of the last query
    order,  # [B, T] int32: with PADDED, index of each new token among the queries
    tokens,
    slots,
    scaling,
    softcap,  # read only with CAPPED
    window,  # tokens that a query sees; 2**30: all
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
    column_stride = tl.num_programs(1).to(tl.int64) * heads * slots
    sum_attn_at = columns + pair * slots

    i = block * SLOTS + tl.arange(0, SLOTS)[:, None]
    inside = i < slots
    pos = tl.load(position + i, mask=inside, other=-1)
    since, until = observing.interval(pos, begin, end, window)
    seen = since <= until
    d = tl.arange(0, D_PAD)[None, :]
    k = tl.load(keys + i.to(tl.int64) * key_slot + d, mask=inside & (d < D), other=0.0).to(DOT)
    sum_attn = tl.zeros([SLOTS, 1], tl.float32)
    # Iterate from the last query backwards, so that all programs read the same queries at the same time.
    low, high = tl.min(since), tl.max(until)
    for back in range(0, high - low + 1, QUERIES):
        now = high - back - tl.arange(0, QUERIES)
        asked = now >= first
        t = observing.place(order, now, first, asked, PADDED)
        now = now[None, :]
        visible = (since <= now) & (now <= until)
        attn, logit = observing.weights(query, lse, k, t, asked, tokens, scaling, softcap, query_head, query_token, ATTN=True, LOGIT=False, HOW="mean", G=G, D=D, CAPPED=CAPPED)
        sum_attn += observing.total(attn, visible)
    tl.store(sum_attn_at + i, tl.load(sum_attn_at + i, mask=seen, other=0.0) + sum_attn, mask=seen)

@triton.jit(do_not_specialize=["layer", "first_head", "seed"])
def settle_prompt(
    position,  # [B, H, N] int32
    columns,  # [1, B, H, N] float32: state columns
    cache_rows,  # B
    work,  # [B, H, SCORES, N] float32, output: slot scores
    kept,  # [B, H, N] int8, output: protection class per slot
    newest,  # [B] int32: position of the row's last token
    real,  # [B] bool: whether the row has tokens
    numbers,  # [B, 3] float64
    slots,
    window,  # tokens that a query sees; 2**30: all
    BLOCK: tl.constexpr,
):
    """Evict after a prompt; the grid is (H, B)."""
    head, row = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(0)
    pair = (row * heads + head).to(tl.int64)
    if tl.load(real + row) == 0:
        return
    own_row, own_pair = row, pair  # a prompt covers all rows of its cache
    now = tl.load(newest + row)
    position += pair * slots
    work += pair * slots
    kept += pair * slots
    column_stride = heads.to(tl.int64) * slots * cache_rows
    sum_attn_at = columns + own_pair * slots
    number_recent = tl.load(numbers + own_row * 3)
    number_capacity = tl.load(numbers + own_row * 3 + 1)
    live = evicting.tokens_held(position, slots, BLOCK)
    leaving = evicting.overflow(live, ops.count(number_capacity), 1, 0, 0)
    if leaving == 0:
        return
    first = evicting.first_protected(position, slots, now, live, 0, BLOCK)
    last = evicting.last_protected(position, slots, now, live, ops.count(number_recent), BLOCK)
    lowest, where = tl.full([BLOCK], ops.ABOVE_ALL, tl.int64), tl.full([BLOCK], -1, tl.int32)
    certain = tl.zeros([BLOCK], tl.int32)
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < slots
        pos = tl.load(position + i, mask=inside, other=-1)
        sum_attn = tl.load(sum_attn_at + i, mask=inside, other=0.0)
        score = sum_attn
        keep = pos >= last
        tl.store(work + i, score, mask=inside)
        tl.store(kept + i, keep, mask=inside)
        lowest, where, certain = evicting.lower(lowest, where, certain, i, pos, score, keep, first, last)
    tl.debug_barrier()
    _, slot = evicting.leaves_first(lowest, where)
    evicting.evict(position, work, kept, slots, leaving, slot, (), 0, BLOCK)
