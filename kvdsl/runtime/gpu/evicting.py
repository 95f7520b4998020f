"""Device functions of `settle` that choose and evict victims.

The programs of `settle` share a KV head's slots. Each ranks its own slots and finds its first victim; the last program to finish takes
the lowest of these. No two slots have the same key, so the result does not depend on the programs' order.

`kvdsl.runtime.torch.settle` defines the order of eviction, and how many tokens leave.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import ops

UNPROTECTED, EVERYTHING = tl.constexpr(0), tl.constexpr(-1)  # which slots to rank: a class of `kept`, or all
CLASSES = tl.constexpr(3)  # unprotected, protected, and first and last tokens that are evicted last
NOBODY = tl.constexpr(-1)  # passed as `newest` where no token is exempt
TRIES = tl.constexpr(8)
FLIP = tl.constexpr(-(2**31))  # flips the sign bit, so that unsigned digits sort like signed words
WIDE = tl.constexpr(2048)
"""Slots per iteration over all slots of a head. Iterations over a program's share take fewer, because they also hold logits."""


@triton.jit
def overflow(live, budget, trigger, slack, max_drop):
    """Return how many tokens to evict; a trigger of 0 never fires."""
    leaving = tl.maximum(live - _target(live, budget, slack, max_drop), 0)
    return tl.where((trigger > 0) & (live - budget >= trigger), leaving, 0)


@triton.jit
def overflow_before_placing(live, budget, trigger, slack, max_drop):
    """Return how many tokens to evict so that one more fits the hard cap, budget + slack."""
    leaving = tl.maximum(live + 1 - _target(live + 1, budget, slack, max_drop), 0)
    return tl.where(live + 1 > _most(budget, slack), leaving, 0)


@triton.jit
def _target(live, budget, slack, max_drop):
    """Return how many tokens remain after eviction."""
    staged = tl.minimum(tl.maximum(live - max_drop, budget), _most(budget, slack))
    return tl.where(max_drop > 0, staged, budget)


@triton.jit
def _most(budget, slack):
    return budget + tl.minimum(slack, -budget + ops.INT_MAX)  # in this order, for Triton's interpreter 3.7 and 3.8


@triton.jit
def tokens_held(position, slots, BLOCK: tl.constexpr):
    """Return how many slots hold a token."""
    return _at_most(position, slots, ops.INT_MAX, BLOCK)


@triton.jit
def put_in_order(position, order, slots, BLOCK: tl.constexpr):
    """Store the slots that hold a token, then the free ones, each ascending: `order`, [N] int64."""
    held, before = tokens_held(position, slots, BLOCK), 0
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        holds = (tl.load(position + i, mask=i < slots, other=-1) >= 0).to(tl.int32)
        nth = before + tl.cumsum(holds, 0) - holds  # tokens in the slots before
        tl.store(order + tl.where(holds > 0, nth, held + i - nth), i.to(tl.int64), mask=i < slots)
        before += tl.sum(holds, 0)


@triton.jit
def first_protected(position, slots, newest, live, n, BLOCK: tl.constexpr):
    """Return the position of the n-th token from the start: tokens up to it are the first n. -1: none."""
    WHOLE: tl.constexpr = BLOCK if BLOCK > WIDE else WIDE
    last = -1
    if n >= live:
        last = newest
    elif n > 0:
        last = _nth_position(position, slots, newest, live, n, WHOLE)
    return last


@triton.jit
def last_protected(position, slots, newest, live, n, BLOCK: tl.constexpr):
    """Return the position of the n-th token from the end: tokens from it on are the last n. newest + 1: none."""
    WHOLE: tl.constexpr = BLOCK if BLOCK > WIDE else WIDE
    from_here = newest + 1
    if n >= live:
        from_here = 0
    elif n == 1:
        from_here = newest
    elif n > 0:
        from_here = _nth_position(position, slots, newest, live, live - n + 1, WHOLE)
    return from_here


