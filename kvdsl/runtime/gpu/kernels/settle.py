"""Launches of a decode step and of a prompt that place a token, update statistics, rank slots and evict.

`settle` follows `kvdsl.runtime.gpu.attend` in every step, unless `at_once` does what both do. For each KV head and row one program
combines the splits of `attend`, and PIECES others share the head's slots: the one with the first free slot stores the new token, each
updates statistics for its slots and ranks them, and the last one to finish evicts.

Further launches: `make_room`, before everything else, under a hard cap; `agree`, after `settle` and `make_room`, if heads agree on their
victims: then those only rank. `settle_prompt` evicts after a prompt, if each KV head evicts by itself and its columns suffice.

Legend:
    B, H, N: rows, KV heads, slots per KV head. G: query heads per KV head. D, E: dims of a key, of a value. S: splits of `attend`.
    R: rows of the cache; equals B unless the step covers some of them. own_row, own_pair: indices into these rows.
    C: columns, and one row per ring query. SCORES: rows of `work` per KV head; 0: the policy evicts nothing.
    now: position of the new token in the text. live: number of the head's tokens.
    SIZE: slots per block, for the block layout; `kvdsl.runtime.gpu.layout` maps slots to blocks and has allocated the new token's.
    rank: with COMPACT the position that attention uses for a token's rotation; see `kvdsl.runtime.gpu.rotate`.
    W: dims of a sketch. P: page capacity. What a policy does not need is None, like `sketch` without SKETCHES.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import evicting, layout, ops, packed, select
from kvdsl.runtime.gpu.attend import attend
from kvdsl.runtime.gpu.kernels.hooks import (
    ends,
    find_columns,
    find_sketch,
    overflow,
    page_size,
    place,
    rank_slots,
    read_numbers,
    tops,
    update,
)


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
    logits,  # [B, H, G, N] float32: with LOGITS, attention logits before softmax
    new_logits,  # [B, H, G] float32: with LOGITS, logits of the new token
    new_key,  # [B, H, D]
    new_value,  # [B, H, E]
    keys,  # [R, H, N, D], or with SHARES KV heads of different lengths, concatenated; with SIZE > 0 [H, blocks, SIZE, D]
    values,  # [R, H, N, E], in the same layout
    first_rows,  # [R, H] int64: index of the KV head's first row in `keys` and `values`
    table,  # [R, blocks of a row] int64: with SIZE > 0, index in the pool of each block of slots
    position,  # [R, H, N] int32
    rank,  # [R, H, N] int32: with COMPACT, number of earlier live tokens, -1 for a free slot
    length,  # [R, H] int32, output: tokens of the KV head
    gaps,  # [B, H, N] int32, output: number of slots freed up to each rank
    query,  # [B, H * G, D]
    sketch,  # [R, H, W] int32: as in `look`, like the four below
    sketch_keys,  # [R, H, N, W]
    prompt,  # [R] int32
    copied,  # [R] int32
    width,
    page_bounds,  # [R, H, P, 2, D]
    pages,
    taken,  # [B, H, N] int8: with OBSERVED, 1 for selected slots
    joins,  # [B, H] int32: with OBSERVED, whether the new token is selected
    columns,  # [C, R, H, N] float32: state columns
    cache_rows,  # R
    ring_rows,  # [rings] int32: first row of each ring in `columns`
    work,  # [B, H, SCORES, N] float32, output: slot scores; see LAZY
    kept,  # [B, H, N] int8, output: protection class per slot; see LAZY
    arrived,  # [B, H] int32: number of the KV head's programs that have finished; 0 before and after the launch
    lowest_found,  # [B, H, PIECES] int64, output: sort key of each program's first victim
    victims,  # [B, H, PIECES] int32, output: slot of that victim
    at_ends,  # [B, H, PIECES] int32, output: number of the program's tokens protected as first or last ones
    newest,  # [B, H] int32: position of the new token
    seen,  # [R] int32, output: position of the next token
    real,  # [B] bool: False for padding, whose output is zero
    numbers,  # [R, numbers] or [R, H, numbers] float64
    constants,  # [tensors, H, D] float32: tensors of the policy's files
    supplied,  # [given values, B, H] float32: the caller's values for the new token
    slots,
    splits,
    per_piece,  # slots per program
    window,  # tokens that a query sees; 2**30: all
    seed,
    layer,
    first_head,  # index in the layer of the first KV head on this device
    SOME: tl.constexpr,  # whether the step covers only some rows of the cache
    SIZE: tl.constexpr,  # slots per block of the pool; 0 without blocks
    K_AS: tl.constexpr,  # storage type of keys, see `kvdsl.runtime.gpu.packed`
    V_AS: tl.constexpr,  # of values
    G: tl.constexpr,
    G_PAD: tl.constexpr,  # sizes rounded up to powers of two
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    PIECES_PAD: tl.constexpr,
    W_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    SELECTS: tl.constexpr,  # whether the query attends to a selection
    ROWS: tl.constexpr,  # slots per block where keys or values are read
    TILE: tl.constexpr,  # slots per side of a tile that compares slots with each other
    ROW_TILE: tl.constexpr,  # the same for tiles that read keys or values
    BLOCK: tl.constexpr,
    COMPACT: tl.constexpr,  # whether keys are rotated by rank
    SKETCHES: tl.constexpr,  # whether the policy has a sketch
    BOUNDS: tl.constexpr,  # whether it selects pages by bounds of their keys
    LOGITS: tl.constexpr,  # whether it reads what slots received of the query
    OBSERVES: tl.constexpr,  # whether queries change columns
    MERGES: tl.constexpr,  # whether `rank_slots` folds them into columns, so that positions and columns are read once
    LAZY: tl.constexpr,  # whether scores are stored only where the first victim is unknown or not the only one
    OBSERVED: tl.constexpr,  # whether a column reads the attention that selected slots received
    DRAWS: tl.constexpr,  # whether the policy draws random numbers
    SHARES: tl.constexpr,  # whether KV heads have different numbers of slots
    AGREES: tl.constexpr,  # whether `agree` evicts
    POOLS: tl.constexpr,  # whether scores depend on neighbouring slots
    SCORES: tl.constexpr,
    TOPS: tl.constexpr,  # number of `keep top`
    ENDS: tl.constexpr,  # class of protected first and last tokens, see `evicting`
    TOGETHER: tl.constexpr,  # slots per block of `attend`, if `at_once` calls, with the split's logits; 0: a launch of its own
):
    """Combine splits, place the token, update statistics, rank slots, evict; the grid is (PIECES + 1, H, B)."""
    piece, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pieces, heads = tl.num_programs(0), tl.num_programs(1)
    pair = (row * heads + head).to(tl.int64)
    if TOGETHER == 0:
        pieces -= 1
        if piece == pieces:
            ops.combine(out, part, top, total, sinks, real, splits, G, G_PAD, E, E_PAD, S_PAD, SINKS, V_AS)
            return
    if tl.load(real + row) == 0:
        return
    own_row = ops.row_of(which, row, SOME)
    own_pair = (own_row * heads + head).to(tl.int64)
    now = tl.load(newest + pair)
    if TOGETHER == 0:  # noqa: SIM102 (the outer condition is static)
        if (piece == 0) & (head == 0):
            tl.store(seen + own_row, now + 1)
    position += own_pair * slots
    work += pair * SCORES * slots
    kept += pair * slots
    taken += pair * slots
    if LOGITS and TOGETHER == 0:
        logits += pair * G * slots
    if COMPACT:
        rank += own_pair * slots
        gaps += pair * slots
    column_stride = heads.to(tl.int64) * slots * cache_rows
    own_columns = find_columns(columns, ring_rows, column_stride, own_pair * slots)
    own_numbers = read_numbers(numbers, constants, own_row, own_pair, head, heads, D)
    random_key = ops.random_key(seed, layer, first_head + head) if DRAWS else 0
    slot, live = ops.free_slot(first_free, held, pair, slots, splits, S_PAD)
    live += 1
    leaving = 0
    if SCORES > 0:
        budget, trigger, slack, max_drop = overflow(own_numbers, now, live)
        leaving = evicting.overflow(live, budget, trigger, slack, max_drop)
    base, above = 0, 0
    if LOGITS:
        base, above = ops.log_sum_exp(top, total, sinks, pair, head, splits, G, G_PAD, S_PAD, SINKS)
    if TOGETHER > 0:
        begin, end = ops.share(ops.reach(slots, now), piece, pieces, TOGETHER)
        if LOGITS:
            logits = ops.with_new(logits, new_logits + pair * G, begin + tl.arange(0, BLOCK), slot, G, G_PAD)
    else:
        begin = piece * per_piece
        end = tl.multiple_of(tl.minimum(begin + per_piece, slots), 16)  # so that loads are wide

    # The program with the first free slot stores the new token.
    if (slot >= begin) & (slot < end):
        d, e = tl.arange(0, D_PAD), tl.arange(0, E_PAD)
        key = tl.load(new_key + pair * D + d, mask=d < D, other=0.0)
        value = tl.load(new_value + pair * E + e, mask=e < E, other=0.0)
        at = layout.first_row(first_rows, own_pair, slots, SHARES | (SIZE > 0))
        own_table = table
        if SIZE > 0:
            own_table = layout.table_of(table, own_row, slots, SIZE)
        at += layout.rows(slot, True, own_table, SIZE)
        key = packed.place(keys, at, key, D, D_PAD, K_AS)
        value = packed.place(values, at, value, E, E_PAD, V_AS)
        tl.store(position + slot, now)
        if COMPACT:
            tl.store(rank + slot, live - 1)
            tl.store(length + own_pair, live - leaving)
        if LOGITS and TOGETHER == 0:
            ops.place_logits(logits, new_logits + pair * G, slot, slots, G, G_PAD)
        if SKETCHES:
            if SELECTS:
                own_key = new_key + pair * D
                select.place_in_sketch(sketch, sketch_keys, own_key, own_pair, slot, slots, width, D, D_PAD, W_PAD, K_AS)
                tl.store(copied + own_row, 1)
            else:  # a query that does not read the sketch updates it, too
                queries = query + pair * G * D
                dims, due = find_sketch(
                    queries, sketch, prompt, numbers, own_pair, own_row, now, width, G, G_PAD, D, D_PAD, W_PAD
                )
                j = tl.arange(0, W_PAD)
                tl.store(sketch + own_pair * width + j, dims, mask=j < tl.where(due, width, 0))
        if BOUNDS and SELECTS:
            own_bounds = page_bounds + own_pair * pages * 2 * D
            select.place_in_page(own_bounds, key, d, page_size(numbers, own_row, own_pair), now, D)
            tl.store(copied + own_row, 1)
        if OBSERVED and SELECTS:
            tl.store(taken + slot, tl.load(joins + pair).to(tl.int8))
        place(own_numbers, own_columns, constants, supplied, slot, key, value, d, e, pair, head, heads, D, E)

    # Update the statistics of the slots that the query sees.
    if OBSERVES and not MERGES:
        tl.debug_barrier()
        update(
            own_numbers, own_columns, column_stride, position, logits, base, above, taken, begin, end, slots, now, live, window,
            random_key, G, G_PAD, SELECTS, BLOCK,
        )  # fmt: skip

    # Rank the slots; the last program to finish evicts, or else `agree`.
    if SCORES > 0:
        tl.debug_barrier()
        if not MERGES:  # noqa: SIM102 (the outer condition is static)
            if leaving == 0:
                return
        n_first, n_last = ends(own_numbers, now, live)
        if AGREES or POOLS:
            first = evicting.first_protected(position, slots, now, live, n_first, BLOCK)
            last = evicting.last_protected(position, slots, now, live, n_last, BLOCK)
        else:
            first, last = evicting.ends(now, live, n_first, n_last)
        lowest, where, certain = rank_slots(
            own_numbers, own_columns, column_stride, position, work, kept, keys, values, first_rows, table, constants, own_row, own_pair,
            head, heads, logits, base, above, taken, begin, end, slots, now, live, first, last, window, random_key,
            MERGES, not LAZY, G, G_PAD, SELECTS, SIZE, K_AS, V_AS, D, D_PAD, E, E_PAD, ROWS, TILE, ROW_TILE, BLOCK,
        )  # fmt: skip
        if MERGES:  # noqa: SIM102 (the outer condition is static)
            if leaving == 0:
                return
        if not AGREES:
            arrives_last = evicting.arrive(
                arrived, lowest_found, victims, at_ends, pair, piece, pieces, lowest, where, certain
            )
            if arrives_last:
                victim, found = evicting.found_by_all(lowest_found, victims, at_ends, pair, pieces, PIECES_PAD)
                victim = tl.where(evicting.ends_are_there(found, live, n_first, n_last), victim, -1)
                protected = tops(own_numbers, now, live) if TOPS > 0 else ()
                gone = -1
                if leaving == 1:
                    gone = evicting.evict_known(position, work, kept, slots, victim, protected, TOPS, BLOCK)
                if gone < 0:
                    if LAZY:  # few steps need more than the first victim
                        _, _, _ = rank_slots(
                            own_numbers, own_columns, column_stride, position, work, kept, keys, values, first_rows, table, constants,
                            own_row, own_pair, head, heads, logits, base, above, taken, 0, slots, slots, now, live, first, last, window,
                            random_key, False, True, G, G_PAD, SELECTS, SIZE, K_AS, V_AS, D, D_PAD, E, E_PAD, ROWS, TILE, ROW_TILE, BLOCK,
                        )  # fmt: skip
                        tl.debug_barrier()
                    if victim < 0:
                        evicting.protect_ends(position, kept, slots, now, live, n_first, n_last, ENDS, BLOCK)
                    gone = evicting.evict(position, work, kept, slots, leaving, victim, protected, TOPS, BLOCK)
                if COMPACT:
                    tl.debug_barrier()
                    evicting.close_gaps(position, rank, gaps, slots, gone, BLOCK)


@triton.jit(do_not_specialize=["layer", "first_head", "seed"])
def at_once(
    which,  # this and the following as in `attend` and `settle`
    out,
    query,
    new_key,
    new_value,
    keys,
    values,
    first_rows,
    position,
    seen,
    newest,
    part,
    top,
    total,
    first_free,
    held,
    logits,
    new_logits,
    sinks,
    rank,
    length,
    gaps,
    slopes,
    angles,
    taken,
    columns,
    cache_rows,
    ring_rows,
    work,
    kept,
    arrived,
    meetings,  # [B, H] int32: how often the KV head's programs have met, modulo 2**32
    heads_met,  # [B] int32: number of the row's KV heads whose programs have met; 0 before and after the launch
    lowest_found,
    victims,
    at_ends,
    real,
    numbers,
    constants,
    supplied,
    slots,
    splits,
    scaling,
    softcap,
    window,
    seed,
    layer,
    first_head,
    SOME: tl.constexpr,
    K_AS: tl.constexpr,
    V_AS: tl.constexpr,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    M_PAD: tl.constexpr,  # G_PAD of `attend`
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    BLOCK: tl.constexpr,  # most slots per split, all in one block of `settle`
    TOGETHER: tl.constexpr,  # slots per block of `attend`
    SINKS: tl.constexpr,
    BIASED: tl.constexpr,
    RANKED: tl.constexpr,
    DENSE: tl.constexpr,
    TURNS: tl.constexpr,
    FEW: tl.constexpr,
    PAIRS: tl.constexpr,
    P_PAD: tl.constexpr,
    R_PAD: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COMPACT: tl.constexpr,
    LOGITS: tl.constexpr,
    OBSERVES: tl.constexpr,
    MERGES: tl.constexpr,
    LAZY: tl.constexpr,
    DRAWS: tl.constexpr,
    SHARES: tl.constexpr,
    SCORES: tl.constexpr,
    TOPS: tl.constexpr,
    ENDS: tl.constexpr,
):
    """Attend and settle in one launch, without selections, blocks and lent slots; the grid is (S, H, B).

    Each program settles the slots that it has attended to, and holds their logits meanwhile. In between, the programs of a KV head meet, so
    with several splits all programs must be on the device at once.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    own = attend(
        which, query, new_key, new_value, keys, values, first_rows, None, position, seen, newest, part, top, total, first_free, held, None,
        None, None, logits, new_logits, rank, length, slopes, angles, None, None, slots, scaling, softcap, window,
        SOME, 0, K_AS, V_AS, G, M_PAD, D, D_PAD, E, E_PAD, TOGETHER, LOGITS, BIASED, RANKED, False, DENSE, TURNS, FEW, PAIRS,
        P_PAD, R_PAD, OFFSET, INTERLEAVED, DOT, PRECISION, False, BLOCK // TOGETHER, G_PAD,
    )  # fmt: skip
    pair = (row * heads + head).to(tl.int64)
    if ops.meet(arrived, meetings, pair, splits):  # noqa: SIM102 (`and` evaluates both sides)
        # Once all heads of the row have met, nobody reads `seen` any more.
        if ops.last_to_arrive(heads_met, row, heads):
            now = tl.load(newest + pair)
            tl.store(seen + ops.row_of(which, row, SOME), now + 1, mask=tl.load(real + row) != 0)
    settle(
        which, out, part, top, total, sinks, first_free, held, own, new_logits, new_key, new_value, keys, values, first_rows, None,
        position, rank, length, gaps, query, None, None, None, None, 0, None, 0, taken, None, columns, cache_rows, ring_rows, work, kept,
        arrived, lowest_found, victims, at_ends, newest, seen, real, numbers, constants, supplied, slots, splits, 0, window, seed, layer,
        first_head, SOME, 0, K_AS, V_AS, G, G_PAD, D, D_PAD, E, E_PAD, S_PAD, S_PAD, 16, SINKS, False, ROWS, TILE, ROW_TILE, BLOCK, COMPACT,
        False, False, LOGITS, OBSERVES, MERGES, LAZY, False, DRAWS, SHARES, False, False, SCORES, TOPS, ENDS, TOGETHER,
    )  # fmt: skip
    if split == splits - 1:
        ops.combine(out, part, top, total, sinks, real, splits, G, G_PAD, E, E_PAD, S_PAD, SINKS, V_AS)


