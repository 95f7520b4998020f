"""Device functions of `attend` under compact positions: they rotate keys in registers, between the load and the dot product.

A cached key is rotated for its text position, but its score must correspond to its rank among the live slots, with the query at its own
token's rank. A rotary score depends only on the distance of query and key (Su et al. 2021, "RoFormer", eq. 16). So it suffices to shift
every key toward the query by the number of tokens evicted between them. For keys after the last evicted token, which are most of a sliding
window, the shift is 0, and `attend` multiplies such blocks unrotated. Keys with equal shifts, such as sinks, read the same angles from the
GPU's cache, so rotating the query for them would save nothing.

Legend, in addition to the one of `attend`:
    j: one of PAIRS pairs of dims, each with its own angle: dims OFFSET + j and OFFSET + PAIRS + j, or adjacent dims if INTERLEAVED.
    r: one of the dims that are not rotated; R_PAD is 0 if there are none.
    by: each key's shift toward the query in positions, [BLOCK]; 0 for slots that the query does not see.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.angles import DIGITS

NEAR, FAR = tl.constexpr(DIGITS[0]), tl.constexpr(DIGITS[1])


@triton.jit
def turns(pos, rank, visible, evicted):
    """Return each key's shift, `by`. `evicted`: number of evicted tokens before the query's own."""
    return tl.where(visible, tl.maximum(evicted - (pos - rank), 0), 0)


@triton.jit
def parts(
    x,
    rows,
    held,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    P_PAD: tl.constexpr,
    R_PAD: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Load rows of x: the first and the second dims of the pairs, [rows, P_PAD] each, and all other dims, [rows, R_PAD].

    Rows where `held` is false are zeros. If R_PAD is 0, the third result is undefined.
    """
    start = x + rows[:, None] * D
    first, second = _pairs(start + OFFSET, held, PAIRS, P_PAD, INTERLEAVED)
    other = first
    if R_PAD > 0:
        r = tl.arange(0, R_PAD)[None, :]
        dims = tl.where(r < OFFSET, r, r + 2 * PAIRS)
        other = tl.load(start + dims, mask=held[:, None] & (dims < D), other=0.0)
    return first, second, other


@triton.jit
def _pairs(start, held, PAIRS: tl.constexpr, P_PAD: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load the first and the second dims of the pairs, [rows, P_PAD] each. `start`: pointers to the rotated dims, [rows, 1]."""
    if INTERLEAVED:
        both = tl.arange(0, 2 * P_PAD)[None, :]
        found = tl.load(start + both, mask=held[:, None] & (both < 2 * PAIRS), other=0.0)
        first, second = tl.split(tl.reshape(found, [held.shape[0], P_PAD, 2]))
    else:
        j = tl.arange(0, P_PAD)[None, :]
        there = held[:, None] & (j < PAIRS)
        first = tl.load(start + j, mask=there, other=0.0)
        second = tl.load(start + PAIRS + j, mask=there, other=0.0)
    return first, second


@triton.jit
def _partner(j, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return whether rotated dims j, counted from OFFSET, are first in their pair, and the other dim of each pair."""
    if INTERLEAVED:
        first, partner = j % 2 == 0, j ^ 1
    else:
        first = j < PAIRS
        partner = tl.where(first, j + PAIRS, j - PAIRS)
    return first, partner


@triton.jit
def nearer(k, by, angles, D_PAD: tl.constexpr, PAIRS: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate a block of keys, float32 [BLOCK, D_PAD], each by its shift."""
    if tl.max(by, 0) > 0:
        d = tl.arange(0, D_PAD)[None, :]
        j = d - OFFSET
        turns = (j >= 0) & (j < 2 * PAIRS)
        first, partner = _partner(j, PAIRS, INTERLEAVED)
        half = tl.gather(k, tl.broadcast_to(tl.where(turns, partner + OFFSET, d), k.shape), 1)
        pair = tl.where(turns, j // 2 if INTERLEAVED else tl.minimum(j, partner), PAIRS)
        cos, sin = _cos_and_sin(by, angles, pair, PAIRS)
        k = tl.where(turns, k * cos + tl.where(first, -half, half) * sin, k)
    return k


@triton.jit
def scores(
    q_first,  # [G_PAD, P_PAD]; these three are the query's `parts`
    q_second,
    q_other,
    k_first,  # [BLOCK, P_PAD]; these three are the keys' `parts`
    k_second,
    k_other,
    by,
    angles,
    PAIRS: tl.constexpr,
    P_PAD: tl.constexpr,
    R_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Return dot(q, k) of the group's queries and a block of keys, each rotated by its shift; [G_PAD, BLOCK]."""
    k_first, k_second = k_first.to(DOT), k_second.to(DOT)
    score = tl.zeros([q_first.shape[0], by.shape[0]], tl.float32)
    if tl.max(by, 0) > 0:
        cos, sin = _cos_and_sin(by, angles, tl.arange(0, P_PAD)[None, :], PAIRS)
        turned_first = k_first.to(tl.float32) * cos - k_second.to(tl.float32) * sin
        turned_second = k_second.to(tl.float32) * cos + k_first.to(tl.float32) * sin
        k_first, k_second = turned_first.to(DOT), turned_second.to(DOT)
        if k_first.dtype != tl.float32:  # add the products with the rounding errors, which preserves precision
            score += _product(q_first, turned_first - k_first.to(tl.float32), DOT)
            score += _product(q_second, turned_second - k_second.to(tl.float32), DOT)
    score += _product(q_first, k_first, DOT) + _product(q_second, k_second, DOT)
    if R_PAD > 0:
        score += _product(q_other, k_other, DOT)
    return score


@triton.jit
def _cos_and_sin(by, angles, j, PAIRS: tl.constexpr):
    """Return cosines and sines of the angles of pairs j, [1, n], at shifts `by`: float32 [rows, n] each."""
    cos, sin = _angle(angles, by % NEAR, by > 0, j, PAIRS)
    far_cos, far_sin = _angle(angles, by // NEAR % FAR + NEAR, by >= NEAR, j, PAIRS)
    cos, sin = cos * far_cos - sin * far_sin, sin * far_cos + cos * far_sin
    if tl.max(by, 0) >= NEAR * FAR:
        far_cos, far_sin = _angle(angles, by // (NEAR * FAR) + (NEAR + FAR), by >= NEAR * FAR, j, PAIRS)
        cos, sin = cos * far_cos - sin * far_sin, sin * far_cos + cos * far_sin
    return cos, sin


@triton.jit
def _angle(angles, row, wanted, j, PAIRS: tl.constexpr):
    """Load cosines and sines of pairs j from rows of the table, [rows, n] each; 1 and 0 where `wanted` is false."""
    at = angles + row[:, None] * (2 * PAIRS) + j
    wanted = wanted[:, None] & (j < PAIRS)
    return tl.load(at, mask=wanted, other=1.0), tl.load(at + PAIRS, mask=wanted, other=0.0)


@triton.jit
def _product(q, k, DOT: tl.constexpr):
    """Return dot(q, k) of queries [G_PAD, dims] and keys [BLOCK, dims]."""
    return tl.dot(q.to(DOT), tl.trans(k.to(DOT)), input_precision="ieee")
