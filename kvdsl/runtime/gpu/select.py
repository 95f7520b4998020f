"""Device functions of `look` and `choose`, the two launches that come first where a query attends to a selection.

`look` grades the slots (or the pages) of one split by something cheap, and counts them by level. `choose` finds the highest of a KV head
without sorting, and lists their slots, which `attend` then reads in place: its programs share the head's, and each keeps what the counts
leave in question; the last to arrive chooses from that. `kernels_triton.py` has what differs from policy to policy.

Legend, beyond the one of `kernels_triton.py`:
    W: dims of the sketch. j: one of them, by its place. P: pages per KV head that there is room for.
    unit: what is chosen as a whole: a slot, or a page. Unit N of the slots is the new token, which is in no slot yet.

The order is the one of `kvdsl.runtime.torch.selection`: the highest first, a NaN below everything, -0 like +0, of equals the newer token
or page (for dims the lower one); what is protected comes before everything else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import layout, ops, packed

UNSEEN, CERTAIN = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)  # grades that no number has
LEVELS, COUNTED = tl.constexpr(256), tl.constexpr(1024)  # of grades, and how many of those are counted at a time
SIGN = tl.constexpr(-(2**31))

# -- the sketch --------------------------------------------------------------------------------------------------------


@triton.jit
def is_due(prompt, row, now, every):
    """Whether the sketch is found anew at this query: the prompt's last one was the first of so many, or this one is the first of all."""
    return (now == 0) | ((now + 1 - tl.load(prompt + row)) % tl.maximum(every, 1) == 0)


@triton.jit
def highest_dims(by, d, count, width, D: tl.constexpr, D_PAD: tl.constexpr, W_PAD: tl.constexpr):
    """The `count` dims of the highest grades, ascending; -1 behind them. [W_PAD]."""
    key = (ops.grade(by).to(tl.int64) << 32) | (D - 1 - d).to(tl.int64)  # no two dims have the same
    key = tl.where(d < D, key, ops.BELOW_ALL)
    count = tl.minimum(count, width)
    bar = tl.min(tl.where(tl.arange(0, D_PAD) < count, tl.sort(key, descending=True), ops.ABOVE_ALL), 0)
    mine = key >= bar
    place = tl.cumsum(mine.to(tl.int32), 0) - 1
    j = tl.arange(0, W_PAD)
    found = tl.sum(tl.where(mine[None, :] & (place[None, :] == j[:, None]), d[None, :], 0), 1)
    return tl.where(j < count, found, -1)