@triton.jit(do_not_specialize=["layer", "first_head", "seed"])
def make_room(
    which,  # this and the following as in `settle`
    keys,
    values,
    first_rows,
    table,
    position,
    rank,
    length,
    gaps,
    columns,
    cache_rows,
    ring_rows,
    work,
    kept,
    seen,  # [R] int32: position of the new token
    real,
    numbers,
    constants,
    slots,
    window,
    seed,
    layer,
    first_head,
    SOME: tl.constexpr,
    SIZE: tl.constexpr,
    K_AS: tl.constexpr,
    V_AS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    COMPACT: tl.constexpr,
    DRAWS: tl.constexpr,
    AGREES: tl.constexpr,
    SCORES: tl.constexpr,
    TOPS: tl.constexpr,
):
    """Evict before a token is placed that would exceed the hard cap, or with AGREES rank for `agree`; the grid is (H, B)."""
    head, row = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(0)
    pair = (row * heads + head).to(tl.int64)
    if tl.load(real + row) == 0:
        return
    own_row = ops.row_of(which, row, SOME)
    own_pair = (own_row * heads + head).to(tl.int64)
    now = tl.load(seen + own_row) - 1  # position of the newest token in the cache
    position += own_pair * slots
    work += pair * SCORES * slots
    kept += pair * slots
    column_stride = heads.to(tl.int64) * slots * cache_rows
    own_columns = find_columns(columns, ring_rows, column_stride, own_pair * slots)
    own_numbers = read_numbers(numbers, constants, own_row, own_pair, head, heads, D)
    random_key = ops.random_key(seed, layer, first_head + head) if DRAWS else 0
    live = evicting.tokens_held(position, slots, BLOCK)
    budget, trigger, slack, max_drop = overflow(own_numbers, now, live)
    leaving = evicting.overflow_before_placing(live, budget, trigger, slack, max_drop)
    if leaving == 0:
        return
    if COMPACT:
        tl.store(length + own_pair, live - leaving)
    n_first, n_last = ends(own_numbers, now, live)
    first = evicting.first_protected(position, slots, now, live, n_first, BLOCK)
    last = evicting.last_protected(position, slots, now, live, n_last, BLOCK)
    lowest, where, _ = rank_slots(
        own_numbers, own_columns, column_stride, position, work, kept, keys, values, first_rows, table, constants, own_row, own_pair,
        head, heads, None, 0, 0, None, 0, slots, slots, now, live, first, last, window, random_key,
        False, True, 1, 1, False, SIZE, K_AS, V_AS, D, D_PAD, E, E_PAD, ROWS, TILE, ROW_TILE, BLOCK,
    )  # fmt: skip
    if not AGREES:
        tl.debug_barrier()
        _, victim = evicting.leaves_first(lowest, where)
        protected = tops(own_numbers, now, live) if TOPS > 0 else ()
        gone = evicting.evict(position, work, kept, slots, leaving, victim, protected, TOPS, BLOCK)
        if COMPACT:
            tl.debug_barrier()
            evicting.close_gaps(position, rank + own_pair * slots, gaps + pair * slots, slots, gone, BLOCK)


