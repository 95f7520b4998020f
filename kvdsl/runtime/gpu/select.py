"""Device functions of `kvdsl.runtime.gpu.kernels.choose`. Nothing is sorted: counts of grades by level rule out most units.

Legend, in addition to the one of `kvdsl.runtime.gpu.kernels.settle`:
    W: dims of the sketch. j: index of one of them. P: capacity in pages per KV head.
    unit: a slot or a page, chosen as a whole. Among slots, unit N is the new token, which has no slot yet.

`kvdsl.runtime.torch.selection` defines the order: the highest comes first, NaN ranks lowest, -0 equals +0, and among equals the newer token
or page (the lower dim) wins. Protected units come before all others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import layout, ops, packed

UNSEEN, CERTAIN = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)  # grades of no number
LEVELS, COUNTED = tl.constexpr(256), tl.constexpr(1024)  # levels of grades, and grades counted per iteration
SIGN = tl.constexpr(-(2**31))

# -- the sketch --------------------------------------------------------------------------------------------------------


@triton.jit
def is_due(prompt, row, now, every):
    """Return whether this query rebuilds the sketch: every `every` queries, counted from the prompt's last one, and at position 0."""
    return (now == 0) | ((now + 1 - tl.load(prompt + row)) % tl.maximum(every, 1) == 0)


