"""Device functions of the second launch of a decode step, `settle`: what every policy's has in common.

One program serves one KV head of one row and goes over its N slots in blocks. What all slots depend on (a threshold, a count) is a
scalar between two such passes. `position`, `scores`, ... point to the head's row of N; `kernels_triton.py` has the other names.

The order in which slots leave is the one of `kvdsl.runtime.settle`: the lowest score first, a NaN below everything, -0 like +0, of
equal scores the older one; protected slots only when there are no others, and the newest token last of all.
"""

from __future__ import annotations

import triton
import triton.language as tl

INT_MIN: tl.constexpr = tl.constexpr(-(2**31))
INT_MAX: tl.constexpr = tl.constexpr(2**31 - 1)
NAN_RANK: tl.constexpr = tl.constexpr(-(2**31) + 1)
TRIES: tl.constexpr = tl.constexpr(2)

# -- attention ---------------------------------------------------------------------------------------------------------


@triton.jit
def combine(
    out,  # [B, H * G, E]: gets the attention's output
    part,  # [B, H, S, G, E]
    top,  # [B, H, S, G]
    total,  # [B, H, S, G]
    sinks,  # [H * G], if SINKS
    pair,
    head,
    splits,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    SINKS: tl.constexpr,
):
    """The group's attention from what the splits found; gives the log-sum-exp of each query head's logits, [G_PAD]."""
    group, s, e = tl.arange(0, G_PAD), tl.arange(0, S_PAD), tl.arange(0, E_PAD)
    lse = tl.zeros([G_PAD], tl.float32)
    for g in range(G):
        at = (pair * splits + s) * G + g
        tops = tl.load(top + at, mask=s < splits, other=float("-inf"))
        highest = tl.max(tops, 0)
        if SINKS:
            sink = tl.load(sinks + head * G + g).to(tl.float32)
            highest = tl.maximum(highest, sink)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        share = tl.exp(tops - base)
        weight = tl.sum(share * tl.load(total + at, mask=s < splits, other=0.0), 0)
        if SINKS:
            weight += tl.exp(sink - base)
        parts = tl.load(part + at[:, None] * E + e[None, :], mask=(s[:, None] < splits) & (e[None, :] < E), other=0.0)
        mixed = tl.sum(share[:, None] * parts, 0) / weight
        tl.store(out + (pair * G + g) * E + e, mixed.to(out.dtype.element_ty), mask=e < E)
        lse = tl.where(group == g, base + tl.log(weight), lse)
    return lse


@triton.jit
def nothing(out, pair, G: tl.constexpr, G_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr):
    """The output of padding: zeros."""
    g, e = tl.arange(0, G_PAD)[:, None], tl.arange(0, E_PAD)[None, :]
    zeros = tl.zeros([G_PAD, E_PAD], out.dtype.element_ty)
    tl.store(out + (pair * G + g) * E + e, zeros, mask=(g < G) & (e < E))


@triton.jit
def attn(logits, lse, i, slots, G: tl.constexpr, G_PAD: tl.constexpr, HOW: tl.constexpr):
    """The probabilities of slots i, reduced over the group."""
    g = tl.arange(0, G_PAD)
    found = tl.load(logits + g[:, None] * slots + i[None, :], mask=(g[:, None] < G) & (i[None, :] < slots), other=0.0)
    return _over_group(probability(found, lse[:, None]), g, G, HOW)


@triton.jit
def logit(logits, i, slots, G: tl.constexpr, G_PAD: tl.constexpr, HOW: tl.constexpr):
    """The scores before softmax of slots i, reduced over the group."""
    g = tl.arange(0, G_PAD)
    found = tl.load(logits + g[:, None] * slots + i[None, :], mask=(g[:, None] < G) & (i[None, :] < slots), other=0.0)
    return _over_group(found, g, G, HOW)


@triton.jit
def probability(logit, lse):
    """What softmax makes of a logit."""
    return tl.exp(logit - lse)


