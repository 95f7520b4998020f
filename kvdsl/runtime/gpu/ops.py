"""Device functions that every policy's `settle` uses.

One program serves one KV head of one row and iterates over its N slots in blocks. Values that all slots depend on, such as a threshold or a
count, are scalars between two such passes. `position`, `scores`, ... point to the head's row of N; `kernels_triton.py` explains the other
names.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import packed

INT_MAX = tl.constexpr(2**31 - 1)
NAN_GRADE = tl.constexpr(-(2**31) + 1)
BELOW_ALL, ABOVE_ALL = tl.constexpr(-(2**63)), tl.constexpr(2**63 - 1)  # sort keys: a grade above tie-breaking bits

DIGIT, DIGITS = tl.constexpr(8), tl.constexpr(256)  # bits per digit, and values of a digit
COMBINED = tl.constexpr(4096)
"""Elements of `part` that `combine` loads at once: 8 per thread."""

# -- attention ---------------------------------------------------------------------------------------------------------


@triton.jit
def row_of(which, row, SOME: tl.constexpr):
    """Return the cache's row for a row of the step."""
    if SOME:
        row = tl.load(which + row)
    return row


@triton.jit
def reach(slots, now):
    """Return how many slots may hold a token after this step: a token's slot never exceeds its position."""
    return tl.minimum(slots, now + 1)


@triton.jit
def share(reach, split, splits, BLOCK: tl.constexpr):
    """Return the first slot of a split, and the slot after its last. All but the last splits have the same number of whole blocks."""
    each = tl.cdiv(tl.cdiv(reach, splits), BLOCK) * BLOCK
    return split * each, tl.minimum((split + 1) * each, reach)


