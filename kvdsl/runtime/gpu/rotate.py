"""Device functions of `attend` under compact positions: keys are turned in registers, between memory and the dot product.

A cached key stays as it was rotated at its place in the text, but scores are to be as if it stood at its rank among the live slots,
and the query at its own token's. A rotary score depends only on how far the two are apart (Su et al. 2021, "RoFormer", eq. 16), so it
is enough that every key comes nearer by as many positions as were evicted between them. That is nothing at all for what followed
the last eviction in the text, which is most of a sliding window: such blocks are multiplied as they are.

Legend, beyond the one of `attend`:
    L: pairs of dims that turn together, by an angle of their own (PAIRS; P_PAD as a power of two). j: one of them.
    first, second: the dims of pair j. r: one of the dims that do not turn, R_PAD of them as a power of two; 0 if there are none.
    by: how many positions each of a block's keys comes nearer, [BLOCK]; 0 for slots that the query does not see.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.angles import DIGITS

NEAR, FAR = tl.constexpr(DIGITS[0]), tl.constexpr(DIGITS[1])


@triton.jit
def turns_of(position, rank, i, visible, evicted):
    """By how many positions the keys in slots i come nearer. `evicted`: tokens that left from before the query's own."""
    pos, place = tl.load(position + i, mask=visible, other=0), tl.load(rank + i, mask=visible, other=0)
    return tl.where(visible, tl.maximum(evicted - (pos - place), 0), 0)


@triton.jit
def dims_of_pairs(PAIRS: tl.constexpr, P_PAD: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and the second dim of every pair, and which of them there are; [P_PAD] each."""
    j = tl.arange(0, P_PAD)
    if INTERLEAVED:
        first = OFFSET + 2 * j
        second = first + 1
    else:
        first = OFFSET + j
        second = first + PAIRS
    return first, second, j < PAIRS


@triton.jit
def dims_that_stay(D: tl.constexpr, PAIRS: tl.constexpr, R_PAD: tl.constexpr, OFFSET: tl.constexpr):
    """The dims before and behind those that turn, and which of them there are; [R_PAD] each."""
    r = tl.arange(0, R_PAD)
    return tl.where(r < OFFSET, r, r + 2 * PAIRS), r < D - 2 * PAIRS


@triton.jit
def rows(x, at, held, dims, there, D: tl.constexpr):
    """These dims of the vectors at these rows, [rows, dims]."""
    return tl.load(x + at[:, None] * D + dims[None, :], mask=held[:, None] & there[None, :], other=0.0)


@triton.jit
def turned(a, b, by, angles, there, PAIRS: tl.constexpr, P_PAD: tl.constexpr):
    """The pairs (a, b) turned by so many positions, in float32."""
    cos, sin = _angle(angles, by % NEAR, by > 0, there, PAIRS, P_PAD)
    far_cos, far_sin = _angle(angles, by // NEAR % FAR + NEAR, by >= NEAR, there, PAIRS, P_PAD)
    cos, sin = cos * far_cos - sin * far_sin, sin * far_cos + cos * far_sin
    if tl.max(by, 0) >= NEAR * FAR:
        far_cos, far_sin = _angle(angles, by // (NEAR * FAR) + (NEAR + FAR), by >= NEAR * FAR, there, PAIRS, P_PAD)
        cos, sin = cos * far_cos - sin * far_sin, sin * far_cos + cos * far_sin
    a, b = a.to(tl.float32), b.to(tl.float32)
    return a * cos - b * sin, a * sin + b * cos


@triton.jit
def _angle(angles, row, turns, there, PAIRS: tl.constexpr, P_PAD: tl.constexpr):
    """Cosines and sines from these rows of the table, [rows, P_PAD]; those of no turn at all where `turns` says so."""
    at = angles + row[:, None] * (2 * PAIRS) + tl.arange(0, P_PAD)[None, :]
    wanted = turns[:, None] & there[None, :]
    return tl.load(at, mask=wanted, other=1.0), tl.load(at + PAIRS, mask=wanted, other=0.0)


@triton.jit
def product(q, k, DOT: tl.constexpr):
    """dot(q, k) of queries [G_PAD, dims] and keys [BLOCK, dims]."""
    return tl.dot(q.to(DOT), tl.trans(k.to(DOT)), input_precision="ieee")


@triton.jit
def rounded_off(q, k, DOT: tl.constexpr):
    """What `product` misses of keys in float32, because it rounds them to the model's dtype."""
    return product(q, k - k.to(DOT).to(tl.float32), DOT)
