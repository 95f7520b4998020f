"""Device functions of `look` and `choose`, the two launches that come first where a query attends to a selection.

`look` grades the slots (or the pages) of one split by something cheap; `choose` finds the highest of one KV head without sorting
and lists their slots, which `attend` then reads in place. `kernels_triton.py` has what differs from policy to policy.

Legend, beyond the one of `kernels_triton.py`:
    W: dims of the sketch. j: one of them, by its place. P: pages per KV head that there is room for.
    unit: what is chosen as a whole: a slot, or a page. Unit N of the slots is the new token, which is in no slot yet.

The order is the one of `kvdsl.runtime.torch.selection`: the highest first, a NaN below everything, -0 like +0, of equals the newer token
or page (for dims the lower one); what is protected comes before everything else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import layout, ops

UNSEEN, CERTAIN = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)  # grades that no number has
SIGN = tl.constexpr(-(2**31))

# -- the sketch --------------------------------------------------------------------------------------------------------


@triton.jit
def is_due(prompt, row, now, every):
    """Whether the sketch is found anew at this query: the prompt's last one was the first of so many."""
    return (now + 1 - tl.load(prompt + row)) % tl.maximum(every, 1) == 0


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
def over_dims(x, dims):
    """A query's or a key's numbers over the sketch's dims, [W_PAD]; 0 where there is none."""
    return tl.load(x + dims, mask=dims >= 0, other=0.0)


@triton.jit
def sketched_keys(
    keys, sketch_keys, at, filled, held, dims, j, width, anew, D: tl.constexpr, table=None, SIZE: tl.constexpr = 0
):
    """The keys of these slots over the sketch's dims, [n, W_PAD]; gathered from the keys where the sketch is new."""
    there = held[:, None] & (dims >= 0)[None, :]
    compact = sketch_keys + at[:, None] * width + j[None, :]
    if anew:
        rows = layout.rows(at, held, table, SIZE)
        k = tl.load(keys + rows[:, None] * D + dims[None, :], mask=there, other=0.0)
        tl.store(compact, k, mask=there)
    else:  # loads are wide where dims do not decide, and do not wait where tokens do not
        k = tl.load(compact, mask=filled[:, None] & (j < width)[None, :], other=0.0)
        k = tl.where(there, k, 0.0)
    return k