@triton.jit
def gather_keys(
    keys,
    sketch_keys,
    position,
    first,
    end,
    dims,
    j,
    width,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    table,  # [blocks of a row] int64, if SIZE
    SIZE: tl.constexpr,
    KV: tl.constexpr,
):
    """Write the keys of the slots from `first` to `end` over the sketch's dims beside them, where the sketch is new."""
    for start in range(first, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        held = tl.load(position + i, mask=i < end, other=-1) >= 0
        there = held[:, None] & (dims >= 0)[None, :]
        rows = layout.rows(i.to(tl.int64), held, table, SIZE)
        k = packed.over(keys, rows, held, dims, D, D_PAD, KV)
        tl.store(sketch_keys + i.to(tl.int64)[:, None] * width + j[None, :], k, mask=there)
    tl.debug_barrier()  # before other threads of the program read them


@triton.jit
def sketched_keys(sketch_keys, at, filled, held, dims, j, width):
    """The keys of these slots over the sketch's dims, [n, W_PAD]. Loads are wide where dims do not decide, and do not wait where tokens
    do not.
    """
    there = held[:, None] & (dims >= 0)[None, :]
    k = tl.load(sketch_keys + at[:, None] * width + j[None, :], mask=filled[:, None] & (j < width)[None, :], other=0.0)
    return tl.where(there, k, 0.0)


@triton.jit
def place_in_sketch(
    sketch,
    sketch_keys,
    new_key,
    pair,
    slot,
    slots,
    width,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    W_PAD: tl.constexpr,
    KV: tl.constexpr,
):
    """Append the new token's key to the compact ones. `new_key`: its head's."""
    j = tl.arange(0, W_PAD)
    dims = tl.load(sketch + pair * width + j, mask=j < width, other=-1)
    tl.store(sketch_keys + (pair * slots + slot) * width + j, packed.over_new(new_key, dims, D, D_PAD, KV), mask=dims >= 0)


# -- looking at slots --------------------------------------------------------------------------------------------------


@triton.jit
def product(q, k, g, G: tl.constexpr, HOW: tl.constexpr, DOT: tl.constexpr):
    """dot(q, k) of keys [n, W] and the group's queries [G_PAD, W], reduced over the group: [n]."""
    return ops.over_group(tl.dot(q.to(DOT), tl.trans(k.to(DOT)), input_precision="ieee"), g, G, HOW)


@triton.jit
def grade_slots(grades, i, mine, pos, now, window, by):
    """Leave the grades of slots i."""
    seen = (pos >= 0) & (now - pos < window)
    tl.store(grades + i, tl.where(seen, ops.grade(by), UNSEEN), mask=mine)


@triton.jit
def grade_new(grades, slots, q, key, g, G: tl.constexpr, HOW: tl.constexpr):
    """Leave the new token's grade, of its key [W] and the group's queries [G_PAD, W]."""
    products = tl.sum(q.to(tl.float32) * key.to(tl.float32)[None, :], 1)[:, None]
    tl.store(grades + slots + tl.arange(0, 1), ops.grade(ops.over_group(products, g, G, HOW)))


# -- looking at pages --------------------------------------------------------------------------------------------------


@triton.jit
def look_at_pages(
    query,  # [G, D], with all that follows: one KV head's
    new_key,  # [D]
    keys,  # [N, D]
    page_bounds,  # [P, 2, D]: the smallest and the largest key of every page, without the new token
    grades,  # [N + 16] int32: gets the pages'
    first,
    end,
    size,  # of a page, in tokens
    now,
    oldest,  # the first position that the query sees
    anew,  # whether the bounds are still to be made
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HOW: tl.constexpr,
    BLOCK: tl.constexpr,
    table,  # [blocks of a row] int64, if SIZE
    SIZE: tl.constexpr,
    KV: tl.constexpr,
):
    """Grade one split's pages, from `first` on, by what a key in them can score at most. The token at position p is in slot p."""
    d = tl.arange(0, D_PAD)
    new = packed.rounded(tl.load(new_key + d, mask=d < D, other=0.0), D, D_PAD, KV)
    new = packed.plain_vector(new, D, D_PAD, KV).to(tl.float32)[None, :]
    for start in range(first, end, BLOCK):
        page = start + tl.arange(0, BLOCK)
        mine = page < end
        begins = page * size
        low_at = page_bounds + page.to(tl.int64)[:, None] * 2 * D + d[None, :]
        there = (mine & (begins < now))[:, None] & (d < D)[None, :]
        if anew:
            low, high = _bounds(keys, begins, mine, size, 0, now, table, SIZE, D, D_PAD, BLOCK, KV)
            tl.store(low_at, low.to(page_bounds.dtype.element_ty), mask=there)
            tl.store(low_at + D, high.to(page_bounds.dtype.element_ty), mask=there)
        else:
            low = tl.load(low_at, mask=there, other=float("inf")).to(tl.float32)
            high = tl.load(low_at + D, mask=there, other=float("-inf")).to(tl.float32)
        if (start * size < oldest) & ((start + BLOCK) * size > oldest):  # a page has left the window in part
            rest_low, rest_high = _bounds(keys, begins, mine, size, oldest, now, table, SIZE, D, D_PAD, BLOCK, KV)
            cut = (begins < oldest)[:, None]
            low, high = tl.where(cut, rest_low, low), tl.where(cut, rest_high, high)
        newest = (page == now // size)[:, None]
        low = tl.where(newest, ops.minimum(low, new), low)
        high = tl.where(newest, ops.maximum(high, new), high)
        grade = ops.grade(_bound(query, low, high, d, G, D, HOW))
        tl.store(grades + page, tl.where(begins + size > oldest, grade, UNSEEN), mask=mine)


@triton.jit
def _bounds(
    keys,
    begins,
    mine,
    size,
    oldest,
    now,
    table,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    KV: tl.constexpr,
):
    """The smallest and the largest of the keys of pages, from position `oldest` on; dim by dim, [BLOCK, D_PAD] each."""
    d = tl.arange(0, D_PAD)
    low = tl.full([BLOCK, D_PAD], float("inf"), tl.float32)
    high = tl.full([BLOCK, D_PAD], float("-inf"), tl.float32)
    for t in range(size):
        slot = begins + t
        counts = mine & (slot >= oldest) & (slot < now)
        there = counts[:, None] & (d < D)[None, :]
        k = layout.vectors(keys, 0, slot, counts, table, SIZE, D, D_PAD, KV)
        low, high = tl.where(there, ops.minimum(low, k), low), tl.where(there, ops.maximum(high, k), high)
    return low, high


@triton.jit
def _bound(query, low, high, d, G: tl.constexpr, D: tl.constexpr, HOW: tl.constexpr):
    """The sum over dims of max(q * low, q * high), reduced over the group: [n]."""
    found = tl.full([low.shape[0]], float("-inf") if HOW == "max" else 0.0, tl.float32)
    for g in range(G):
        q = tl.load(query + g * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        one = tl.sum(tl.where((d < D)[None, :], ops.maximum(q * low, q * high), 0.0), 1)
        found = ops.maximum(found, one) if HOW == "max" else found + one
    return tl.div_rn(found, 1.0 * G) if HOW == "mean" else found


@triton.jit
def look_at_means(
    query,  # [G, D], with all that follows: one KV head's
    new_key,  # [D]
    keys,  # [N, D]
    products,  # [N + 16] int32: gets the products with the tokens' keys, as bits
    grades,  # [N + 16] int32: gets the pages'
    first,
    end,
    size,  # of a page, in tokens
    now,
    oldest,  # the first position that the query sees
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    D: tl.constexpr,
    W_PAD: tl.constexpr,
    HOW: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK: tl.constexpr,
    table,  # [blocks of a row] int64, if SIZE
    SIZE: tl.constexpr,
    KV: tl.constexpr,
):
    """Grade one split's pages, from `first` on, by the product with the mean of the keys in them, which is the mean of the products. The
    token at position p is in slot p.
    """
    g, j = tl.arange(0, G_PAD), tl.arange(0, W_PAD)
    q = tl.load(query + g[:, None] * D + j[None, :], mask=(g[:, None] < G) & (j[None, :] < D), other=0.0)
    stop = tl.minimum(end * size, now)
    for start in range(first * size, stop, BLOCK):
        i = start + tl.arange(0, BLOCK)
        held = i < stop
        k = packed.plain(packed.load(keys, layout.rows(i, held, table, SIZE), held, D, W_PAD, KV), D, W_PAD, KV)
        tl.store(products + i, product(q, k, g, G, HOW, DOT).to(tl.int32, bitcast=True), mask=held)
    if (first <= now // size) & (now // size < end):
        new = packed.over_new(new_key, tl.where(j < D, j, -1), D, W_PAD, KV).to(tl.float32)
        found = ops.over_group(tl.sum(q.to(tl.float32) * new[None, :], 1)[:, None], g, G, HOW)
        tl.store(products + now + tl.arange(0, 1), found.to(tl.int32, bitcast=True))
    tl.debug_barrier()
    for start in range(first, end, BLOCK):
        page = start + tl.arange(0, BLOCK)
        total, count = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for t in range(size):
            slot = page * size + t
            there = (page < end) & (slot >= oldest) & (slot <= now)
            total += tl.load(products + slot, mask=there, other=0).to(tl.float32, bitcast=True)
            count += there.to(tl.float32)
        visible = page * size + size > oldest
        tl.store(grades + page, tl.where(visible, ops.grade(tl.div_rn(total, count)), UNSEEN), mask=page < end)


@triton.jit
def place_in_page(page_bounds, key, d, size, now, D: tl.constexpr):
    """Widen the bounds of the new token's page by its key, [D_PAD]."""
    low_at = page_bounds + (now // size).to(tl.int64) * 2 * D + d
    others = d < tl.where(now % size == 0, 0, D)
    low = tl.load(low_at, mask=others, other=float("inf")).to(tl.float32)
    high = tl.load(low_at + D, mask=others, other=float("-inf")).to(tl.float32)
    k = key.to(tl.float32)
    tl.store(low_at, ops.minimum(low, k).to(page_bounds.dtype.element_ty), mask=d < D)
    tl.store(low_at + D, ops.maximum(high, k).to(page_bounds.dtype.element_ty), mask=d < D)


# -- heads that choose together ----------------------------------------------------------------------------------------


@triton.jit
def vote(grades, first, end, slots, heads, HOW: tl.constexpr, BLOCK: tl.constexpr):
    """Give units the grade of what all KV heads of a row find, [H, N + 16], reduced: their slots hold the same tokens."""
    for start in range(first, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        seen = tl.load(grades + i, mask=i < end, other=UNSEEN) != UNSEEN
        found = ops.graded(tl.load(grades + i, mask=seen, other=0))
        for head in range(1, heads):
            one = ops.graded(tl.load(grades + head * (slots + 16) + i, mask=seen, other=0))
            if HOW == "max":
                found = ops.maximum(found, one)
            elif HOW == "min":
                found = ops.minimum(found, one)
            else:
                found += one
        if HOW == "mean":
            found = tl.div_rn(found, tl.zeros([BLOCK], tl.float32) + heads)
        tl.debug_barrier()  # all threads have read before any writes
        for head in range(heads):
            tl.store(grades + head * (slots + 16) + i, ops.grade(found), mask=seen)


# -- levels ------------------------------------------------------------------------------------------------------------


@triton.jit
def level(grade):
    """A digit in the order of grades, fine where scores are: the sign, and of sizes from 2**-4 to 2**12 the exponent and three bits.
    What is smaller or larger shares the last level on its side; 0 is that of what is not seen alone.
    """
    steps = (grade ^ (grade >> 31)) >> 20
    steps = tl.minimum(tl.maximum(steps - (127 - 4) * 8, 0), 126)
    return tl.where(grade == UNSEEN, 0, tl.where(grade < 0, 127 - steps, 128 + steps))


@triton.jit
def count_levels(
    levels,  # [LEVELS] int32: gets how many of the split's units have which level
    grades,
    first,
    end,
):
    """Count a split's grades once they are there: while they are found, they are few at a time, and several threads have each."""
    tl.debug_barrier()
    counts = tl.zeros([LEVELS], tl.int32)
    for start in range(first, end, COUNTED):
        i = start + tl.arange(0, COUNTED)
        counts += tl.histogram(level(tl.load(grades + i, mask=i < end, other=UNSEEN)), LEVELS)
    tl.store(levels + tl.arange(0, LEVELS), counts)


# -- choosing ----------------------------------------------------------------------------------------------------------


@triton.jit
def tokens_with_new(held, pair, splits, S_PAD: tl.constexpr):
    """How many tokens the head holds, the new one included."""
    s = tl.arange(0, S_PAD)
    return tl.sum(tl.load(held + pair * splits + s, mask=s < splits, other=0), 0) + 1


@triton.jit
def lowest_level(levels, pair, splits, wanted, S_PAD: tl.constexpr):
    """The highest level that as many units reach as are wanted, or all that are seen; never 0."""
    s, own = tl.arange(0, S_PAD)[:, None], tl.arange(0, LEVELS)
    of_splits = tl.load(levels + (pair * splits + s) * LEVELS + own[None, :], mask=s < splits, other=0)
    counts = tl.where(own > 0, tl.sum(of_splits, 0), 0)
    reached = tl.cumsum(counts, 0, reverse=True) >= tl.minimum(tl.maximum(wanted, 1), tl.sum(counts, 0))
    return tl.sum(reached.to(tl.int32), 0) - 1


@triton.jit
def share(units, piece, pieces, BLOCK: tl.constexpr):
    """How many units a piece has, in whole blocks, and where the own ones begin and end."""
    per_piece = tl.cdiv(tl.cdiv(units, pieces), BLOCK) * BLOCK
    return per_piece, piece * per_piece, tl.minimum(piece * per_piece + per_piece, units)


@triton.jit
def narrow(
    position,  # [N] int32, with all that follows: one KV head's
    grades,  # [N + 16] int32: gets CERTAIN for what is protected
    candidates,  # [N + 16] int32: gets the piece's units that may be chosen, in order, from `begin` on
    begin,
    end,
    lowest,  # the level that others must reach
    slots,
    units,
    size,  # of a page, in tokens
    now,
    oldest,  # the first position that the query sees
    first,  # tokens up to this position are attended to in any case
    last,  # and those from this one on
    PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List what of one piece may be chosen: what is protected, and what reaches a level; says how many that are."""
    count = 0
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < slots  # loads are wide where this decides, a multiple of 16
        grade = tl.where(i < units, tl.load(grades + i, mask=inside, other=UNSEEN), UNSEEN)
        if PAGES:
            begins, ends = tl.maximum(i * size, oldest), tl.minimum(i * size + size - 1, now)
        else:
            begins = tl.load(position + i, mask=inside, other=-1)
            ends = begins
        sure = (grade != UNSEEN) & ((begins <= first) | (ends >= last))
        tl.store(grades + i, CERTAIN, mask=sure)
        listed = (sure | (level(grade) >= lowest)).to(tl.int32)
        tl.store(candidates + begin + count + tl.cumsum(listed, 0) - 1, i, mask=listed > 0)
        count += tl.sum(listed, 0)
    return count


@triton.jit
def clear(taken, slots, piece, pieces, BLOCK: tl.constexpr):
    """Forget what was attended to in one piece's slots."""
    _, begin, end = share(slots, piece, pieces, BLOCK)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(taken + i, 0, mask=i < slots)


@triton.jit
def gather(grades, candidates, listed, pieces, per_piece, PIECES_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """Move all pieces' candidates to the front of the list; says how many there are, and how many of them are protected.

    Args:
        listed: how many each piece has, [PIECES].
    """
    p = tl.arange(0, PIECES_PAD)
    total = tl.sum(tl.load(listed + p, mask=p < pieces, other=0), 0)
    certain = tl.zeros([BLOCK], tl.int32)
    for start in range(0, total, BLOCK):
        k = start + tl.arange(0, BLOCK)
        at, end = k, 0
        for piece in range(pieces):
            count = tl.load(listed + piece)
            end += count
            at += tl.where(k >= end, per_piece - count, 0)
        unit = tl.load(candidates + at, mask=k < total, other=0)
        certain += (tl.load(grades + unit, mask=k < total, other=UNSEEN) == CERTAIN).to(tl.int32)
        tl.debug_barrier()  # before they are written where others of the block were
        tl.store(candidates + k, unit, mask=k < total)
    tl.debug_barrier()
    return total, tl.sum(certain, 0)


@triton.jit
def add_new(grades, candidates, total, certain, slots, now, first, last):
    """Put the new token, which is in no slot yet, behind all candidates; says how many there are now, and how many are protected."""
    sure = (now <= first) | (now >= last)
    tl.store(candidates + total, slots)
    tl.store(grades + slots, CERTAIN, mask=sure)
    tl.debug_barrier()
    return total + 1, certain + sure.to(tl.int32)


@triton.jit
def pick(
    position,  # [N] int32, with all that follows: one KV head's
    grades,  # [N + 16] int32
    candidates,  # [N + 16] int32
    chosen,  # [N] int32: gets the slots to attend to, in order
    found,  # [] int32: gets how many
    joins,  # [] int32: gets whether the new token is one
    taken,  # [N] int8: gets 1 for the slots that are, if OBSERVED
    total,  # candidates
    certain,  # of them: those that are protected
    slots,
    units,
    size,
    now,
    oldest,
    wanted,  # units
    OBSERVED: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose as many of the candidates as are wanted, or all that are protected if those are more, and list their slots. Where there
    are fewer candidates, they are all that can be seen.
    """
    wanted = tl.minimum(tl.maximum(tl.maximum(wanted, 1), certain), total)
    bar, tie = _cut(position, grades, candidates, total, slots, now, wanted, PAGES, BLOCK)
    newest = units - 1 if PAGES else slots
    tl.store(joins, _is_chosen(tl.load(grades + newest), newest if PAGES else now, bar, tie).to(tl.int32))
    count = 0
    for start in range(0, total, BLOCK):
        unit, grade, ties = _candidates(position, grades, candidates, start, total, slots, now, PAGES, BLOCK)
        mine = _is_chosen(grade, ties, bar, tie)
        if PAGES:
            begins = tl.maximum(unit * size, oldest)
            tokens = tl.where(mine, tl.maximum(tl.minimum(unit * size + size, now) - begins, 0), 0)
        else:
            begins, tokens = unit, (mine & (unit < slots)).to(tl.int32)
        at = chosen + count + tl.cumsum(tokens, 0) - tokens
        for t in range(size):
            tl.store(at + t, begins + t, mask=t < tokens)
            if OBSERVED:
                tl.store(taken + begins + t, 1, mask=t < tokens)
        count += tl.sum(tokens, 0)
    tl.store(found, count)


@triton.jit
def _is_chosen(grade, tie, bar, bar_tie):
    return (grade > bar) | ((grade == bar) & (tie >= bar_tie))


@triton.jit
def _candidates(position, grades, candidates, start, total, slots, now, PAGES: tl.constexpr, BLOCK: tl.constexpr):
    """A block of candidates, their grades, UNSEEN behind them, and of equals which is the newer: the position, or the page."""
    k = start + tl.arange(0, BLOCK)
    unit = tl.load(candidates + k, mask=k < total, other=0)
    grade = tl.load(grades + unit, mask=k < total, other=UNSEEN)
    if PAGES:
        return unit, grade, unit
    else:
        return unit, grade, tl.load(position + unit, mask=(k < total) & (unit < slots), other=now)


@triton.jit
def _cut(position, grades, candidates, total, slots, now, wanted, PAGES: tl.constexpr, BLOCK: tl.constexpr):
    """The grade of the last unit that is chosen, and the tie that those of its grade must reach."""
    bar, wanted, equals = _nth(position, grades, candidates, total, slots, now, 0, wanted, total, False, PAGES, BLOCK)
    bar = tl.maximum(bar, UNSEEN + 1)
    tie = 0
    if wanted < equals:
        tie, wanted, equals = _nth(position, grades, candidates, total, slots, now, bar, wanted, equals, True, PAGES, BLOCK)
    return bar, tie


@triton.jit
def _nth(
    position,
    grades,
    candidates,
    total,
    slots,
    now,
    bar,
    n,
    equals,
    TIES: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The n-th highest grade; with TIES the n-th highest tie of those of grade `bar`. Digit by digit: a histogram for each tells
    in which the n-th lies. When all that begin with the digits found so far are wanted, the rest does not matter.

    Args:
        equals: how many there are to choose from.

    Returns:
        a number that is reached by exactly those that are wanted, unless there are equals of the n-th; how many of its equals
        are wanted; how many it has.
    """
    shift, digits = tl.full([], 32, tl.int32), tl.full([], 0, tl.uint32)
    while (shift > 0) & (n < equals):
        shift -= ops.DIGIT
        counts = tl.zeros([ops.DIGITS], tl.int32)
        for start in range(0, total, BLOCK):
            _, grade, tie = _candidates(position, grades, candidates, start, total, slots, now, PAGES, BLOCK)
            word = (tie if TIES else grade ^ SIGN).to(tl.uint32, bitcast=True)
            counted = (grade == bar) if TIES else (grade != UNSEEN)
            counts += ops.count_digits(word, counted, digits, shift)
        digits, n, equals = ops.next_digit(counts, digits, n, equals)
    least = (digits << (shift.to(tl.uint32) & 31)).to(tl.int32, bitcast=True)
    if not TIES:
        least = least ^ SIGN
    return least, n, equals
