"""Device functions of the second launch of a decode step, `settle`: what every policy's has in common.

One program serves one KV head of one row and goes over its N slots in blocks. What all slots depend on (a threshold, a count) is a
scalar between two such passes. `position`, `scores`, ... point to the head's row of N; `kernels_triton.py` has the other names.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import packed

INT_MAX = tl.constexpr(2**31 - 1)
NAN_GRADE = tl.constexpr(-(2**31) + 1)
BELOW_ALL, ABOVE_ALL = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)  # of grades with something below them to break ties

DIGIT, DIGITS = tl.constexpr(8), tl.constexpr(256)  # bits of a digit, and how many digits there are
COMBINED = tl.constexpr(4096)
"""Numbers of splits' parts that are combined at a time: 8 a thread."""

# -- attention ---------------------------------------------------------------------------------------------------------


@triton.jit
def row_of(which, row, SOME: tl.constexpr):
    """The row of the cache that a row of the step is."""
    if SOME:
        row = tl.load(which + row)
    return row


@triton.jit
def log_sum_exp(
    top,  # [B, H, S, G], with `total`: what each split of `attend` found
    total,  # [B, H, S, G]
    sinks,  # [H * G], if SINKS
    pair,
    head,
    splits,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    SINKS: tl.constexpr,
):
    """That of each query head's logits, [G_PAD], as a number near the largest one and what is above it: far from 0, their sum would be
    rounded to the former.
    """
    base, weight = _softmax(top, total, sinks, pair, head, splits, G, G_PAD, S_PAD, SINKS)
    return base, tl.log(weight)


@triton.jit
def combine(
    out,  # [B, H * G, E]: gets the attention's output
    part,  # [B, H, S, G, E], with all that follows as for `log_sum_exp`
    top,
    total,
    sinks,
    pair,
    head,
    splits,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    KV: tl.constexpr,
):
    """The group's attention from what the splits found."""
    base, weight = _softmax(top, total, sinks, pair, head, splits, G, G_PAD, S_PAD, SINKS)
    group = tl.arange(0, G_PAD)

    # All heads' parts at once, so many splits at a time as registers hold: loads that wait for no barrier.
    OF_A_SPLIT: tl.constexpr = G_PAD * E_PAD
    MOST: tl.constexpr = COMBINED // OF_A_SPLIT if OF_A_SPLIT < COMBINED else 1
    TOGETHER: tl.constexpr = MOST if MOST < S_PAD else S_PAD
    g, e = group[None, :, None], tl.arange(0, E_PAD)[None, None, :]
    mixed = tl.zeros([TOGETHER, G_PAD, E_PAD], tl.float32)
    for start in range(0, splits, TOGETHER):
        s = start + tl.arange(0, TOGETHER)
        own, _ = _found(top, total, pair, s, group, splits, G)
        share = tl.exp(own - base[None, :])[:, :, None]
        at = ((pair * splits + s[:, None, None]) * G + g) * E + e
        mixed += share * tl.load(part + at, mask=(s[:, None, None] < splits) & (g < G) & (e < E), other=0.0)
    found = packed.plain(tl.sum(mixed, 0) / weight[:, None], E, E_PAD, KV)
    g, e = group[:, None], tl.arange(0, E_PAD)[None, :]
    tl.store(out + (pair * G + g) * E + e, found.to(out.dtype.element_ty), mask=(g < G) & (e < E))