@triton.jit
def _over_group(x, g, G: tl.constexpr, HOW: tl.constexpr):
    """What the group's query heads give, [G_PAD, n], as one, [n]."""
    inside = g[:, None] < G
    if HOW == "max":
        return largest(x, inside, 0)
    summed = tl.sum(tl.where(inside, x, 0.0), 0)
    return tl.div_rn(summed, 1.0 * G) if HOW == "mean" else summed


# -- the new token -----------------------------------------------------------------------------------------------------


@triton.jit
def free_slot(first_free, held, pair, slots, splits, S_PAD: tl.constexpr):
    """The head's first free slot, and how many tokens it holds."""
    s = tl.arange(0, S_PAD)
    first = tl.load(first_free + pair * splits + s, mask=s < splits, other=INT_MAX)
    found = tl.load(held + pair * splits + s, mask=s < splits, other=0)
    # There always is one, unless somebody wrote into the cache's tensors; then at least write nothing outside of them.
    return tl.minimum(tl.min(first, 0), slots - 1), tl.sum(found, 0)


@triton.jit
def place_logits(logits, new_logits, slot, slots, G: tl.constexpr, G_PAD: tl.constexpr):
    """Put the new token's logits, [G], among the others', [G, N]."""
    g = tl.arange(0, G_PAD)
    tl.store(logits + g * slots + slot, tl.load(new_logits + g, mask=g < G), mask=g < G)


# -- functions of the language -----------------------------------------------------------------------------------------


@triton.jit
def minimum(a, b):
    """The smaller of two, NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(a, b):
    """The larger of two, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def square(x):
    """x squared."""
    return x * x


@triton.jit
def modulo(a, b):
    """The remainder with the sign of the divisor, as Python has it."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def power(x, y):
    """x to the power y, in double precision, as C has it."""
    base, exponent = tl.cast(x, tl.float64), tl.cast(y, tl.float64)
    size = tl.exp(exponent * tl.log(tl.abs(base)))
    whole = tl.floor(exponent) == exponent
    odd = whole & (tl.floor(exponent * 0.5) * 2 != exponent)
    signed = tl.where(base < 0, tl.where(whole, tl.where(odd, -size, size), float("nan")), size)
    one = (exponent == 0) | (base == 1) | ((base == -1) & (tl.abs(exponent) == float("inf")))
    return tl.where(one, 1.0, signed)


@triton.jit
def ema(old, x, decay, age):
    """A moving average after x has joined it. A token's own query, at which its age is 0, is the first to."""
    return tl.where(age == 0, x, decay * old + (1 - decay) * x)


@triton.jit
def observed(pos, newest, window):
    """How many queries could see a slot, its own token's included."""
    return tl.minimum(newest - pos + 1, window).to(tl.float32)


@triton.jit
def random_key(seed, layer, head):
    """The hash that a head's random numbers have in common."""
    return _absorb(_absorb(seed.to(tl.uint32), layer), head)


@triton.jit
def random(key, pos, newest):
    """In [0, 1), with the 24 bits that a float holds exactly."""
    return (_absorb(_absorb(key, pos), newest) >> 8).to(tl.int32).to(tl.float32) * 2.0**-24


@triton.jit
def _absorb(hash, word):
    """murmur3's finalizer over one more word."""
    x = hash ^ (word.to(tl.uint32) * 0x9E3779B9)
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


# -- reductions of a vector --------------------------------------------------------------------------------------------


@triton.jit
def total(x, mask):
    """The sum of what the mask lets through."""
    return tl.sum(tl.where(mask, x, 0.0), 0)


@triton.jit
def largest(x, mask, AXIS: tl.constexpr = 0):
    """The largest of what the mask lets through, NaN if any is."""
    nan = tl.max((mask & (x != x)).to(tl.int32), AXIS) != 0
    return tl.where(nan, float("nan"), tl.max(tl.where(mask & (x == x), x, float("-inf")), AXIS))


@triton.jit
def least(x, mask):
    """The smallest of what the mask lets through, NaN if any is."""
    return -largest(-x, mask)