@triton.jit
def agree(
    which,  # this and the following as in `settle`
    position,
    rank,
    gaps,
    work,  # each KV head's scores; the first head's become the mean
    kept,  # each KV head's protection classes; the first head's become the highest
    seen,  # [R] int32: one past the position of the newest token in the cache
    real,
    numbers,
    constants,
    slots,
    heads,
    SOME: tl.constexpr,
    D: tl.constexpr,
    BEFORE: tl.constexpr,  # whether it makes room, under a hard cap, for a token yet to be placed
    BLOCK: tl.constexpr,
    COMPACT: tl.constexpr,
    SCORES: tl.constexpr,
    TOPS: tl.constexpr,
):
    """Evict the same slots from all KV heads of a row, by their mean score; the grid is (B,).

    All heads hold the same tokens in the same slots.
    """
    row = tl.program_id(0)
    if tl.load(real + row) == 0:
        return
    own_row = ops.row_of(which, row, SOME)
    pair, own_pair = row.to(tl.int64) * heads, own_row.to(tl.int64) * heads  # the first head
    now = tl.load(seen + own_row) - 1
    position += own_pair * slots
    work += pair * SCORES * slots
    kept += pair * slots
    own_numbers = read_numbers(numbers, constants, own_row, own_pair, 0, heads, D)
    live = evicting.tokens_held(position, slots, BLOCK)
    budget, trigger, slack, max_drop = overflow(own_numbers, now, live)
    if BEFORE:
        leaving = evicting.overflow_before_placing(live, budget, trigger, slack, max_drop)
    else:
        leaving = evicting.overflow(live, budget, trigger, slack, max_drop)
    if leaving == 0:
        return
    evicting.average_over_heads(work, kept, slots, heads, SCORES, BLOCK)
    tl.debug_barrier()
    protected = tops(own_numbers, now, live) if TOPS > 0 else ()
    nobody = tl.full([], -1, tl.int32)
    gone = evicting.evict(position, work, kept, slots, leaving, nobody, protected, TOPS, BLOCK)
    tl.debug_barrier()
    evicting.leave_together(position, slots, heads, BLOCK)
    if COMPACT:
        tl.debug_barrier()
        for head in range(heads):
            at = head * slots
            own_rank = rank + own_pair * slots + at
            evicting.close_gaps(position + at, own_rank, gaps + pair * slots + at, slots, gone, BLOCK)