@triton.jit
def _softmax(
    top, total, sinks, pair, head, splits, G: tl.constexpr, G_PAD: tl.constexpr, S_PAD: tl.constexpr, SINKS: tl.constexpr
):
    """A number near the largest logit of each query head, and the sum of exp(logit - that), [G_PAD]."""
    group = tl.arange(0, G_PAD)
    tops, totals = _found(top, total, pair, tl.arange(0, S_PAD), group, splits, G)
    highest = tl.max(tops, 0)
    if SINKS:
        sink = tl.load(sinks + head * G + group, mask=group < G, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.sum(tl.exp(tops - base[None, :]) * totals, 0)
    if SINKS:
        weight += tl.exp(sink - base)
    return base, weight


@triton.jit
def _found(top, total, pair, s, g, splits, G: tl.constexpr):
    """The largest logits of splits s and the sums of their weights, [n, G_PAD]; -inf and 0 where there is no split or head."""
    at = (pair * splits + s[:, None]) * G + g[None, :]
    there = (s[:, None] < splits) & (g[None, :] < G)
    return tl.load(top + at, mask=there, other=float("-inf")), tl.load(total + at, mask=there, other=0.0)


@triton.jit
def nothing(out, pair, G: tl.constexpr, G_PAD: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr):
    """The output of padding: zeros."""
    g, e = tl.arange(0, G_PAD)[:, None], tl.arange(0, E_PAD)[None, :]
    zeros = tl.zeros([G_PAD, E_PAD], out.dtype.element_ty)
    tl.store(out + (pair * G + g) * E + e, zeros, mask=(g < G) & (e < E))


@triton.jit
def attn(logits, base, above, i, slots, G: tl.constexpr, G_PAD: tl.constexpr, HOW: tl.constexpr):
    """The probabilities of slots i, reduced over the group."""
    g = tl.arange(0, G_PAD)
    found = tl.load(logits + g[:, None] * slots + i[None, :], mask=(g[:, None] < G) & (i[None, :] < slots), other=0.0)
    return over_group(probability(found, base[:, None], above[:, None]), g, G, HOW)


@triton.jit
def attended(attn, taken, i, inside, SELECTS: tl.constexpr):
    """The same probabilities, 0 for slots that the query skipped."""
    if SELECTS:
        attn = tl.where(tl.load(taken + i, mask=inside, other=0) != 0, attn, 0.0)
    return attn


@triton.jit
def logit(logits, i, slots, G: tl.constexpr, G_PAD: tl.constexpr, HOW: tl.constexpr):
    """The scores before softmax of slots i, reduced over the group."""
    g = tl.arange(0, G_PAD)
    found = tl.load(logits + g[:, None] * slots + i[None, :], mask=(g[:, None] < G) & (i[None, :] < slots), other=0.0)
    return over_group(found, g, G, HOW)


@triton.jit
def probability(logit, base, above):
    """What softmax makes of a logit; see `log_sum_exp`."""
    return tl.exp(logit - base - above)


@triton.jit
def over_group(x, g, G: tl.constexpr, HOW: tl.constexpr):
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
    """The square."""
    return x * x


@triton.jit
def truth(condition):
    """One condition for all slots, to be combined with conditions over slots (which Triton's interpreter cannot as it is)."""
    return tl.where(condition, 1, 0) != 0


@triton.jit
def modulo(a, b):
    """The remainder with the sign of the divisor, as Python has it."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def tanh(x):
    """The hyperbolic tangent, to five units in the last place: by exp, and near 0, where that cancels, by a polynomial, the Chebyshev
    fit of (tanh(x) / x - 1) / x**2 up to 0.6.
    """
    z = x * x
    fit = -0.3333333134651184 + z * (
        0.13332924246788025 + z * (-0.053875137120485306 + z * (0.021116213873028755 - z * 0.006276387721300125))
    )
    return tl.where(tl.abs(x) < 0.6, x + x * z * fit, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def acos(x):
    """The arc cosine, to two units in the last place: pi / 2 less the arc sine, which near 1 is half of that of a smaller number.
    The arc sine is a polynomial, the Chebyshev fit of (asin(x) / x - 1) / x**2 up to 0.5.
    """
    size = tl.abs(x)
    near = size > 0.5
    z = tl.where(near, (1 - size) * 0.5, size * size)
    fit = 0.04459803903580299 + z * (0.031116094216187735 + z * (0.017078108246817054 + z * 0.033805386323260286))
    fit = 0.16666666317143594 + z * (0.07500098732337213 + z * fit)
    root = tl.where(near, tl.sqrt(z), size)
    sine = root + root * z * fit
    angle = tl.where(near, 2 * sine, 1.5707963267948966 - sine)
    return tl.where(x < 0, 3.141592653589793 - angle, angle)


@triton.jit
def power(x, y):
    """The power, in double precision, as C has it."""
    base, exponent = tl.broadcast(tl.cast(x, tl.float64), tl.cast(y, tl.float64))
    size = tl.exp(exponent * tl.log(tl.abs(base)))
    whole = tl.floor(exponent) == exponent
    odd = whole & (tl.floor(exponent * 0.5) * 2 != exponent)
    signed = tl.where(base < 0, tl.where(whole, tl.where(odd, -size, size), float("nan")), size)
    one = (exponent == 0) | (base == 1) | ((base == -1) & (tl.abs(exponent) == float("inf")))
    return tl.where(one, 1.0, signed)


@triton.jit
def count_power(x, y):
    """The power of numbers of which a count is made: a whole number where C says one, which a logarithm's rounding would miss."""
    found = power(x, y)
    nearest = tl.floor(found + 0.5)
    wide = tl.abs(tl.cast(y, tl.float64) * tl.log(tl.abs(tl.cast(x, tl.float64))))  # by which the exponential's error grows
    return tl.where(tl.abs(found - nearest) <= 4e-16 * (2 + wide) * tl.abs(nearest), nearest, found)


@triton.jit
def ema(old, x, decay, age):
    """A moving average after x has joined it. A token's own query, at which its age is 0, is the first to."""
    return tl.where(age == 0, x, decay * old + (1 - decay) * x)


@triton.jit
def observed(pos, newest, window):
    """How many queries could see a slot, its own token's included."""
    return tl.minimum(newest - pos + 1, window).to(tl.float32)


@triton.jit
def page_of(pos, size, after):
    """The number of the page in which a token is; pages begin behind the first `after` tokens, and before these have numbers below 0."""
    behind = pos - after
    return tl.where(behind >= 0, behind // size, -1 - (-1 - behind) // size).to(tl.float32)


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


@triton.jit
def count(x):
    """A count of tokens from one of the policy's numbers: floored, never negative."""
    return tl.where(x >= 1, tl.minimum(x, 2147483647.0), 0.0).to(tl.int32)


@triton.jit
def at_least_one(x):
    """A count of tokens that reads the data: floored, one at least, of a NaN as well."""
    return tl.where(x >= 1, tl.floor(x), 1.0)


@triton.jit
def begun(held, start):
    """What a fold holds; before its first query `start`."""
    return tl.where(held == held, held, start)


@triton.jit
def grade(x):
    """Integers in the order of x: NaN lowest, -0 = +0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & INT_MAX), NAN_GRADE)


@triton.jit
def graded(grade):
    """A number of this grade."""
    return (grade ^ ((grade >> 31) & INT_MAX)).to(tl.float32, bitcast=True)


# -- programs that share a head's slots --------------------------------------------------------------------------------


@triton.jit
def last_to_arrive(arrived, pair, pieces):
    """Whether this program is the last of its head's to arrive, which finds what the others have stored.

    Args:
        arrived: [B, H] int32, how many have; 0 before the launch, and after it.
    """
    tl.debug_barrier()  # what the program's other threads have stored was stored before it arrives, too
    last = tl.atomic_add(arrived + pair, 1) == pieces - 1
    if last:
        tl.store(arrived + pair, 0)
    return last


# -- the n-th highest of many words, digit by digit --------------------------------------------------------------------


@triton.jit
def count_digits(word, counted, digits, shift):
    """How many words have which digit from bit `shift` on, [DIGITS]: of those that count and begin with the digits found so far.
    The others are counted under 0, too.
    """
    counted = counted & (word >> shift >> DIGIT == digits)
    return tl.histogram(tl.where(counted, ((word >> shift) & (DIGITS - 1)).to(tl.int32), 0), DIGITS)


@triton.jit
def next_digit(counts, digits, n, equals):
    """The digits found so far and one more, of the n-th highest of `equals` words; which of its equals it is, and how many it has."""
    digit = tl.arange(0, DIGITS)
    counts -= tl.where(digit == 0, tl.sum(counts, 0) - equals, 0)
    reached = tl.cumsum(counts, 0, reverse=True)
    found = tl.sum((reached >= n).to(tl.int32), 0) - 1
    own = digit == found
    equals = tl.sum(tl.where(own, counts, 0), 0)
    n -= tl.sum(tl.where(own, reached, 0), 0) - equals
    return (digits << DIGIT) | found.to(tl.uint32), n, equals


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


# -- over the dims of vectors: of one, or of every slot's in a tile, whose axis 1 they are ------------------------------------


@triton.jit
def sum_over(x, there, AXIS: tl.constexpr):
    """The sum of the dims that are there."""
    return tl.sum(tl.where(there, x, 0.0), AXIS)


@triton.jit
def mean_over(x, there, AXIS: tl.constexpr):
    """The mean."""
    return tl.div_rn(sum_over(x, there, AXIS), tl.sum(tl.where(there, 1.0, 0.0), AXIS))


@triton.jit
def var_over(x, there, AXIS: tl.constexpr):
    """The population variance, in two passes: no cancellation."""
    return mean_over(square(x - tl.expand_dims(mean_over(x, there, AXIS), AXIS)), there, AXIS)


@triton.jit
def std_over(x, there, AXIS: tl.constexpr):
    """The population deviation."""
    return tl.sqrt_rn(var_over(x, there, AXIS))


@triton.jit
def max_over(x, there, AXIS: tl.constexpr):
    """The largest, NaN if any is."""
    return largest(x, there, AXIS)


@triton.jit
def min_over(x, there, AXIS: tl.constexpr):
    """The smallest, NaN if any is."""
    return -largest(-x, there, AXIS)


# -- what a token has by itself: doubles, in the order that all backends share (docs/language.md) --------------------------


@triton.jit
def ordered_sum(x, mask):
    """The sum: the second half is added to the first, dim by dim, until one number is left."""
    x = tl.where(mask, x, 0.0).to(tl.float64) + 0.0
    for _ in tl.static_range(16):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2]), 0)
    return tl.sum(x, 0)


@triton.jit
def ordered_mean(x, mask):
    """The mean."""
    return ordered_sum(x, mask) / tl.sum(mask.to(tl.int32), 0).to(tl.float64)


@triton.jit
def ordered_var(x, mask):
    """The population variance."""
    return ordered_mean(square(x - ordered_mean(x, mask)), mask)


@triton.jit
def ordered_std(x, mask):
    """The population deviation; the root of a double is rounded correctly."""
    return tl.sqrt(ordered_var(x, mask))


@triton.jit
def ordered_max(x, mask):
    """The largest, NaN if any is."""
    return largest(tl.where(mask, x, 0.0).to(tl.float64), mask) + 0.0


@triton.jit
def ordered_min(x, mask):
    """The smallest, NaN if any is."""
    return least(tl.where(mask, x, 0.0).to(tl.float64), mask) + 0.0


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