@triton.jit
def mean(x, mask):
    """The mean of what the mask lets through."""
    return tl.div_rn(total(x, mask), tl.sum(mask.to(tl.float32), 0))


@triton.jit
def var(x, mask):
    """The population variance of what the mask lets through."""
    return mean(square(x - mean(x, mask)), mask)


# -- rings -------------------------------------------------------------------------------------------------------------


@triton.jit
def ring_row(ring, stride, size, query):
    """A ring's row of the query at this position: one of `size` rows, `stride` apart."""
    return ring + (query % size).to(tl.int64) * stride


@triton.jit
def ring_count(pos, newest, window, size):
    """How many of the newest `size` queries could see a slot."""
    first, last = tl.maximum(pos, newest - size + 1), tl.minimum(pos + (window - 1), newest)
    return tl.maximum(last - first + 1, 0).to(tl.float32)


@triton.jit
def ring_sum(ring, stride, size, i, pos, newest, window):
    """The sum of what the newest `size` queries gave slots i, of those that could see them."""
    summed = tl.zeros(pos.shape, tl.float32)
    for query in range(tl.maximum(newest - size + 1, 0), newest + 1):
        saw = (pos >= 0) & (pos <= query) & (query - pos < window)
        summed += tl.load(ring_row(ring, stride, size, query) + i, mask=saw, other=0.0)
    return summed


@triton.jit
def ring_mean(ring, stride, size, i, pos, newest, window):
    """Their mean; NaN where there is none."""
    return tl.div_rn(ring_sum(ring, stride, size, i, pos, newest, window), ring_count(pos, newest, window, size))


@triton.jit
def ring_var(ring, stride, size, i, pos, newest, window):
    """Their population variance, in two passes: no cancellation."""
    centre = ring_mean(ring, stride, size, i, pos, newest, window)
    summed = tl.zeros(pos.shape, tl.float32)
    for query in range(tl.maximum(newest - size + 1, 0), newest + 1):
        saw = (pos >= 0) & (pos <= query) & (query - pos < window)
        x = tl.load(ring_row(ring, stride, size, query) + i, mask=saw, other=0.0)
        summed += tl.where(saw, square(x - centre), 0.0)
    return tl.div_rn(summed, ring_count(pos, newest, window, size))


@triton.jit
def ring_std(ring, stride, size, i, pos, newest, window):
    """Their population deviation."""
    return tl.sqrt_rn(ring_var(ring, stride, size, i, pos, newest, window))


@triton.jit
def ring_max(ring, stride, size, i, pos, newest, window):
    """The largest of them."""
    top = tl.full(pos.shape, float("-inf"), tl.float32)
    for query in range(tl.maximum(newest - size + 1, 0), newest + 1):
        saw = (pos >= 0) & (pos <= query) & (query - pos < window)
        x = tl.load(ring_row(ring, stride, size, query) + i, mask=saw, other=float("-inf"))
        top = maximum(top, x)
    return top


@triton.jit
def ring_min(ring, stride, size, i, pos, newest, window):
    """The smallest of them."""
    low = tl.full(pos.shape, float("inf"), tl.float32)
    for query in range(tl.maximum(newest - size + 1, 0), newest + 1):
        saw = (pos >= 0) & (pos <= query) & (query - pos < window)
        x = tl.load(ring_row(ring, stride, size, query) + i, mask=saw, other=float("inf"))
        low = minimum(low, x)
    return low


# -- who leaves --------------------------------------------------------------------------------------------------------


@triton.jit
def count(x):
    """A count of tokens from one of the policy's numbers: floored, never negative."""
    return tl.where(x >= 1, tl.minimum(x, 2147483647.0), 0.0).to(tl.int32)


@triton.jit
def overflow(live, budget, trigger, slack, max_drop):
    """How many tokens must leave: none before live - budget reaches trigger (0: never), then down to the budget, or with max_drop
    by so many at a time, to no more than budget + slack."""
    most = budget + tl.minimum(slack, INT_MAX - budget)
    staged = tl.minimum(tl.maximum(live - max_drop, budget), most)
    target = tl.where(max_drop > 0, staged, budget)
    return tl.where((trigger > 0) & (live - budget >= trigger), tl.maximum(live - target, 0), 0)