@triton.jit(do_not_specialize=["layer", "first_head", "seed"])
def settle_prompt(
    position,  # [B, H, N] int32
    columns,  # [C, B, H, N] float32: state columns
    cache_rows,  # B
    ring_rows,
    work,
    kept,
    text_order,  # [B, H, N] int64, output: slots that hold a token, then free ones
    newest,  # [B] int32: position of the row's last token
    real,  # [B] bool: whether the row has tokens
    numbers,
    constants,
    slots,
    window,
    seed,
    layer,
    first_head,
    D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAWS: tl.constexpr,
    SCORES: tl.constexpr,
    TOPS: tl.constexpr,
):
    """Evict after a prompt, which covers all rows of its cache, and tell which slots stay; the grid is (H, B)."""
    head, row = tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(0)
    pair = (row * heads + head).to(tl.int64)
    now = tl.load(newest + row)
    position += pair * slots
    work += pair * SCORES * slots
    kept += pair * slots
    column_stride = heads.to(tl.int64) * slots * cache_rows
    own_columns = find_columns(columns, ring_rows, column_stride, pair * slots)
    own_numbers = read_numbers(numbers, constants, row, pair, head, heads, D)
    random_key = ops.random_key(seed, layer, first_head + head) if DRAWS else 0
    live = evicting.tokens_held(position, slots, BLOCK)
    budget, trigger, slack, max_drop = overflow(own_numbers, now, live)
    leaving = evicting.overflow(live, budget, trigger, slack, max_drop)
    if (leaving > 0) & (tl.load(real + row) != 0):
        n_first, n_last = ends(own_numbers, now, live)
        first = evicting.first_protected(position, slots, now, live, n_first, BLOCK)
        last = evicting.last_protected(position, slots, now, live, n_last, BLOCK)
        lowest, where, _ = rank_slots(
            own_numbers, own_columns, column_stride, position, work, kept, None, None, None, None, constants, row, pair,
            head, heads, None, 0, 0, None, 0, slots, slots, now, live, first, last, window, random_key,
            False, True, 1, 1, False, 0, "model", "model", D, D, D, D, BLOCK, TILE, TILE, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        _, victim = evicting.leaves_first(lowest, where)
        protected = tops(own_numbers, now, live) if TOPS > 0 else ()
        evicting.evict(position, work, kept, slots, leaving, victim, protected, TOPS, BLOCK)
        tl.debug_barrier()
    evicting.put_in_order(position, text_order + pair * slots, slots, BLOCK)
