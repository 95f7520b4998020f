"""Device functions of a prompt's statistics: what the policies' kernels `observe` and `over_slots` have in common.

Legend:
    B, H, T, N: rows, KV heads, new tokens, slots per KV head. G: query heads per KV head. D: size of a key.
    A tile has a block of slots by a block of queries, [SLOTS, QUERIES]; what does not vary over one of them has size 1 there.
    pos: the positions of the tokens in slots i, [SLOTS, 1], below 0 where a slot is free. now: those of the queries, [1, QUERIES].
    since, until: the first and the last query that see a slot, [SLOTS, 1]; since > until where none does.
    first, begin, end: positions in a row's text of its first new token, of the first query that counts, and behind the last one.

A row's new tokens have consecutive positions, whatever padding lies between them. So which queries see a slot is an interval, which
of them comes last is known before any is looked at, and how often a value decays is a difference: nothing depends on the order
in which queries are taken.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdsl.runtime.gpu import ops

LOG2_E = tl.constexpr(1.4426950408889634)

# -- who sees whom -----------------------------------------------------------------------------------------------------


@triton.jit
def interval(pos, begin, end, window):
    """The first and the last query that see each slot."""
    since = tl.where(pos >= 0, tl.maximum(pos, begin), ops.INT_MAX)
    until = tl.where(pos >= 0, tl.minimum(pos + (window - 1), end - 1), -1)
    return since, until


@triton.jit
def place(order, now, first, inside, PADDED: tl.constexpr):
    """Where the tokens at these positions stand among the row's new ones."""
    t = now - first
    if PADDED:
        t = tl.load(order + t, mask=inside, other=0)
    return t


@triton.jit
def reach(order, low, high, first, cached, window, PADDED: tl.constexpr):
    """The slots outside of which the queries from `low` to `high` see nothing: the first one, and the one behind the last."""
    start = 0
    oldest = low - (window - 1)
    if oldest > first:  # then nothing that was cached before is seen either
        start = cached + place(order, oldest, first, True, PADDED)
    return start, cached + place(order, high, first, True, PADDED) + 1


# -- what they give ----------------------------------------------------------------------------------------------------


@triton.jit
def weights(
    query,  # the KV head's of the row: G heads of [T, D]
    lse,  # theirs, [G, T], if ATTN
    k,  # [SLOTS, D_PAD]
    t,  # [QUERIES]
    asked,  # [QUERIES]: which of the queries are meant
    tokens,
    scaling,
    softcap,
    query_head,  # strides
    query_token,
    ATTN: tl.constexpr,
    LOGIT: tl.constexpr,
    HOW: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """A tile of probabilities and one of logits, reduced over the group; without meaning where a query does not see the slot."""
    d = tl.arange(0, k.shape[1])[None, :]
    attn = tl.full([k.shape[0], t.shape[0]], float("-inf") if HOW == "max" else 0.0, tl.float32)
    logit = attn
    rows = query + t[:, None].to(tl.int64) * query_token + d
    for g in range(G):
        q = tl.load(rows + g * query_head, mask=asked[:, None] & (d < D), other=0.0).to(k.dtype)
        x = tl.dot(k, tl.trans(q), input_precision="ieee")
        unit = scaling  # of x
        if CAPPED:
            x, unit = softcap * ops.tanh(x * scaling / softcap), 1.0
        if LOGIT:
            logit = ops.maximum(logit, x * unit) if HOW == "max" else logit + x * unit
        if ATTN:  # by powers of two, for which a score takes one multiplication, with its sum
            base = tl.load(lse + g * tokens + t, mask=asked, other=0.0) * -LOG2_E
            p = tl.exp2(tl.fma(x, unit * LOG2_E, base[None, :]))
            attn = ops.maximum(attn, p) if HOW == "max" else attn + p
    if HOW == "mean":
        attn, logit = attn * (1.0 / G), logit * (1.0 / G)
    return attn, logit


# -- reductions over the queries of a tile, [SLOTS, 1] -----------------------------------------------------------------


@triton.jit
def total(x, visible):
    """The sum of what the queries give that see the slot."""
    return tl.sum(tl.where(visible, x, 0.0), 1, keep_dims=True)


@triton.jit
def largest(x, visible):
    """The largest, NaN if any is."""
    return ops.largest(x, visible, 1)[:, None]


@triton.jit
def least(x, visible):
    """The smallest, NaN if any is."""
    return -largest(-x, visible)


@triton.jit
def remaining(now, pos, until, decay):
    """What a query counts for in a moving average after the last one: a token's own query at first whole, as the others (1 - decay)."""
    return tl.where(now == pos, 1.0, _share(decay)) * _decayed(until - now, decay)


@triton.jit
def averaged(old, x, pos, since, until, decay):
    """A moving average that `x` has joined, from before; a slot whose own query is among the new ones has none."""
    return tl.where(since == pos, x, old * _decayed(until - since + 1, decay) + x)


@triton.jit
def _share(decay):
    return (1.0 - (tl.zeros([], tl.float64) + decay)).to(tl.float32)


@triton.jit
def _decayed(steps, decay):
    """Decay ** steps. Thousands of steps ask for a logarithm in double precision."""
    rate = tl.log2(tl.zeros([], tl.float64) + decay).to(tl.float32)
    return tl.where(steps == 0, 1.0, tl.exp2(steps.to(tl.float32) * rate))