@triton.jit
def first_protected(position, slots, newest, live, n, BLOCK: tl.constexpr):
    """The position up to which tokens are among the first n; -1 for none."""
    last = -1
    if n >= live:
        last = newest
    elif n > 0:
        last = _nth_position(position, slots, newest, live, n, BLOCK)
    return last


@triton.jit
def last_protected(position, slots, newest, live, n, BLOCK: tl.constexpr):
    """The position from which on tokens are among the last n; above the newest for none."""
    from_here = newest + 1
    if n >= live:
        from_here = 0
    elif n == 1:
        from_here = newest
    elif n > 0:
        from_here = _nth_position(position, slots, newest, live, live - n + 1, BLOCK)
    return from_here


@triton.jit
def _nth_position(position, slots, newest, live, n, BLOCK: tl.constexpr):
    """The n-th lowest position that is held. Mostly the tokens on one side of it are contiguous, which one count proves."""
    low, high = n - 1, newest - (live - n)  # it lies here
    if _at_most(position, slots, low, BLOCK) == n:
        high = low
    elif _at_most(position, slots, high - 1, BLOCK) < n:
        low = high
    while low < high:
        middle = low + (high - low) // 2
        if _at_most(position, slots, middle, BLOCK) >= n:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _at_most(position, slots, bar, BLOCK: tl.constexpr):
    """How many tokens have a position up to this one."""
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, slots, BLOCK):
        i = start + tl.arange(0, BLOCK)
        pos = tl.load(position + i, mask=i < slots, other=-1)
        found += ((pos >= 0) & (pos <= bar)).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def rank(x):
    """Integers in the order of x: NaN lowest, -0 = +0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & INT_MAX), NAN_RANK)


@triton.jit
def evict(
    position,
    scores,  # [1 + TOPS, N] float32: what the slots are ranked by, and what each `keep top` ranks them by
    kept,  # [N] int8: not 0 where protected already
    slots,
    newest,
    leaving,
    tops,  # how many each `keep top` protects
    TOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Free the `leaving` slots that leave first."""
    done = 0
    if leaving == 1:
        done = _evict_one(position, scores, kept, slots, tops, TOPS, BLOCK)
    if done == 0:
        for t in tl.static_range(TOPS):
            _protect_top(position, scores + (1 + t) * slots, kept, slots, newest, tops[t], BLOCK)
        free = _above(position, scores, kept, slots, newest, INT_MIN, INT_MAX, "free", BLOCK)
        _evict_lowest(position, scores, kept, slots, newest, tl.minimum(leaving, free), free, "free", BLOCK)
        if leaving > free:
            tl.debug_barrier()
            others = _above(position, scores, kept, slots, newest, INT_MIN, INT_MAX, "kept", BLOCK)
            _evict_lowest(position, scores, kept, slots, newest, leaving - free, others, "kept", BLOCK)


@triton.jit
def _evict_one(position, scores, kept, slots, tops, TOPS: tl.constexpr, BLOCK: tl.constexpr):
    """One victim, as in every step of the steady state: take the lowest slot and count how many rank above it where tops are
    protected; while it proves protected, take the next. 0 if it is not found in a few tries, else 1."""
    done, tries = 0, 0
    while (tries < TRIES) & (done == 0):
        slot = _lowest(position, scores, kept, slots, BLOCK)
        leaves = slot >= 0
        own = tl.maximum(slot, 0)
        for t in tl.static_range(TOPS):
            top = scores + (1 + t) * slots
            bar, after = rank(tl.load(top + own)), tl.load(position + own)
            leaves = leaves & (_above(position, top, kept, slots, 0, bar, after, "all", BLOCK) >= tops[t])
        if leaves:
            tl.store(position + own, -1)
        elif slot >= 0:
            tl.store(kept + own, 1)
            tl.debug_barrier()
        done = leaves.to(tl.int32)
        tries = tl.where(slot >= 0, tries + 1, TRIES)
    return done