@triton.jit
def highest_dims(by, d, count, width, D: tl.constexpr, D_PAD: tl.constexpr, W_PAD: tl.constexpr):
    """Return the `count` dims with the highest grades, ascending, padded with -1; [W_PAD]."""
    key = (ops.grade(by).to(tl.int64) << 32) | (D - 1 - d).to(tl.int64)  # unique
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
    """Copy the sketch's dims of the keys in slots `first` to `end` to `sketch_keys`, for a new sketch."""
    for start in range(first, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        held = tl.load(position + i, mask=i < end, other=-1) >= 0
        there = held[:, None] & (dims >= 0)[None, :]
        rows = layout.rows(i.to(tl.int64), held, table, SIZE)
        k = packed.over(keys, rows, held, dims, D, D_PAD, KV)
        tl.store(sketch_keys + i.to(tl.int64)[:, None] * width + j[None, :], k, mask=there)
    tl.debug_barrier()  # other threads of the program read them next


@triton.jit
def sketched_keys(sketch_keys, at, filled, held, dims, j, width):
    """Load the sketch's dims of slots' keys, [n, W_PAD]; zeros where `held` is false.

    The mask of the load omits `dims`, which keeps loads wide, and `held`, so that they do not wait for positions.
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
    """Store the sketch's dims of the new token's key in `sketch_keys`. `new_key`: the head's."""
    j = tl.arange(0, W_PAD)
    dims = tl.load(sketch + pair * width + j, mask=j < width, other=-1)
    tl.store(sketch_keys + (pair * slots + slot) * width + j, packed.over_new(new_key, dims, D, D_PAD, KV), mask=dims >= 0)


# -- grades of slots ---------------------------------------------------------------------------------------------------


@triton.jit
def product(q, k, g, G: tl.constexpr, HOW: tl.constexpr, DOT: tl.constexpr):
    """Return dot(q, k) of keys [n, W] and the group's queries [G_PAD, W], reduced over the group: [n]."""
    return ops.over_group(tl.dot(q.to(DOT), tl.trans(k.to(DOT)), input_precision="ieee"), g, G, HOW)


@triton.jit
def grade_slots(grades, i, mine, pos, now, window, by):
    """Store the grades of slots i; UNSEEN for slots that the query cannot see."""
    seen = (pos >= 0) & (now - pos < window)
    tl.store(grades + i, tl.where(seen, ops.grade(by), UNSEEN), mask=mine)


@triton.jit
def grade_new(grades, slots, q, key, g, G: tl.constexpr, HOW: tl.constexpr):
    """Store the new token's grade, from its key [W] and the group's queries [G_PAD, W]."""
    products = tl.sum(q.to(tl.float32) * key.to(tl.float32)[None, :], 1)[:, None]
    tl.store(grades + slots + tl.arange(0, 1), ops.grade(ops.over_group(products, g, G, HOW)))


# -- grades of pages ---------------------------------------------------------------------------------------------------


@triton.jit
def look_at_pages(
    query,  # [G, D]; this and the following belong to one KV head
    new_key,  # [D]
    keys,  # [N, D]
    page_bounds,  # [P, 2, D]: minimum and maximum of each page's keys per dim, without the new token
    grades,  # [N + 16] int32: receives the grades of pages
    first,
    end,
    size,  # tokens per page
    now,
    oldest,  # the first position that the query sees
    anew,  # whether to compute the bounds from the keys
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HOW: tl.constexpr,
    BLOCK: tl.constexpr,
    table,  # [blocks of a row] int64, if SIZE
    SIZE: tl.constexpr,
    KV: tl.constexpr,
):
    """Grade one split's pages, `first` to `end`, by an upper bound on their keys' scores. The token at position p is in slot p."""
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
        if (start * size < oldest) & ((start + BLOCK) * size > oldest):  # a page is only partly in the window
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
    """Return the minimum and maximum of pages' keys per dim, from position `oldest` on; [BLOCK, D_PAD] each."""
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
    """Return the sum over dims of max(q * low, q * high), reduced over the group: [n]."""
    found = tl.full([low.shape[0]], float("-inf") if HOW == "max" else 0.0, tl.float32)
    for g in range(G):
        q = tl.load(query + g * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        one = tl.sum(tl.where((d < D)[None, :], ops.maximum(q * low, q * high), 0.0), 1)
        found = ops.maximum(found, one) if HOW == "max" else found + one
    return tl.div_rn(found, 1.0 * G) if HOW == "mean" else found


@triton.jit
def look_at_means(
    query,  # [G, D]; this and the following belong to one KV head
    new_key,  # [D]
    keys,  # [N, D]
    products,  # [N + 16] int32: receives the products with the tokens' keys, as bits of float32
    grades,  # [N + 16] int32: receives the grades of pages
    first,
    end,
    size,  # tokens per page
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
    """Grade one split's pages, `first` to `end`, by the product with the mean of their keys, which equals the mean of the products.

    The token at position p is in slot p.
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
    """Extend the bounds of the new token's page to its key, [D_PAD]."""
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
    """Reduce the grades of a row's KV heads, [H, N + 16], and store the result for every head. All heads hold the same tokens."""
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
        tl.debug_barrier()  # all threads read before any writes
        for head in range(heads):
            tl.store(grades + head * (slots + 16) + i, ops.grade(found), mask=seen)


# -- levels ------------------------------------------------------------------------------------------------------------


@triton.jit
def level(grade):
    """Return the level of a grade, 0 to 255, in the order of grades.

    Levels encode the sign, and for sizes from 2**-4 to 2**12 the exponent and three bits, because most scores lie there. Smaller and larger
    sizes share the outermost levels. UNSEEN alone has level 0.
    """
    steps = (grade ^ (grade >> 31)) >> 20
    steps = tl.minimum(tl.maximum(steps - (127 - 4) * 8, 0), 126)
    return tl.where(grade == UNSEEN, 0, tl.where(grade < 0, 127 - steps, 128 + steps))


@triton.jit
def count_levels(
    levels,  # [LEVELS] int32: receives the split's number of units per level
    grades,
    first,
    end,
):
    """Count a split's grades by level, after all are stored. While grading, tiles are small and several threads hold each grade."""
    tl.debug_barrier()
    counts = tl.zeros([LEVELS], tl.int32)
    for start in range(first, end, COUNTED):
        i = start + tl.arange(0, COUNTED)
        counts += tl.histogram(level(tl.load(grades + i, mask=i < end, other=UNSEEN)), LEVELS)
    tl.store(levels + tl.arange(0, LEVELS), counts)


# -- choosing ----------------------------------------------------------------------------------------------------------


@triton.jit
def tokens_with_new(held, pair, splits, S_PAD: tl.constexpr):
    """Return the head's number of tokens, including the new one."""
    s = tl.arange(0, S_PAD)
    return tl.sum(tl.load(held + pair * splits + s, mask=s < splits, other=0), 0) + 1


@triton.jit
def lowest_level(levels, pair, splits, wanted, S_PAD: tl.constexpr):
    """Return the highest level that at least `wanted` units reach, or all visible ones if they are fewer. Never 0."""
    s, own = tl.arange(0, S_PAD)[:, None], tl.arange(0, LEVELS)
    of_splits = tl.load(levels + (pair * splits + s) * LEVELS + own[None, :], mask=s < splits, other=0)
    counts = tl.where(own > 0, tl.sum(of_splits, 0), 0)
    reached = tl.cumsum(counts, 0, reverse=True) >= tl.minimum(tl.maximum(wanted, 1), tl.sum(counts, 0))
    return tl.sum(reached.to(tl.int32), 0) - 1


@triton.jit
def share(units, piece, pieces, BLOCK: tl.constexpr):
    """Return the units per piece, in whole blocks, and the begin and end of this piece."""
    per_piece = tl.cdiv(tl.cdiv(units, pieces), BLOCK) * BLOCK
    return per_piece, piece * per_piece, tl.minimum(piece * per_piece + per_piece, units)


@triton.jit
def narrow(
    position,  # [N] int32; this and the following belong to one KV head
    grades,  # [N + 16] int32: receives CERTAIN for protected units
    candidates,  # [N + 16] int32: receives the piece's candidates, in order, from `begin` on
    begin,
    end,
    lowest,  # the level that unprotected candidates reach
    slots,
    units,
    size,  # tokens per page
    now,
    oldest,  # the first position that the query sees
    first,  # tokens up to this position are protected
    last,  # tokens from this position on are protected
    PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List one piece's candidates: protected units, and units that reach the level `lowest`. Return their number."""
    count = 0
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < slots  # `slots` is a multiple of 16, so this mask permits wide loads
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
    """Clear `taken` in one piece's slots."""
    _, begin, end = share(slots, piece, pieces, BLOCK)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(taken + i, 0, mask=i < slots)


@triton.jit
def gather(grades, candidates, listed, pieces, per_piece, PIECES_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """Move all pieces' candidates to the front of the list. Return their number, and the number of protected ones.

    Args:
        listed: candidates per piece, [PIECES].
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
        tl.debug_barrier()  # writes may overwrite candidates that other threads of the block read
        tl.store(candidates + k, unit, mask=k < total)
    tl.debug_barrier()
    return total, tl.sum(certain, 0)


@triton.jit
def add_new(grades, candidates, total, certain, slots, now, first, last):
    """Append the new token, which has no slot yet, to the candidates. Return their number, and the number of protected ones."""
    sure = (now <= first) | (now >= last)
    tl.store(candidates + total, slots)
    tl.store(grades + slots, CERTAIN, mask=sure)
    tl.debug_barrier()
    return total + 1, certain + sure.to(tl.int32)


@triton.jit
def pick(
    position,  # [N] int32; this and the following belong to one KV head
    grades,  # [N + 16] int32
    candidates,  # [N + 16] int32
    chosen,  # [N] int32: receives the slots to attend to, in order
    found,  # [] int32: receives their number
    joins,  # [] int32: receives whether the new token is chosen
    taken,  # [N] int8: receives 1 for chosen slots, if OBSERVED
    total,  # number of candidates
    certain,  # number of protected ones
    slots,
    units,
    size,
    now,
    oldest,
    wanted,  # number of units to choose
    OBSERVED: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose `wanted` candidates, or all protected ones if these are more, and list their slots.

    If there are fewer candidates than that, they are all the visible units, and the kernel chooses all.
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
    """Return a block of candidates, their grades (UNSEEN past the end), and their tie-breaker: the position, or the page."""
    k = start + tl.arange(0, BLOCK)
    unit = tl.load(candidates + k, mask=k < total, other=0)
    grade = tl.load(grades + unit, mask=k < total, other=UNSEEN)
    if PAGES:
        return unit, grade, unit
    else:
        return unit, grade, tl.load(position + unit, mask=(k < total) & (unit < slots), other=now)


@triton.jit
def _cut(position, grades, candidates, total, slots, now, wanted, PAGES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the lowest chosen grade, and the tie-breaker that chosen units of this grade reach."""
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
    """Find the n-th highest grade, or with TIES the n-th highest tie-breaker among candidates of grade `bar`.

    A histogram per digit finds the digit of the n-th. The search stops early when all words with the digits so far are wanted.

    Args:
        equals: number of candidates to search.

    Returns:
        a bar that the n highest reach, with all equals of the n-th; how many of these equals are wanted; how many there are.
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