@triton.jit
def place_in_sketch(sketch, sketch_keys, new_key, pair, slot, slots, width, W_PAD: tl.constexpr):
    """Append the new token's key to the compact ones. `new_key`: its head's."""
    j = tl.arange(0, W_PAD)
    dims = tl.load(sketch + pair * width + j, mask=j < width, other=-1)
    tl.store(sketch_keys + (pair * slots + slot) * width + j, over_dims(new_key, dims), mask=dims >= 0)


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
    split,
    splits,
    size,  # of a page, in tokens
    now,
    oldest,  # the first position that the query sees
    anew,  # whether the bounds are still to be made
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HOW: tl.constexpr,
    BLOCK: tl.constexpr,
    table=None,  # [blocks of a row] int64, if SIZE
    SIZE: tl.constexpr = 0,
):
    """Rank one split's pages by what a key in them can score at most. The token at position p is in slot p."""
    pages = now // size + 1
    per_split = tl.cdiv(pages, splits)
    first = split * per_split
    end = tl.minimum(first + per_split, pages)
    d = tl.arange(0, D_PAD)
    new = tl.load(new_key + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    for start in range(first, end, BLOCK):
        page = start + tl.arange(0, BLOCK)
        mine = page < end
        begins = page * size
        low_at = page_bounds + page.to(tl.int64)[:, None] * 2 * D + d[None, :]
        there = (mine & (begins < now))[:, None] & (d < D)[None, :]
        if anew:
            low, high = _bounds(keys, begins, mine, size, 0, now, table, SIZE, D, D_PAD, BLOCK)
            tl.store(low_at, low.to(page_bounds.dtype.element_ty), mask=there)
            tl.store(low_at + D, high.to(page_bounds.dtype.element_ty), mask=there)
        else:
            low = tl.load(low_at, mask=there, other=float("inf")).to(tl.float32)
            high = tl.load(low_at + D, mask=there, other=float("-inf")).to(tl.float32)
        if (start * size < oldest) & ((start + BLOCK) * size > oldest):  # a page has left the window in part
            rest_low, rest_high = _bounds(keys, begins, mine, size, oldest, now, table, SIZE, D, D_PAD, BLOCK)
            cut = (begins < oldest)[:, None]
            low, high = tl.where(cut, rest_low, low), tl.where(cut, rest_high, high)
        newest = (page == pages - 1)[:, None]
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
):
    """The smallest and the largest of the keys of pages, from position `oldest` on; dim by dim, [BLOCK, D_PAD] each."""
    d = tl.arange(0, D_PAD)
    low = tl.full([BLOCK, D_PAD], float("inf"), tl.float32)
    high = tl.full([BLOCK, D_PAD], float("-inf"), tl.float32)
    for t in range(size):
        slot = begins + t
        counts = mine & (slot >= oldest) & (slot < now)
        there = counts[:, None] & (d < D)[None, :]
        rows = layout.rows(slot, counts, table, SIZE)
        k = tl.load(keys + rows[:, None] * D + d[None, :], mask=there, other=0.0).to(tl.float32)
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
def place_in_page(page_bounds, key, d, size, now, D: tl.constexpr):
    """Widen the bounds of the new token's page by its key, [D_PAD]."""
    low_at = page_bounds + (now // size).to(tl.int64) * 2 * D + d
    others = d < tl.where(now % size == 0, 0, D)
    low = tl.load(low_at, mask=others, other=float("inf")).to(tl.float32)
    high = tl.load(low_at + D, mask=others, other=float("-inf")).to(tl.float32)
    k = key.to(tl.float32)
    tl.store(low_at, ops.minimum(low, k).to(page_bounds.dtype.element_ty), mask=d < D)
    tl.store(low_at + D, ops.maximum(high, k).to(page_bounds.dtype.element_ty), mask=d < D)


# -- choosing ----------------------------------------------------------------------------------------------------------


@triton.jit
def tokens_with_new(held, pair, splits, S_PAD: tl.constexpr):
    """How many tokens the head holds, the new one included."""
    s = tl.arange(0, S_PAD)
    return tl.sum(tl.load(held + pair * splits + s, mask=s < splits, other=0), 0) + 1


@triton.jit
def choose_slots(
    position,  # [N] int32, with all that follows: one KV head's
    grades,  # [N + 16] int32
    chosen,  # [N] int32: gets the slots to attend to, in order
    found,  # [] int32: gets how many
    joins,  # [] int32: gets whether the new token is one
    taken,  # [N] int8: gets whether each slot is one, if OBSERVED
    slots,
    now,
    first,  # tokens up to this position are attended to in any case
    last,  # and those from this one on
    wanted,
    OBSERVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose as many slots as are wanted, or all that are protected if those are more."""
    seen, certain = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, slots + 1, BLOCK):
        i, grade, pos = _units(position, grades, start, slots, now, False, BLOCK)
        sure = (grade != UNSEEN) & ((pos <= first) | (pos >= last))
        tl.store(grades + i, CERTAIN, mask=sure)
        seen += (grade != UNSEEN).to(tl.int32)
        certain += sure.to(tl.int32)
    tl.debug_barrier()
    bar, tie = _cut(position, grades, slots, now, wanted, tl.sum(seen, 0), tl.sum(certain, 0), False, BLOCK)
    count = 0
    for start in range(0, slots, BLOCK):
        i, grade, pos = _units(position, grades, start, slots, now, False, BLOCK)
        mine = _is_chosen(grade, pos, bar, tie) & (i < slots)
        tl.store(chosen + count + tl.cumsum(mine.to(tl.int32), 0) - 1, i, mask=mine)
        if OBSERVED:
            tl.store(taken + i, mine.to(tl.int8), mask=i < slots)
        count += tl.sum(mine.to(tl.int32), 0)
    tl.store(found, count)
    tl.store(joins, _is_chosen(tl.load(grades + slots), now, bar, tie).to(tl.int32))


@triton.jit
def choose_pages(
    grades,  # [N + 16] int32, with all that follows as in `choose_slots`
    chosen,
    found,
    joins,
    taken,
    size,  # of a page, in tokens
    now,
    oldest,  # the first position that the query sees
    first,
    last,
    wanted,  # in tokens
    OBSERVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose as many pages, and list the slots in them; the token at position p is in slot p."""
    pages = now // size + 1
    seen, certain = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, pages, BLOCK):
        page, grade, _ = _units(grades, grades, start, pages, now, True, BLOCK)
        begins, ends = tl.maximum(page * size, oldest), tl.minimum(page * size + size - 1, now)
        sure = (grade != UNSEEN) & ((begins <= first) | (ends >= last))
        tl.store(grades + page, CERTAIN, mask=sure)
        seen += (grade != UNSEEN).to(tl.int32)
        certain += sure.to(tl.int32)
    tl.debug_barrier()
    bar, tie = _cut(grades, grades, pages, now, wanted // size, tl.sum(seen, 0), tl.sum(certain, 0), True, BLOCK)
    count = 0
    for start in range(0, pages, BLOCK):
        page, grade, _ = _units(grades, grades, start, pages, now, True, BLOCK)
        mine = _is_chosen(grade, page, bar, tie)
        begins, ends = tl.maximum(page * size, oldest), tl.minimum(page * size + size, now)
        held = tl.where(page < pages, tl.maximum(ends - begins, 0), 0)
        listed = tl.where(mine, held, 0)
        at = chosen + count + tl.cumsum(listed, 0) - listed
        for t in range(size):
            tl.store(at + t, begins + t, mask=t < listed)
            if OBSERVED:
                tl.store(taken + begins + t, mine.to(tl.int8), mask=t < held)
        count += tl.sum(listed, 0)
    tl.store(found, count)
    tl.store(joins, _is_chosen(tl.load(grades + pages - 1), pages - 1, bar, tie).to(tl.int32))


@triton.jit
def _is_chosen(grade, tie, bar, bar_tie):
    return (grade > bar) | ((grade == bar) & (tie >= bar_tie))


@triton.jit
def _units(position, grades, start, places, now, PAGES: tl.constexpr, BLOCK: tl.constexpr):
    """A block of units, of all pages or of all slots and the new token (`places` are the pages or the slots); their grades, and of
    equals which is the newer: the position, or the page. There are 16 grades more than slots: loads go up to a multiple of 16,
    which makes them wide.
    """
    i = start + tl.arange(0, BLOCK)
    units = places if PAGES else places + 1
    grade = tl.load(grades + i, mask=i < tl.cdiv(units, 16) * 16, other=UNSEEN)
    grade = tl.where(i < units, grade, UNSEEN)
    if PAGES:
        return i, grade, i
    else:
        return i, grade, tl.load(position + i, mask=i < places, other=now)


@triton.jit
def _cut(position, grades, places, now, wanted, seen, certain, PAGES: tl.constexpr, BLOCK: tl.constexpr):
    """The grade of the last unit that is chosen, and the tie that those of its grade must reach."""
    wanted = tl.minimum(tl.maximum(tl.maximum(wanted, 1), certain), seen)
    bar, wanted, equals = _nth(position, grades, places, now, 0, wanted, seen, False, PAGES, BLOCK)
    bar = tl.maximum(bar, UNSEEN + 1)
    tie = 0
    if wanted < equals:
        tie, wanted, equals = _nth(position, grades, places, now, bar, wanted, equals, True, PAGES, BLOCK)
    return bar, tie


@triton.jit
def _nth(position, grades, places, now, bar, n, equals, TIES: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr):
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
        for start in range(0, places if PAGES else places + 1, BLOCK):
            _, grade, tie = _units(position, grades, start, places, now, PAGES, BLOCK)
            word = (tie if TIES else grade ^ SIGN).to(tl.uint32, bitcast=True)
            counted = (grade == bar) if TIES else (grade != UNSEEN)
            counts += ops.count_digits(word, counted, digits, shift)
        digits, n, equals = ops.next_digit(counts, digits, n, equals)
    least = (digits << (shift.to(tl.uint32) & 31)).to(tl.int32, bitcast=True)
    if not TIES:
        least = least ^ SIGN
    return least, n, equals
