"""StreamingLLM on GPUs: the second launch of a decode step. The first is `kvdsl.runtime.gpu.attend`.

Made by kvdsl 0.1.0 from streaming_llm.kv (a865ebe3977d). Do not edit: `kvdsl compile` rewrites it.

Keeps the first tokens, which are attention sinks, and the most recent ones, at positions counted inside the cache.

A text can be longer than the model was trained on: the newest token is always at position `live - 1`.

paper: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", section 3.2
year: 2023, arXiv 2309.17453
reach: exact
checked: formula

Evicts the lowest first: position
keep first sinks
keep last 1

Legend:
    One program per KV head and row combines the splits of `attend`.
    PIECES others share the head's slots.
    The one with the first free slot stores the new token, and the last one to finish evicts.
    B, H, N: rows, KV heads, slots per KV head. G: query heads per KV head. D, E: dims of a key, of a value. S: splits of `attend`.
    R: rows of the cache; equals B unless the step covers some of them. own_row, own_pair: indices into these rows.
    now: position of the new token in the text. pos: positions of the tokens in slots i, negative for a free slot.
    SIZE: slots per block, for the block layout; `kvdsl.runtime.gpu.layout` maps slots to blocks and has allocated the new token's.
    rank: the position that attention uses for a token's rotation; see `kvdsl.runtime.gpu.rotate`.
"""

import triton
import triton.language as tl

from kvdsl.runtime.gpu import evicting, layout, ops, packed, rotate

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
    work,  # [B, H, SCORES, N] float32, output: slot scores
    kept,  # [B, H, N] int8, output: protection class per slot
    arrived,  # [B, H] int32: number of the KV head's programs that have finished; 0 before and after the launch
    lowest_found,  # [B, H, PIECES] int64, output: sort key of each program's first victim
    victims,  # [B, H, PIECES] int32, output: slot of that victim
    at_ends,  # [B, H, PIECES] int32, output: number of the program's tokens protected as first or last ones
    newest,  # [B] int32: position of the new token
    seen,  # [R] int32, output: position of the next token
    real,  # [B] bool: False for padding, whose output is zero
    numbers,  # [R, 2] float64
    slots,
    splits,
    per_piece,  # slots per program
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
    """Combine splits, place the token, rank slots; the grid is (PIECES + 1, H, B)."""
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
    rank += own_pair * slots
    gaps += pair * slots
    work += pair * slots
    kept += pair * slots
    number_sinks = tl.load(numbers + own_row * 2)
    number_capacity = tl.load(numbers + own_row * 2 + 1)
    slot, live = ops.free_slot(first_free, held, pair, slots, splits, S_PAD)
    live += 1
    leaving = evicting.overflow(live, ops.count(number_capacity), 1, 0, 0)
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
    tl.debug_barrier()

    # Rank the slots; the last program to finish evicts.
    if leaving == 0:
        return
    first, last = evicting.ends(now, live, ops.count(number_sinks), 1)
    lowest, where = tl.full([BLOCK], ops.ABOVE_ALL, tl.int64), tl.full([BLOCK], -1, tl.int32)
    certain = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < slots
        pos = tl.load(position + i, mask=inside, other=-1)
        score = pos.to(tl.float32)
        keep = (pos <= first) | (pos >= last)
        tl.store(work + i, score, mask=inside)
        tl.store(kept + i, keep, mask=inside)
        lowest, where, certain = evicting.lower(lowest, where, certain, i, pos, score, keep, first, last)
    if evicting.arrive(arrived, lowest_found, victims, at_ends, pair, piece, pieces, lowest, where, certain):
        victim, found = evicting.found_by_all(lowest_found, victims, at_ends, pair, pieces, PIECES_PAD)
        victim = evicting.unless_some_left(position, kept, victim, found, slots, now, live, ops.count(number_sinks), 1, 1, BLOCK)
        gone = evicting.evict(position, work, kept, slots, leaving, victim, (), 0, BLOCK)
        tl.debug_barrier()
        evicting.close_gaps(position, rank, gaps, slots, gone, BLOCK)

@triton.jit(do_not_specialize=["layer", "first_head", "seed"])
def settle_prompt(
    position,  # [B, H, N] int32
    work,  # [B, H, SCORES, N] float32, output: slot scores
    kept,  # [B, H, N] int8, output: protection class per slot
    newest,  # [B] int32: position of the row's last token
    real,  # [B] bool: whether the row has tokens
    numbers,  # [B, 2] float64
    slots,
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
    number_sinks = tl.load(numbers + own_row * 2)
    number_capacity = tl.load(numbers + own_row * 2 + 1)
    live = evicting.tokens_held(position, slots, BLOCK)
    leaving = evicting.overflow(live, ops.count(number_capacity), 1, 0, 0)
    if leaving == 0:
        return
    first = evicting.first_protected(position, slots, now, live, ops.count(number_sinks), BLOCK)
    last = evicting.last_protected(position, slots, now, live, 1, BLOCK)
    lowest, where = tl.full([BLOCK], ops.ABOVE_ALL, tl.int64), tl.full([BLOCK], -1, tl.int32)
    certain = tl.zeros([BLOCK], tl.int32)
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < slots
        pos = tl.load(position + i, mask=inside, other=-1)
        score = pos.to(tl.float32)
        keep = (pos <= first) | (pos >= last)
        tl.store(work + i, score, mask=inside)
        tl.store(kept + i, keep, mask=inside)
        lowest, where, certain = evicting.lower(lowest, where, certain, i, pos, score, keep, first, last)
    tl.debug_barrier()
    _, slot = evicting.leaves_first(lowest, where)
    evicting.evict(position, work, kept, slots, leaving, slot, (), 0, BLOCK)