@triton.jit
def first_rows(x, ROWS: tl.constexpr):
    """Return the first rows of a float32 matrix, bit by bit. Both numbers of rows are powers of two."""
    if x.shape[0] > ROWS:
        bits = tl.where(tl.arange(0, x.shape[0])[:, None] < ROWS, x.to(tl.int32, bitcast=True), 0)
        x = tl.sum(tl.reshape(bits, [x.shape[0] // ROWS, ROWS, x.shape[1]]), 0).to(tl.float32, bitcast=True)
    return x


@triton.jit
def log_sum_exp(
    top,  # [B, H, S, G]: the largest logit of each split, from `attend`
    total,  # [B, H, S, G]: its sum of exp(logit - top)
    sinks,  # [H * G], if SINKS
    pair,
    head,
    splits,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Return the log-sum-exp of each query head's logits as two summands, [G_PAD] each: a base near the largest logit, and the rest.

    One float32 would lose the rest if the base is far from 0.
    """
    base, weight = _softmax(top, total, sinks, pair, head, splits, G, G_PAD, S_PAD, SINKS)
    return base, tl.log(weight)


@triton.jit
def combine(
    out,  # [B, H * G, E]: receives the attention output
    part,  # [B, H, S, G, E]; this and the following as in `log_sum_exp`
    top,
    total,
    sinks,
    real,  # [B] bool: False for padding, whose output is zero
    splits,
    G: tl.constexpr,
    G_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    KV: tl.constexpr,
):
    """Combine the splits' results into the attention output of this program's GQA group."""
    head, row = tl.program_id(1), tl.program_id(2)
    pair = (row * tl.num_programs(1) + head).to(tl.int64)
    base, weight = _softmax(top, total, sinks, pair, head, splits, G, G_PAD, S_PAD, SINKS)
    group = tl.arange(0, G_PAD)

    # Load all query heads and as many splits as registers hold at once, so loads wait for no barrier.
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
    found = tl.where(tl.load(real + row) != 0, packed.plain(tl.sum(mixed, 0) / weight[:, None], E, E_PAD, KV), 0.0)
    g, e = group[:, None], tl.arange(0, E_PAD)[None, :]
    tl.store(out + (pair * G + g) * E + e, found.to(out.dtype.element_ty), mask=(g < G) & (e < E))


@triton.jit
def _softmax(
    top, total, sinks, pair, head, splits, G: tl.constexpr, G_PAD: tl.constexpr, S_PAD: tl.constexpr, SINKS: tl.constexpr
):
    """Return a base near each query head's largest logit, and the sum of exp(logit - base); [G_PAD] each."""
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
    """Load the largest logits and the weight sums of splits s, [n, G_PAD] each; -inf and 0 outside splits and heads."""
    at = (pair * splits + s[:, None]) * G + g[None, :]
    there = (s[:, None] < splits) & (g[None, :] < G)
    return tl.load(top + at, mask=there, other=float("-inf")), tl.load(total + at, mask=there, other=0.0)


@triton.jit
def attn(logits, base, above, i, slots, G: tl.constexpr, G_PAD: tl.constexpr, HOW: tl.constexpr):
    """Return the attention probabilities of slots i, reduced over the group."""
    found = _logits(logits, i, slots, G, G_PAD)
    return over_group(probability(found, base[:, None], above[:, None]), tl.arange(0, G_PAD), G, HOW)


@triton.jit
def attended(attn, taken, i, inside, SELECTS: tl.constexpr):
    """Return the probabilities with 0 for slots that the selection skipped."""
    if SELECTS:
        attn = tl.where(tl.load(taken + i, mask=inside, other=0) != 0, attn, 0.0)
    return attn


@triton.jit
def logit(logits, i, slots, G: tl.constexpr, G_PAD: tl.constexpr, HOW: tl.constexpr):
    """Return the logits of slots i, reduced over the group."""
    return over_group(_logits(logits, i, slots, G, G_PAD), tl.arange(0, G_PAD), G, HOW)


@triton.jit
def _logits(logits, i, slots, G: tl.constexpr, G_PAD: tl.constexpr):
    """Return the logits of slots i, [G_PAD, slots]: `logits` itself if they are not in memory."""
    found = logits
    if logits.dtype.is_ptr():
        g = tl.arange(0, G_PAD)
        there = (g[:, None] < G) & (i[None, :] < slots)
        found = tl.load(logits + g[:, None] * slots + i[None, :], mask=there, other=0.0)
    return found


@triton.jit
def probability(logit, base, above):
    """Return the softmax of a logit; `base`, `above`: see `log_sum_exp`."""
    return tl.exp(logit - base - above)


@triton.jit
def over_group(x, g, G: tl.constexpr, HOW: tl.constexpr):
    """Reduce values of the group's query heads, [G_PAD, n], to [n]."""
    inside = g[:, None] < G
    if HOW == "max":
        return largest(x, inside, 0)
    summed = tl.sum(tl.where(inside, x, 0.0), 0)
    return tl.div_rn(summed, 1.0 * G) if HOW == "mean" else summed


# -- the new token -----------------------------------------------------------------------------------------------------


@triton.jit
def free_slot(first_free, held, pair, slots, splits, S_PAD: tl.constexpr):
    """Return the head's first free slot, and its number of tokens."""
    s = tl.arange(0, S_PAD)
    first = tl.load(first_free + pair * splits + s, mask=s < splits, other=INT_MAX)
    found = tl.load(held + pair * splits + s, mask=s < splits, other=0)
    # A free slot always exists unless foreign code wrote to the cache's tensors. The minimum keeps writes inside them even then.
    return tl.minimum(tl.min(first, 0), slots - 1), tl.sum(found, 0)


@triton.jit
def place_logits(logits, new_logits, slot, slots, G: tl.constexpr, G_PAD: tl.constexpr):
    """Store the new token's logits, [G], at its slot in `logits`, [G, N]."""
    g = tl.arange(0, G_PAD)
    tl.store(logits + g * slots + slot, tl.load(new_logits + g, mask=g < G), mask=g < G)


@triton.jit
def with_new(logits, new_logits, i, slot, G: tl.constexpr, G_PAD: tl.constexpr):
    """Return the logits of slots i, [G_PAD, n], with the new token's, [G] in memory, at its slot."""
    g = tl.arange(0, G_PAD)
    return tl.where((i == slot)[None, :], tl.load(new_logits + g, mask=g < G, other=0.0)[:, None], logits)


# -- functions of the language -----------------------------------------------------------------------------------------


@triton.jit
def minimum(a, b):
    """Return the smaller of two; NaN if either is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(a, b):
    """Return the larger of two; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def square(x):
    """Return the square."""
    return x * x


@triton.jit
def truth(condition):
    """Return a scalar condition as a tensor: Triton's interpreter cannot combine a bare one with conditions over slots."""
    return tl.where(condition, 1, 0) != 0


@triton.jit
def modulo(a, b):
    """Return the remainder with the sign of the divisor, as in Python."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent, accurate to five units in the last place.

    exp would cancel near 0. Below 0.6 a polynomial replaces it: the Chebyshev fit of (tanh(x) / x - 1) / x**2.
    """
    z = x * x
    fit = -0.3333333134651184 + z * (
        0.13332924246788025 + z * (-0.053875137120485306 + z * (0.021116213873028755 - z * 0.006276387721300125))
    )
    return tl.where(tl.abs(x) < 0.6, x + x * z * fit, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def acos(x):
    """Return the arc cosine, accurate to two units in the last place.

    For |x| up to 0.5 the arc sine is a polynomial, the Chebyshev fit of (asin(x) / x - 1) / x**2, and acos(x) = pi / 2 - asin(x). Above,
    acos(|x|) = 2 * asin(sqrt((1 - |x|) / 2)).
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
    """Return x ** y in double precision, with the special cases of C's `pow`."""
    base, exponent = tl.broadcast(tl.cast(x, tl.float64), tl.cast(y, tl.float64))
    size = tl.exp(exponent * tl.log(tl.abs(base)))
    whole = tl.floor(exponent) == exponent
    odd = whole & (tl.floor(exponent * 0.5) * 2 != exponent)
    signed = tl.where(base < 0, tl.where(whole, tl.where(odd, -size, size), float("nan")), size)
    one = (exponent == 0) | (base == 1) | ((base == -1) & (tl.abs(exponent) == float("inf")))
    return tl.where(one, 1.0, signed)


@triton.jit
def count_power(x, y):
    """Return x ** y for a count: an integer wherever C returns one, which a logarithm's rounding would miss."""
    found = power(x, y)
    nearest = tl.floor(found + 0.5)
    wide = tl.abs(tl.cast(y, tl.float64) * tl.log(tl.abs(tl.cast(x, tl.float64))))  # exp amplifies errors by this
    return tl.where(tl.abs(found - nearest) <= 4e-16 * (2 + wide) * tl.abs(nearest), nearest, found)


@triton.jit
def ema(old, x, decay, age):
    """Return the moving average `old` updated with x. It starts at the token's own query, at age 0."""
    return tl.where(age == 0, x, decay * old + (1 - decay) * x)


@triton.jit
def observed(pos, newest, window):
    """Return how many queries could see a slot, including its own token's."""
    return tl.minimum(newest - pos + 1, window).to(tl.float32)


@triton.jit
def page_of(pos, size, after):
    """Return the page number of a token. Pages start after the first `after` tokens; pages of those tokens have negative numbers."""
    behind = pos - after
    return tl.where(behind >= 0, behind // size, -1 - (-1 - behind) // size).to(tl.float32)


@triton.jit
def random_key(seed, layer, head):
    """Return the hash that all random numbers of a head start from."""
    return _absorb(_absorb(seed.to(tl.uint32), layer), head)


@triton.jit
def random(key, pos, newest):
    """Return random numbers in [0, 1) with 24 bits, which float32 holds exactly."""
    return (_absorb(_absorb(key, pos), newest) >> 8).to(tl.int32).to(tl.float32) * 2.0**-24


@triton.jit
def _absorb(hash, word):
    """Mix one more word into the hash with murmur3's finalizer."""
    x = hash ^ (word.to(tl.uint32) * 0x9E3779B9)
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def count(x):
    """Convert a policy's number to a count of tokens: floored, never negative."""
    return tl.where(x >= 1, tl.minimum(x, 2147483647.0), 0.0).to(tl.int32)


@triton.jit
def at_least_one(x):
    """Convert a number that depends on data to a count of tokens: floored, at least 1, and 1 for NaN."""
    return tl.where(x >= 1, tl.floor(x), 1.0)


@triton.jit
def begun(held, start):
    """Return a fold's value; `start` before its first query, where it is NaN."""
    return tl.where(held == held, held, start)


@triton.jit
def grade(x):
    """Return int32 that sort like x, float32: NaN lowest, -0 = +0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & INT_MAX), NAN_GRADE)


@triton.jit
def graded(grade):
    """Return a number with this grade: the inverse of `grade`."""
    return (grade ^ ((grade >> 31) & INT_MAX)).to(tl.float32, bitcast=True)


# -- programs that share a head's slots --------------------------------------------------------------------------------


@triton.jit
def last_to_arrive(arrived, pair, pieces):
    """Return whether this program is the last of its head's to arrive. The last one sees what the others stored.

    Args:
        arrived: [B, H] int32, how many have arrived; 0 before and after the launch.
    """
    tl.debug_barrier()  # all threads of the program store before it arrives
    last = tl.atomic_add(arrived + pair, 1) == pieces - 1
    if last:
        tl.store(arrived + pair, 0)
    return last


@triton.jit
def meet(arrived, meetings, pair, pieces):
    """Wait until all of the head's programs are here. Each then sees what the others have stored. Return whether this is the last one.

    All of them must be on the device at once, as a cooperative launch promises. Otherwise this never ends.

    Args:
        arrived: see `last_to_arrive`. meetings: [B, H] int32, how often they have met, modulo 2**32.
    """
    before = tl.atomic_add(meetings + pair, 0)
    last = last_to_arrive(arrived, pair, pieces)
    if last:
        tl.atomic_add(meetings + pair, 1)
    else:
        while tl.atomic_add(meetings + pair, 0) == before:
            pass
    tl.debug_barrier()  # all threads of the program go on together
    return last


# -- the n-th highest of many words, digit by digit --------------------------------------------------------------------


@triton.jit
def count_digits(word, counted, digits, shift):
    """Count words by their digit at bit `shift`, [DIGITS], among the `counted` words that begin with `digits`.

    All other words count as digit 0; `next_digit` subtracts them.
    """
    counted = counted & (word >> shift >> DIGIT == digits)
    return tl.histogram(tl.where(counted, ((word >> shift) & (DIGITS - 1)).to(tl.int32), 0), DIGITS)


@triton.jit
def next_digit(counts, digits, n, equals):
    """Append the next digit of the n-th highest of `equals` words. Return the digits, n among the words with these, their number."""
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
    """Return the sum of x where the mask is true."""
    return tl.sum(tl.where(mask, x, 0.0), 0)


@triton.jit
def largest(x, mask, AXIS: tl.constexpr = 0):
    """Return the maximum of x where the mask is true; NaN if any of these is NaN."""
    nan = tl.max((mask & (x != x)).to(tl.int32), AXIS) != 0
    return tl.where(nan, float("nan"), tl.max(tl.where(mask & (x == x), x, float("-inf")), AXIS))


@triton.jit
def least(x, mask):
    """Return the minimum of x where the mask is true; NaN if any of these is NaN."""
    return -largest(-x, mask)


# -- reductions over the dims of one vector, or of a tile with one vector per slot (axis 1) ----------------------------


@triton.jit
def sum_over(x, there, AXIS: tl.constexpr):
    """Return the sum of the dims where `there` is true."""
    return tl.sum(tl.where(there, x, 0.0), AXIS)


@triton.jit
def mean_over(x, there, AXIS: tl.constexpr):
    """Return the mean."""
    return tl.div_rn(sum_over(x, there, AXIS), tl.sum(tl.where(there, 1.0, 0.0), AXIS))


@triton.jit
def var_over(x, there, AXIS: tl.constexpr):
    """Return the population variance. Two passes avoid cancellation."""
    return mean_over(square(x - tl.expand_dims(mean_over(x, there, AXIS), AXIS)), there, AXIS)


@triton.jit
def std_over(x, there, AXIS: tl.constexpr):
    """Return the population standard deviation."""
    return tl.sqrt_rn(var_over(x, there, AXIS))


@triton.jit
def max_over(x, there, AXIS: tl.constexpr):
    """Return the maximum; NaN if any dim is NaN."""
    return largest(x, there, AXIS)


@triton.jit
def min_over(x, there, AXIS: tl.constexpr):
    """Return the minimum; NaN if any dim is NaN."""
    return -largest(-x, there, AXIS)


# -- reductions of a token's own data: float64, in the order that all backends share (docs/language.md) ----------------


@triton.jit
def ordered_sum(x, mask):
    """Return the sum: add the second half to the first, dim by dim, until one number is left."""
    x = tl.where(mask, x, 0.0).to(tl.float64) + 0.0
    for _ in tl.static_range(16):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2]), 0)
    return tl.sum(x, 0)


@triton.jit
def ordered_mean(x, mask):
    """Return the mean."""
    return ordered_sum(x, mask) / tl.sum(mask.to(tl.int32), 0).to(tl.float64)


@triton.jit
def ordered_var(x, mask):
    """Return the population variance."""
    return ordered_mean(square(x - ordered_mean(x, mask)), mask)


@triton.jit
def ordered_std(x, mask):
    """Return the population standard deviation; the root of a double is correctly rounded."""
    return tl.sqrt(ordered_var(x, mask))


@triton.jit
def ordered_max(x, mask):
    """Return the maximum; NaN if any dim is NaN."""
    return largest(tl.where(mask, x, 0.0).to(tl.float64), mask) + 0.0


@triton.jit
def ordered_min(x, mask):
    """Return the minimum; NaN if any dim is NaN."""
    return least(tl.where(mask, x, 0.0).to(tl.float64), mask) + 0.0


# -- rings -------------------------------------------------------------------------------------------------------------


@triton.jit
def ring_row(ring, stride, size, query):
    """Return a pointer to the ring's row for the query at this position. The ring has `size` rows, `stride` elements apart."""
    return ring + (query % size).to(tl.int64) * stride


@triton.jit
def ring_count(pos, newest, window, size):
    """Return how many of the newest `size` queries could see a slot."""
    first, last = tl.maximum(pos, newest - size + 1), tl.minimum(pos + (window - 1), newest)
    return tl.maximum(last - first + 1, 0).to(tl.float32)


@triton.jit
def ring_sum(ring, stride, size, i, pos, newest, window):
    """Return the sum of the ring's values for slots i, over those of the newest `size` queries that could see them."""
    summed = tl.zeros(pos.shape, tl.float32)
    for query in range(tl.maximum(newest - size + 1, 0), newest + 1):
        saw = (pos >= 0) & (pos <= query) & (query - pos < window)
        summed += tl.load(ring_row(ring, stride, size, query) + i, mask=saw, other=0.0)
    return summed


@triton.jit
def ring_mean(ring, stride, size, i, pos, newest, window):
    """Return the mean of these values; NaN for slots that no query could see."""
    return tl.div_rn(ring_sum(ring, stride, size, i, pos, newest, window), ring_count(pos, newest, window, size))


@triton.jit
def ring_var(ring, stride, size, i, pos, newest, window):
    """Return the population variance of these values. Two passes avoid cancellation."""
    centre = ring_mean(ring, stride, size, i, pos, newest, window)
    summed = tl.zeros(pos.shape, tl.float32)
    for query in range(tl.maximum(newest - size + 1, 0), newest + 1):
        saw = (pos >= 0) & (pos <= query) & (query - pos < window)
        x = tl.load(ring_row(ring, stride, size, query) + i, mask=saw, other=0.0)
        summed += tl.where(saw, square(x - centre), 0.0)
    return tl.div_rn(summed, ring_count(pos, newest, window, size))


@triton.jit
def ring_std(ring, stride, size, i, pos, newest, window):
    """Return the population standard deviation of these values."""
    return tl.sqrt_rn(ring_var(ring, stride, size, i, pos, newest, window))


@triton.jit
def ring_max(ring, stride, size, i, pos, newest, window):
    """Return the maximum of these values."""
    top = tl.full(pos.shape, float("-inf"), tl.float32)
    for query in range(tl.maximum(newest - size + 1, 0), newest + 1):
        saw = (pos >= 0) & (pos <= query) & (query - pos < window)
        x = tl.load(ring_row(ring, stride, size, query) + i, mask=saw, other=float("-inf"))
        top = maximum(top, x)
    return top


@triton.jit
def ring_min(ring, stride, size, i, pos, newest, window):
    """Return the minimum of these values."""
    low = tl.full(pos.shape, float("inf"), tl.float32)
    for query in range(tl.maximum(newest - size + 1, 0), newest + 1):
        saw = (pos >= 0) & (pos <= query) & (query - pos < window)
        x = tl.load(ring_row(ring, stride, size, query) + i, mask=saw, other=float("inf"))
        low = minimum(low, x)
    return low