@triton.jit
def _nth_position(position, slots, newest, live, n, BLOCK: tl.constexpr):
    """Return the n-th lowest cached position. The tokens on one side of it are usually contiguous, which one count confirms."""
    low, high = n - 1, newest - (live - n)  # bounds of the result
    tried = 0
    while low < high:
        middle = tl.where(tried == 0, low, tl.where(tried == 1, high - 1, low + (high - low) // 2))
        if _at_most(position, slots, middle, BLOCK) >= n:
            high = middle
        else:
            low = middle + 1
        tried += 1
    return low


@triton.jit
def _at_most(position, slots, bar, BLOCK: tl.constexpr):
    """Return how many tokens have a position up to `bar`."""
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        pos = tl.load(position + i, mask=i < slots, other=-1)
        found += ((pos >= 0) & (pos <= bar)).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _key(x, pos):
    """Return unique int64 sort keys: by grade, then by position."""
    return (ops.grade(x).to(tl.int64) << 32) | pos.to(tl.int64)


# -- programs that share a head's slots --------------------------------------------------------------------------------


@triton.jit
def ends(now, live, first, last):
    """Return the last position of the `first` tokens and the first position of the `last`, if none of these has been evicted."""
    return tl.minimum(first, live) - 1, now + 1 - tl.minimum(last, live)


@triton.jit
def lower(lowest, where, certain, i, pos, score, keep, first, last):
    """Merge a block into the running state: the lowest unprotected keys, their slots, and counts of tokens at an end; [BLOCK] each."""
    key = _key(tl.cast(score, tl.float32), pos)
    lower = (pos >= 0) & (tl.cast(keep, tl.int32) == 0) & (key < lowest)
    certain += ((pos >= 0) & (pos <= first)).to(tl.int32) + (pos >= last).to(tl.int32)
    return tl.where(lower, key, lowest), tl.where(lower, i, where), certain


@triton.jit
def leaves_first(lowest, where):
    """Return the lowest of several keys, and its slot; -1 if all slots are protected."""
    key = tl.min(lowest, 0)
    return key, tl.max(tl.where(lowest == key, where, -1), 0)


@triton.jit
def arrive(
    arrived,  # see `ops.last_to_arrive`
    lowest,  # [B, H, PIECES] int64: receives each program's lowest key
    victim,  # [B, H, PIECES] int32: receives its slot
    certain,  # [B, H, PIECES] int32: receives the number of its tokens at an end
    pair,
    piece,
    pieces,
    own_lowest,
    own_where,
    own_certain,
):
    """Store what this program found. Return whether it is the last of its head's programs to finish."""
    key, slot = leaves_first(own_lowest, own_where)
    mine = pair * pieces + piece
    tl.store(lowest + mine, key)
    tl.store(victim + mine, slot)
    tl.store(certain + mine, tl.sum(own_certain, 0))
    return ops.last_to_arrive(arrived, pair, pieces)


@triton.jit
def found_by_all(lowest, victim, certain, pair, pieces, PIECES_PAD: tl.constexpr):
    """Return the head's first victim, -1 if all slots are protected, and the number of tokens at an end."""
    p = tl.arange(0, PIECES_PAD)
    mine, there = pair * pieces + p, p < pieces
    keys = tl.load(lowest + mine, mask=there, other=ops.ABOVE_ALL)
    _, slot = leaves_first(keys, tl.load(victim + mine, mask=there, other=-1))
    return slot, tl.sum(tl.load(certain + mine, mask=there, other=0), 0)


@triton.jit
def ends_are_there(found, live, first, last):
    """Return whether the `first` and `last` tokens are where the programs assumed. If fewer were `found`, some have been evicted before."""
    return found >= tl.minimum(first, live) + tl.minimum(last, live)


@triton.jit
def protect_ends(position, kept, slots, now, live, first, last, ENDS: tl.constexpr, BLOCK: tl.constexpr):
    """Protect the current `first` and `last` tokens with class ENDS."""
    WHOLE: tl.constexpr = BLOCK if BLOCK > WIDE else WIDE
    up_to = first_protected(position, slots, now, live, first, BLOCK)
    since = last_protected(position, slots, now, live, last, BLOCK)
    for start in range(0, slots, WHOLE):
        i = start + tl.arange(0, WHOLE)
        pos = tl.load(position + i, mask=i < slots, other=-1)
        tl.store(kept + i, ENDS, mask=(i < slots) & ((pos <= up_to) | (pos >= since)))
    tl.debug_barrier()


# -- victims -----------------------------------------------------------------------------------------------------------


@triton.jit
def evict(
    position,
    scores,  # [1 + TOPS, N] float32: the scores to evict by, then the scores of each `keep top`
    kept,  # [N] int8: the class of each slot, without tops
    slots,
    leaving,
    slot,  # the first victim without tops; -1: unknown
    tops,  # number of slots that each `keep top` protects
    TOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Evict the first `leaving` victims. Return the victim if `_evict_one` evicted it, otherwise -1."""
    WHOLE: tl.constexpr = BLOCK if BLOCK > WIDE else WIDE
    gone = -1
    if leaving == 1:
        gone = _evict_one(position, scores, kept, slots, slot, tops, TOPS, WHOLE)
    if gone < 0:
        for t in tl.static_range(TOPS):
            protect_top(position, scores + (1 + t) * slots, kept, slots, tops[t], WHOLE)
        newest = _newest_held(position, slots, WHOLE)  # the row's newest token may have been evicted before
        for members in range(CLASSES):
            if leaving > 0:
                free = _above(position, scores, kept, slots, newest, ops.BELOW_ALL, members, WHOLE)
                _evict_lowest(position, scores, kept, slots, newest, tl.minimum(leaving, free), free, members, WHOLE)
                leaving = tl.maximum(leaving - free, 0)
    return gone


@triton.jit
def _newest_held(position, slots, BLOCK: tl.constexpr):
    """Return the position of the newest cached token."""
    found = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        found = tl.maximum(found, tl.load(position + i, mask=i < slots, other=-1))
    return tl.max(found, 0)


@triton.jit
def evict_known(position, scores, kept, slots, slot, tops, TOPS: tl.constexpr, BLOCK: tl.constexpr):
    """Evict the lowest slot, as nearly every step of the steady state does. Return it, or -1 if a `keep top` protects it or it is -1.

    Of `scores` only the rows of each `keep top` are read, to count the slots above it; `kept` is not.
    """
    WHOLE: tl.constexpr = BLOCK if BLOCK > WIDE else WIDE
    leaves = slot >= 0
    own = tl.maximum(slot, 0)
    pos = tl.load(position + own)
    for t in tl.static_range(TOPS):
        top = scores + (1 + t) * slots
        bar = _key(tl.load(top + own), pos)
        leaves = leaves & (_above(position, top, kept, slots, NOBODY, bar, EVERYTHING, WHOLE) >= tops[t])
    if leaves:
        tl.store(position + own, -1)
    return tl.where(leaves, own, -1)


@triton.jit
def _evict_one(position, scores, kept, slots, slot, tops, TOPS: tl.constexpr, BLOCK: tl.constexpr):
    """Evict the lowest slot that no `keep top` protects. Return it, or -1 if TRIES attempts find none."""
    gone, tries = -1, 0
    while (tries < TRIES) & (gone < 0):
        if slot < 0:
            slot = _lowest(position, scores, kept, slots, BLOCK)
        gone = evict_known(position, scores, kept, slots, slot, tops, TOPS, BLOCK)
        if (gone < 0) & (slot >= 0):
            tl.store(kept + slot, 1)
            tl.debug_barrier()
        tries = tl.where(slot >= 0, tries + 1, TRIES)
        slot = -1
    return gone


@triton.jit
def _lowest(position, scores, kept, slots, BLOCK: tl.constexpr):
    """Return the unprotected slot with the lowest key; -1 if all are protected."""
    lowest = tl.full([BLOCK], ops.ABOVE_ALL, tl.int64)
    where = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, slots, BLOCK):
        i, key = _keys(position, scores, kept, start, slots, NOBODY, UNPROTECTED, BLOCK)
        lower = (key != ops.BELOW_ALL) & (key < lowest)
        lowest, where = tl.where(lower, key, lowest), tl.where(lower, i, where)
    _, slot = leaves_first(lowest, where)
    return slot


@triton.jit
def protect_top(position, top, kept, slots, n, BLOCK: tl.constexpr):
    """Protect the n highest-ranked slots; slots with a class keep it."""
    live = _above(position, top, kept, slots, NOBODY, ops.BELOW_ALL, EVERYTHING, BLOCK)
    bar = _cut(position, top, kept, slots, NOBODY, tl.minimum(n, live), live, EVERYTHING, BLOCK)
    for start in range(0, slots, BLOCK):
        i, key = _keys(position, top, kept, start, slots, NOBODY, EVERYTHING, BLOCK)
        own = tl.load(kept + i, mask=i < slots, other=0)
        tl.store(kept + i, 1, mask=(key > bar) & (own == UNPROTECTED))
    tl.debug_barrier()


@triton.jit
def _evict_lowest(position, scores, kept, slots, newest, n, free, members, BLOCK: tl.constexpr):
    """Evict the n lowest of the `free` slots in a class."""
    if n > 0:
        bar = _cut(position, scores, kept, slots, newest, free - n, free, members, BLOCK)
        tl.debug_barrier()
        for start in range(0, slots, BLOCK):
            i, key = _keys(position, scores, kept, start, slots, newest, members, BLOCK)
            tl.store(position + i, -1, mask=(key != ops.BELOW_ALL) & (key <= bar))
        tl.debug_barrier()


@triton.jit
def _cut(position, x, kept, slots, newest, n, equals, members, BLOCK: tl.constexpr):
    """Return a key that exactly n of the `equals` ranked slots exceed."""
    wanted = tl.maximum(n, 1)
    grade, wanted, equals = _nth(position, x, kept, slots, newest, 0, wanted, equals, members, False, BLOCK)
    grade = tl.maximum(grade, ops.NAN_GRADE)
    tie = 0
    if wanted < equals:
        tie, wanted, equals = _nth(position, x, kept, slots, newest, grade, wanted, equals, members, True, BLOCK)
    return tl.where(n > 0, ((grade.to(tl.int64) << 32) | tie) - 1, ops.ABOVE_ALL)


@triton.jit
def _nth(position, x, kept, slots, newest, bar, n, equals, members, TIES: tl.constexpr, BLOCK: tl.constexpr):
    """Find the n-th highest grade of the ranked slots, or with TIES the n-th highest position among those of grade `bar`.

    As `select._nth`, of `equals` slots.
    """
    shift, digits = tl.full([], 32, tl.int32), tl.full([], 0, tl.uint32)
    while (shift > 0) & (n < equals):
        shift -= ops.DIGIT
        counts = tl.zeros([ops.DIGITS], tl.int32)
        for start in range(0, slots, BLOCK):
            _, key = _keys(position, x, kept, start, slots, newest, members, BLOCK)
            grade, tie = (key >> 32).to(tl.int32), key.to(tl.int32)
            word = (tie if TIES else grade ^ FLIP).to(tl.uint32, bitcast=True)
            counted = (key != ops.BELOW_ALL) & ((grade == bar) if TIES else True)
            counts += ops.count_digits(word, counted, digits, shift)
        digits, n, equals = ops.next_digit(counts, digits, n, equals)
    least = (digits << (shift.to(tl.uint32) & 31)).to(tl.int32, bitcast=True)
    if not TIES:
        least = least ^ FLIP
    return least, n, equals


@triton.jit
def _above(position, x, kept, slots, newest, bar, members, BLOCK: tl.constexpr):
    """Return how many slots have a key above `bar`."""
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, slots, BLOCK):
        _, key = _keys(position, x, kept, start, slots, newest, members, BLOCK)
        found += (key > bar).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _keys(position, x, kept, start, slots, newest, members, BLOCK: tl.constexpr):
    """Return a block of slots, and their keys.

    Free slots and slots outside the class `members` have BELOW_ALL. A protected class's newest token has ABOVE_ALL: it is evicted last.
    """
    i = start + tl.arange(0, BLOCK)
    inside = i < slots  # a mask of `i` alone permits wide loads; values of free slots are discarded below
    pos = tl.load(position + i, mask=inside, other=-1)
    counts = pos >= 0
    key = _key(tl.load(x + i, mask=inside, other=0.0), pos)
    if members != EVERYTHING:
        counts = counts & (tl.load(kept + i, mask=inside, other=0) == members)
        key = tl.where((pos == newest) & (members != UNPROTECTED), ops.ABOVE_ALL, key)
    return i, tl.where(counts, key, ops.BELOW_ALL)


# -- heads that agree --------------------------------------------------------------------------------------------------


@triton.jit
def average_over_heads(
    scores,  # [H, SCORES, N] float32: the scores; the first head's rows receive the means
    kept,  # [H, N] int8: the classes of the slots; the first head's row receives the highest
    slots,
    heads,
    SCORES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the mean scores and the highest classes over a row's heads to the first head's rows."""
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < slots
        for s in tl.static_range(SCORES):
            summed = tl.zeros([BLOCK], tl.float32)
            for head in range(heads):
                summed += tl.load(scores + (head * SCORES + s) * slots + i, mask=inside, other=0.0)
            tl.store(scores + s * slots + i, tl.div_rn(summed, tl.zeros([BLOCK], tl.float32) + heads), mask=inside)
        held = tl.zeros([BLOCK], tl.int32)
        for head in range(heads):
            held = tl.maximum(held, tl.load(kept + head * slots + i, mask=inside, other=0).to(tl.int32))
        tl.store(kept + i, held.to(tl.int8), mask=inside)


@triton.jit
def leave_together(position, slots, heads, BLOCK: tl.constexpr):
    """Evict from the other heads, [H, N], the slots that are free in the first one."""
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        gone = tl.load(position + i, mask=i < slots, other=0) < 0
        for head in range(1, heads):
            tl.store(position + head * slots + i, -1, mask=gone)


# -- ranks -------------------------------------------------------------------------------------------------------------


@triton.jit
def close_gaps(
    position,
    rank,  # [N] int32: number of live slots with an earlier token; stale in freed slots, -1 in free ones
    gaps,  # [N] int32: scratch
    slots,
    gone,  # the only freed slot; -1: maybe several
    BLOCK: tl.constexpr,
):
    """Update ranks after evictions, without sorting. For one freed slot a comparison suffices; for several, count the gaps."""
    WHOLE: tl.constexpr = BLOCK if BLOCK > WIDE else WIDE
    several, only = gone < 0, tl.load(rank + tl.maximum(gone, 0))
    tl.debug_barrier()
    if several:
        _count_gaps(position, rank, gaps, slots, WHOLE)
    for start in range(0, slots, WHOLE):
        i = start + tl.arange(0, WHOLE)
        held = tl.load(position + i, mask=i < slots, other=-1) >= 0
        own = tl.load(rank + i, mask=held, other=0)
        before = (own > only).to(tl.int32)
        if several:
            before = tl.load(gaps + own, mask=held, other=0)
        tl.store(rank + i, tl.where(held, own - before, -1), mask=i < slots)


@triton.jit
def _count_gaps(position, rank, gaps, slots, BLOCK: tl.constexpr):
    """Write to `gaps` how many freed slots have a rank up to each rank."""
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(gaps + i, 0, mask=i < slots)
    tl.debug_barrier()
    for start in range(0, slots, BLOCK):
        was = _rank_of_freed(position, rank, start, slots, BLOCK)
        tl.store(gaps + was, 1, mask=was >= 0)
    tl.debug_barrier()
    before = 0
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        gap = tl.load(gaps + i, mask=i < slots, other=0)
        tl.store(gaps + i, before + tl.cumsum(gap, 0), mask=i < slots)
        before += tl.sum(gap, 0)
    tl.debug_barrier()


@triton.jit
def _rank_of_freed(position, rank, start, slots, BLOCK: tl.constexpr):
    """Return the former ranks of a block's freed slots; -1 for the others."""
    i = start + tl.arange(0, BLOCK)
    free = tl.load(position + i, mask=i < slots, other=0) < 0
    return tl.load(rank + i, mask=free, other=-1)