@triton.jit
def _lowest(position, scores, kept, slots, BLOCK: tl.constexpr):
    """The slot that leaves first of those that are not protected; -1 if all are."""
    lowest = tl.full([BLOCK], 2**63 - 1, tl.int64)
    where = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, slots, BLOCK):
        i, pos, ranks, member = _ranked(position, scores, kept, start, slots, 0, "free", BLOCK)
        key = (ranks.to(tl.int64) << 32) | pos.to(tl.int64)
        lower = member & (key < lowest)
        lowest, where = tl.where(lower, key, lowest), tl.where(lower, i, where)
    return tl.max(tl.where(lowest == tl.min(lowest, 0), where, -1), 0)


@triton.jit
def _protect_top(position, top, kept, slots, newest, n, BLOCK: tl.constexpr):
    """Protect the n slots that rank highest."""
    if n > 0:
        bar, after = _cut(position, top, kept, slots, newest, n, "all", BLOCK)
        for start in range(0, slots, BLOCK):
            i, pos, ranks, member = _ranked(position, top, kept, start, slots, newest, "all", BLOCK)
            tl.store(kept + i, 1, mask=member & ((ranks > bar) | ((ranks == bar) & (pos > after))))
        tl.debug_barrier()


@triton.jit
def _evict_lowest(position, scores, kept, slots, newest, n, members, OF: tl.constexpr, BLOCK: tl.constexpr):
    """Free the n lowest of so many slots."""
    if n > 0:
        bar, after = _cut(position, scores, kept, slots, newest, members - n, OF, BLOCK)
        tl.debug_barrier()
        for start in range(0, slots, BLOCK):
            i, pos, ranks, member = _ranked(position, scores, kept, start, slots, newest, OF, BLOCK)
            tl.store(position + i, -1, mask=member & ((ranks < bar) | ((ranks == bar) & (pos <= after))))


@triton.jit
def _cut(position, x, kept, slots, newest, n, OF: tl.constexpr, BLOCK: tl.constexpr):
    """The rank and position above which there are n slots, or all of them if they are fewer: bit by bit, a count for each."""
    low, high = INT_MIN, INT_MAX  # more than n above low (or all), at most n above high
    after = newest
    found = 0  # above high
    while (low < high - 1) & (found != n):
        middle = (low & high) + ((low ^ high) >> 1)
        above = _above(position, x, kept, slots, newest, middle, INT_MAX, OF, BLOCK)
        if above > n:
            low = middle
        else:
            high, found = middle, above
    if found < n:  # of those that rank equal, the newer
        oldest = -1
        while oldest < after:
            middle = oldest + (after - oldest) // 2
            above = _above(position, x, kept, slots, newest, high, middle, OF, BLOCK)
            if above > n:
                oldest = middle + 1
            else:
                after = middle
    return high, after


@triton.jit
def _above(position, x, kept, slots, newest, bar, after, OF: tl.constexpr, BLOCK: tl.constexpr):
    """How many slots rank above `bar`, or there but at a position above `after`."""
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, slots, BLOCK):
        i, pos, ranks, member = _ranked(position, x, kept, start, slots, newest, OF, BLOCK)
        found += (member & ((ranks > bar) | ((ranks == bar) & (pos > after)))).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _ranked(position, x, kept, start, slots, newest, OF: tl.constexpr, BLOCK: tl.constexpr):
    """A block of slots, their positions and ranks, and which count: `all` tokens, the `free` ones that nothing protects, or the
    `kept` ones, of which the newest ranks above the rest."""
    i = start + tl.arange(0, BLOCK)
    pos = tl.load(position + i, mask=i < slots, other=-1)
    member = pos >= 0
    ranks = rank(tl.load(x + i, mask=member, other=0.0))
    if OF != "all":
        protected = tl.load(kept + i, mask=member, other=0) != 0
        member = member & (protected if OF == "kept" else ~protected)
    if OF == "kept":
        ranks = tl.where(pos == newest, INT_MAX, ranks)
    return i, pos, ranks, member
